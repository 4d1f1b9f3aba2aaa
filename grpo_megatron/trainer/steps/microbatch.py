"""From recorded samples to the packed tensors of one optimizer step.

`SampleTable -> MicroBatch`, several of them an `UpdateBatch`; `grpo_megatron.types` shows the whole
chain with an example.

Shape legend: T packed tokens (with padding), S samples, n policy tokens."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from megatron.core import parallel_state
from megatron.core.packed_seq_params import PackedSeqParams

from grpo_megatron.batching.store import SampleTable
from grpo_megatron.device_copies import to_device
from grpo_megatron.trainer.vocab_parallel.divergence import TeacherTokens
from grpo_megatron.trainer.vocab_parallel.logprobs import KeptIds
from grpo_megatron.types import SamplingMask

if TYPE_CHECKING:
    from grpo_megatron.trainer.routing.router_replay import Routes, RoutingPass


@dataclass
class MicroBatch:
    """Samples laid end to end, their policy tokens, and what passes before the loss found on them.

    Where a pass has no output on this rank (`is_output_rank`), what it found is empty."""

    index: int  # position in this rank's plan
    table_rows: np.ndarray  # int64 [S]
    lengths: tuple[int, ...]  # [S], prompt and completion tokens; padding follows
    tokens: torch.Tensor  # int64 [1, T]
    position_ids: torch.Tensor  # int64 [1, T]
    packed: PackedSeqParams
    rows: torch.Tensor  # int64 [n]: the position before each policy token
    targets: torch.Tensor  # int64 [n]: the policy tokens
    sample: torch.Tensor  # int64 [n], 0..S-1
    rollout_logprobs: torch.Tensor  # fp32 [n]; minus infinity: unusable
    kept: KeptIds | None = None  # of truncated sampling
    # what passes found
    old_logprobs: torch.Tensor | None = None
    """fp32 [n], of the old policy; None: the current policy is the old one."""
    old_untruncated_logprobs: torch.Tensor | None = None
    """fp32 [n], over the whole vocabulary; as `old_logprobs` unless sampling truncates."""
    old_entropies: torch.Tensor | None = None
    """fp32 [n], of the old policy."""
    old_squared_probs: torch.Tensor | None = None
    """fp32 [n], sums of the old policy's squared probabilities; None: advantages need none."""
    ref_logprobs: torch.Tensor | None = None
    """fp32 [n], of the reference, not truncated; None: the objective does not want them."""
    teachers: list[TeacherTokens] = field(default_factory=list)
    """What the teachers of a distillation think of the tokens (`trainer.steps.teachers`)."""

    @property
    def num_tokens(self) -> int:
        """T, with padding."""
        return self.tokens.size(1)


@dataclass
class UpdateBatch:
    """This rank's micro-batches of one optimizer step."""

    rows: torch.Tensor
    """int64, ascending: the samples of all ranks in its loss. Micro-batches may hold more, of which
    only advantages need the tokens."""
    microbatches: Sequence[MicroBatch]
    num_tokens: int
    """Prompt and policy tokens of all ranks."""
    routes: list[Routes] | None = None
    """The engine's, of each micro-batch."""
    old_routing: RoutingPass | None = None
    """What the routers did in the old policy's pass."""

    @property
    def loss_scale(self) -> float:
        """Undoes the averages over micro-batches (Megatron) and over data parallelism."""
        num_replicas = int(parallel_state.get_data_parallel_world_size())
        return float(len(self.microbatches) * num_replicas)


def build_microbatch(
    index: int, table: SampleTable, table_rows: np.ndarray, *, pad_to: int, device: torch.device
) -> MicroBatch:
    """Pack `table_rows`; pad the total to a multiple of `pad_to` with a sequence of its own.

    index: position in the rank's plan. Without rows there is nothing but padding."""
    sequences = []
    rows = []
    targets = []
    rollout_logprobs = []
    masks = []
    start = 0
    for row in table_rows.tolist():
        prompt = table.prompt_ids(row)
        completion, logprobs = table.completion(row)
        sequences.append(np.concatenate([prompt, completion]))
        rows.append(np.arange(len(completion)) + start + len(prompt) - 1)
        targets.append(completion)
        rollout_logprobs.append(logprobs)
        masks.append(table.kept(row))
        start += len(prompt) + len(completion)
    padding = -start % pad_to
    if start == 0:
        padding = pad_to
    if padding:
        sequences.append(np.zeros(padding, np.int64))
    lengths = [len(sequence) for sequence in sequences]
    counts = np.array([len(target) for target in targets], np.int64)

    def flat(parts: list[np.ndarray], dtype: torch.dtype) -> torch.Tensor:
        joined = np.empty(0)
        if parts:
            joined = np.concatenate(parts)
        return to_device(torch.as_tensor(joined).to(dtype), device)

    kept = None
    if any(mask is not None for mask in masks):
        token, ids, known = _joined_masks(masks, targets)
        usable = np.where(known, np.concatenate(rollout_logprobs), -np.inf)
        rollout_logprobs = [usable]
        kept = KeptIds(
            token=flat([token], torch.int64),
            ids=flat([ids], torch.int64),
            missing=flat([~known], torch.bool),
            token_on_host=token,
        )
    bounds = [0, *itertools.accumulate(lengths)]
    cumulative = flat([np.array(bounds)], torch.int32)
    packed: Any = PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=cumulative,
        cu_seqlens_kv=cumulative,
        max_seqlen_q=max(lengths),
        max_seqlen_kv=max(lengths),
    )
    packed.bounds_on_host = bounds  # attention need not ask the device for them
    return MicroBatch(
        index=index,
        table_rows=table_rows,
        lengths=tuple(lengths[: len(table_rows)]),
        tokens=flat(sequences, torch.int64)[None],
        position_ids=flat([np.arange(length) for length in lengths], torch.int64)[None],
        packed=packed,
        rows=flat(rows, torch.int64),
        targets=flat(targets, torch.int64),
        sample=flat([np.repeat(np.arange(len(counts)), counts)], torch.int64),
        rollout_logprobs=flat(rollout_logprobs, torch.float32),
        kept=kept,
    )


def _joined_masks(
    masks: list[SamplingMask | None], targets: list[np.ndarray]
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Token and id of every entry, in order; and bool [n], whether the token is in its set."""
    sizes_of = []
    ids_of = []
    for mask, target in zip(masks, targets, strict=True):
        if mask is None:
            sizes_of.append(np.zeros(len(target), np.int64))
        else:
            sizes_of.append(mask.sizes)
            ids_of.append(mask.ids)
    sizes = np.concatenate(sizes_of)
    ids = np.concatenate(ids_of)
    token = np.repeat(np.arange(len(sizes)), sizes)
    is_target = ids == np.concatenate(targets)[token]
    known = np.bincount(token, is_target, len(sizes)) > 0
    return token, ids, known
