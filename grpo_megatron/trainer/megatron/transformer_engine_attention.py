"""Packed (thd) attention of Transformer Engine: rows with branches and parts of rows, and torch's
where it has no kernel.

Queries of a segment, or of a piece of one, attend to gathered keys and values of what is above it
and its own. What a row is: `packed_attention`."""

import copy
import enum
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.transformer_config import TransformerConfig

from grpo_megatron.device_copies import to_device
from grpo_megatron.trainer.megatron.context_parallel import gather_end_to_end
from grpo_megatron.trainer.megatron.packed_attention import (
    PackedAttention,
    RowPart,
    planned_buckets,
)
from grpo_megatron.trainer.megatron.row_context import row_of

logger = logging.getLogger(__name__)


class _MaskType(enum.Enum):
    """What `AttnMaskType` lacks of Transformer Engine's masks, which go by their names."""

    padding_causal_bottom_right = 1


class AttentionWithoutKernel(PackedAttention):
    """Attends where no kernel of Transformer Engine's takes what is computed.

    It would then multiply all pairs of all samples' padded tokens ("unfused"): an H100 was out of
    memory at 16k tokens, and busy with padding before (docs/gpu-measurements.md)."""

    def __init__(self, config: TransformerConfig, *args: Any, **settings: Any):
        super().__init__(config, *args, **settings)
        self._row: _Row | None = None

    @contextmanager
    def may_get(self, row: "_Row") -> Iterator[None]:
        """Know what is computed while Transformer Engine chooses: it calls with tensors and lengths
        in an order of its own."""
        self._row = row
        try:
            yield
        finally:
            self._row = None

    def forward(self, *_: Any, **__: Any) -> torch.Tensor:
        """Attend within the samples of the row that may be got: to [T / C, heads * d_v]."""
        row = self._row
        assert row is not None  # Transformer Engine calls within `may_get`
        _say_no_kernel()
        plan = planned_buckets(row.packed, row.query)
        key = row.key
        value = row.value
        if plan.order_of_keys is not None:
            key = key.index_select(0, plan.order_of_keys)
            value = value.index_select(0, plan.order_of_keys)
        return self.attend(plan, row.query, key, value)


@dataclass(frozen=True)
class _Row:
    """What attention is asked to compute."""

    query: torch.Tensor
    """[T / C, heads, d]."""
    key: torch.Tensor
    """[T, heads, d], of all ranks that share the row, end to end."""
    value: torch.Tensor
    packed: Any


@cache
def _say_no_kernel() -> None:
    logger.warning(
        "attention: no kernel of Transformer Engine takes what is computed, torch's SDPA computes "
        "it; NVTE_DEBUG=1 NVTE_DEBUG_LEVEL=2 says why none does, and installing flash-attn may help"
    )


@cache
def with_gathered_keys(core_attention: type[Any]) -> type[Any]:
    """Make a class of Transformer Engine's attention that takes rows with branches, and parts.

    Queries of a segment, or of a piece of one, attend to gathered keys and values of what is above
    it and its own: variable lengths that differ between queries and keys, causal from the bottom
    right. Its own context parallelism (`cp_comm_type`) knows neither branches nor our split, and is
    off."""

    class TESharedPrefixAttention(core_attention):  # type: ignore[misc]
        """`core_attention`, before which keys and values of shared prefixes are gathered, and those
        of context-parallel ranks."""

        def __init__(self, config: TransformerConfig, *args: Any, **settings: Any):
            if config.context_parallel_size > 1:
                config = copy.copy(config)
                config.context_parallel_size = 1
            super().__init__(config, *args, **settings)
            self.unfused_attention = AttentionWithoutKernel(config, *args, **settings)

        def forward(
            self,
            query: torch.Tensor,
            key: torch.Tensor,
            value: torch.Tensor,
            attention_mask: torch.Tensor | None,
            attn_mask_type: Any,
            packed_seq_params: PackedSeqParams | None = None,
            **settings: Any,
        ) -> torch.Tensor:
            """Attend within samples: q, k, v [T / C, heads, d], packed, to [T / C, heads * d_v].

            Collective where ranks share rows."""
            packed: Any = packed_seq_params
            context = row_of(packed)
            part = context.part
            if part is not None and not part.split.is_whole:
                key = gather_end_to_end(key)
                value = gather_end_to_end(value)
            row = _Row(query, key, value, packed)
            if part is not None and part.needs_gathered_keys:
                if context.gathered_keys is None:
                    context.gathered_keys = gather_keys(part, query.device)
                gathered = context.gathered_keys
                key = key.index_select(0, gathered.rows)
                value = value.index_select(0, gathered.rows)
                packed = gathered.packed
                attn_mask_type = _MaskType.padding_causal_bottom_right
            with self.unfused_attention.may_get(row):
                output: torch.Tensor = super().forward(
                    query,
                    key,
                    value,
                    attention_mask,
                    attn_mask_type=attn_mask_type,
                    packed_seq_params=packed,
                    **settings,
                )
            return output

    return TESharedPrefixAttention


@dataclass(frozen=True)
class GatheredKeys:
    """Keys of the path of every segment, or piece of one, one path after the other."""

    rows: torch.Tensor
    """Where they are in the row, or in what the ranks that share it gather: int64."""
    packed: PackedSeqParams
    """Lengths of segments for the queries, of paths for keys and values."""


def gather_keys(part: RowPart, device: torch.device) -> GatheredKeys:
    """Say which keys and values the segments of a row attend to, as far as they are computed
    here."""
    segments = list(part.segments())
    paths = [np.concatenate([segment.prefix, segment.own]) for segment in segments]
    query_lengths = [len(segment.own) for segment in segments]
    key_lengths = [len(path) for path in paths]
    packed = PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=to_device(_cumulative(query_lengths), device),
        cu_seqlens_kv=to_device(_cumulative(key_lengths), device),
        max_seqlen_q=max(query_lengths),
        max_seqlen_kv=max(key_lengths),
    )
    rows = np.concatenate(paths)
    if not part.split.is_whole:
        rows = part.split.gathered_places[rows]
    return GatheredKeys(to_device(torch.from_numpy(rows), device), packed)


def _cumulative(lengths: Sequence[int]) -> torch.Tensor:
    """Return where sequences begin, and the end of the last: int32 [number of sequences + 1]."""
    return torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32)
