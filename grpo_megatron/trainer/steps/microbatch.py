"""From recorded samples to the tensors of one packed micro-batch.

Shape legend: T packed tokens (with padding), S samples, n policy tokens."""

from dataclasses import dataclass, field

import numpy as np
import torch
from megatron.core.packed_seq_params import PackedSeqParams

from grpo_megatron.batching.store import SampleTable
from grpo_megatron.trainer.vocab_parallel.divergence import TeacherTokens
from grpo_megatron.trainer.vocab_parallel.logprobs import Kept
from grpo_megatron.types import SamplingMask


@dataclass
class MicroBatch:
    """Samples laid end to end, and their policy tokens."""

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
    kept: Kept | None = None  # of truncated sampling
    teachers: list[TeacherTokens] = field(default_factory=list)  # see `trainer.steps.teachers`

    @property
    def num_tokens(self) -> int:
        return self.tokens.size(1)


def build_microbatch(
    index: int, table: SampleTable, table_rows: np.ndarray, *, pad_to: int, device: torch.device
) -> MicroBatch:
    """Pack `table_rows`; pad the total to a multiple of `pad_to` with a sequence of its own."""
    sequences = []
    rows = []
    targets = []
    behaviour = []
    sets = []
    start = 0
    for row in table_rows.tolist():
        prompt = table.prompt_ids(row)
        completion, logprobs = table.completion(row)
        sequences.append(np.concatenate([prompt, completion]))
        rows.append(np.arange(len(completion)) + start + len(prompt) - 1)
        targets.append(completion)
        behaviour.append(logprobs)
        sets.append(table.kept(row))
        start += len(sequences[-1])
    padding = -start % pad_to if start else pad_to
    if padding:
        sequences.append(np.zeros(padding, np.int64))
    lengths = [len(s) for s in sequences]
    counts = np.array([len(t) for t in targets], np.int64)

    def flat(parts: list[np.ndarray], dtype: torch.dtype) -> torch.Tensor:
        joined = np.concatenate(parts) if parts else np.empty(0)
        return torch.as_tensor(joined).to(device=device, dtype=dtype)

    kept = None
    if any(s is not None for s in sets):
        token, ids, known = _joined_sets(sets, targets)
        behaviour = [np.where(known, np.concatenate(behaviour), -np.inf)]
        kept = Kept(
            flat([token], torch.int64), flat([ids], torch.int64), flat([~known], torch.bool)
        )
    cumulative = flat([np.array([0]), np.cumsum(lengths)], torch.int32)
    return MicroBatch(
        kept=kept,
        index=index,
        table_rows=table_rows,
        lengths=tuple(lengths[: len(table_rows)]),
        tokens=flat(sequences, torch.int64)[None],
        position_ids=flat([np.arange(n) for n in lengths], torch.int64)[None],
        packed=PackedSeqParams(
            qkv_format="thd",
            cu_seqlens_q=cumulative,
            cu_seqlens_kv=cumulative,
            max_seqlen_q=max(lengths),
            max_seqlen_kv=max(lengths),
        ),
        rows=flat(rows, torch.int64),
        targets=flat(targets, torch.int64),
        sample=flat([np.repeat(np.arange(len(counts)), counts)], torch.int64),
        rollout_logprobs=flat(behaviour, torch.float32),
    )


def _joined_sets(
    sets: list[SamplingMask | None], targets: list[np.ndarray]
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Token and id of every entry, in order; and bool [n], whether the token is in its set."""
    sizes = np.concatenate(
        [
            np.zeros(len(t), np.int64) if s is None else s.sizes
            for s, t in zip(sets, targets, strict=True)
        ]
    )
    ids = np.concatenate([s.ids for s in sets if s is not None])
    token = np.repeat(np.arange(len(sizes)), sizes)
    return token, ids, np.bincount(token, ids == np.concatenate(targets)[token], len(sizes)) > 0
