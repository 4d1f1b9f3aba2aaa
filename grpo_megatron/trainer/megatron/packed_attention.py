"""Packed (thd) causal attention on torch SDPA: short sequences in padded batches, exactly.

One SDPA call per sequence is slow when a micro-batch holds hundreds of short ones. Sequences of
similar length share a call, padded at the end: causal attention never looks at later positions,
so the padding changes no real token, and its outputs are dropped."""

import itertools
import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig

from grpo_megatron.device_copies import to_device


@dataclass(frozen=True)
class Bucket:
    """`batch` sequences of at most `length` tokens."""

    rows: torch.Tensor | None  # int64 [batch * length], padding repeats row 0; None: see `start`
    start: int  # without rows: it is the tokens [start, start + batch * length), no copy needed
    batch: int
    length: int

    def take(self, x: torch.Tensor) -> torch.Tensor:
        """Take the tokens of its sequences: [T, heads, d] to [batch, heads, length, d]."""
        if self.rows is None:
            end = self.start + self.batch * self.length
            x = x[self.start : end]
        else:
            x = x.index_select(0, self.rows)
        return x.view(self.batch, self.length, *x.shape[1:]).transpose(1, 2)


def plan_buckets(
    bounds: list[int], device: torch.device, growth: float = 1.25
) -> tuple[list[Bucket], torch.Tensor | None]:
    """Group sequences whose lengths differ by at most the factor `growth`; bounds: cumulative
    lengths, [num_sequences + 1], starting at 0. Returns buckets, and where each token's output is
    in their concatenation, int64 [T] on `device`; None: where it is already."""
    order = torch.empty(bounds[-1], dtype=torch.int64)
    buckets = []
    base = 0
    for group in _similar_lengths(bounds, growth):
        lengths, starts = torch.tensor(group).unbind(1)
        longest, _ = group[-1]
        column = torch.arange(longest)
        rows = starts[:, None] + column
        real = column < lengths[:, None]
        order[rows[real]] = base + torch.arange(real.numel()).view_as(real)[real]
        rows = torch.where(real, rows, 0).flatten()
        first = int(starts[0])
        bucket_rows: torch.Tensor | None = None
        are_adjacent = torch.equal(rows, torch.arange(first, first + len(rows)))
        if not are_adjacent:
            bucket_rows = to_device(rows, device)
        buckets.append(Bucket(bucket_rows, first, len(group), longest))
        base += real.numel()
    if torch.equal(order, torch.arange(base)):
        return buckets, None
    return buckets, to_device(order, device)


def _bounds(packed: Any) -> list[int]:
    """Return cumulative lengths: what `build_microbatch` left on the host, else from the device."""
    bounds: list[int] | None = getattr(packed, "bounds_on_host", None)
    if bounds is None:
        bounds = packed.cu_seqlens_q.tolist()
    return bounds


def _similar_lengths(bounds: list[int], growth: float) -> list[list[tuple[int, int]]]:
    """Group the sequences between `bounds`, as (length, start), by length; empty ones are in none.

    Lengths of a group ascend from the first up to `growth` times it, or up to 4."""
    spans = []
    for start, end in itertools.pairwise(bounds):
        if end > start:
            spans.append((end - start, start))
    groups: list[list[tuple[int, int]]] = []
    limit = 0.0
    for length, start in sorted(spans):
        if not groups or length > limit:
            groups.append([])
            limit = max(length * growth, 4)
        groups[-1].append((length, start))
    return groups


class PackedAttention(MegatronModule):  # type: ignore[misc]  # Megatron has no types
    """Drop-in core attention without Transformer Engine. Causal; GQA and MLA value sizes.

    Raises ValueError for a window or a learnable softmax."""

    def __init__(
        self,
        config: TransformerConfig,
        *_: Any,
        softmax_scale: float | None = None,
        k_channels: int | None = None,
        **__: Any,
    ):
        super().__init__(config=config)
        if config.softmax_type != "vanilla" or config.window_size is not None:
            raise ValueError("sliding windows and learnable softmax need Transformer Engine")
        self.scale = softmax_scale or 1.0 / math.sqrt(k_channels or config.kv_channels)

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        packed_seq_params: PackedSeqParams,
        **_: Any,
    ) -> torch.Tensor:
        """Attend within sequences: q, k, v [T, heads, d], packed, to [T, heads * d_v]."""
        if getattr(packed_seq_params, "bucket_plan", None) is None:
            # the same in every layer: kept on the parameters of the batch
            bounds = _bounds(packed_seq_params)
            packed_seq_params.bucket_plan = plan_buckets(bounds, query.device)
        buckets, order = packed_seq_params.bucket_plan
        outputs = []
        for bucket in buckets:
            q = bucket.take(query)
            k = bucket.take(key)
            v = bucket.take(value)
            found = F.scaled_dot_product_attention(
                q, k, v, is_causal=True, scale=self.scale, enable_gqa=q.size(1) != k.size(1)
            )
            outputs.append(found.transpose(1, 2).flatten(0, 1))  # from [b, heads, s, d_v]
        output = outputs[0]
        if len(outputs) > 1:
            output = torch.cat(outputs)
        if order is not None:
            output = output.index_select(0, order)
        return output.flatten(1)
