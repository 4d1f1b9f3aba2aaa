"""Write a batch of scored rollouts as one immutable step of the sample store."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from grpo_megatron.batching.store import (
    SampleRow,
    ShardInfo,
    ShardWriter,
    begin_step,
    finish_step,
)
from grpo_megatron.types import Completion, Prompt, RolloutGroup, ScoredGroup, VersionSpan


def record_step(directory: Path, groups: Sequence[ScoredGroup],
                places: Sequence[tuple[int, int]], shards: Sequence[ShardInfo],
                advantages: np.ndarray, trained: Sequence[np.ndarray], updates: np.ndarray,
                manifest: dict) -> None:
    """Finish a step whose shards are already in its working directory.

    Args:
        places: per group, (shard, index of its first sample in that shard).
        advantages: float64 [N], group by group.
        trained: per group bool [G]; the other samples get no row.
        updates: int [Q], the optimizer step of each group.
    """
    rows, sample = [], 0
    for number, (group, (shard, first)) in enumerate(zip(groups, places, strict=True)):
        for offset, reward in enumerate(group.rewards):
            if trained[number][offset]:
                rows.append(SampleRow(shard, first + offset, number, int(updates[number]),
                                      float(reward), float(advantages[sample])))
            sample += 1
    finish_step(directory, shards, rows, manifest)


def record_supervised(directory: Path, batches: Sequence[Sequence[tuple[Prompt, list[int]]]],
                      ) -> None:
    """Prompts with the tokens they should be answered with; one optimizer step per batch."""
    working = begin_step(directory)
    writer, rows = ShardWriter(working / "supervised-0.safetensors"), []
    for update, batch in enumerate(batches):
        for prompt, answer in batch:
            index = writer.append(_group(prompt, answer))
            rows.append(SampleRow(0, index, index, update, 0.0, 0.0))
    finish_step(directory, [writer.close()], rows, {"kind": "supervised", "stale": False})


def record_completions(directory: Path, pairs: Sequence[tuple[Prompt, Completion]]) -> None:
    """Completions whose log-probs the trainer shall compute, one sample each."""
    working = begin_step(directory)
    writer = ShardWriter(working / "completions-0.safetensors")
    rows = [SampleRow(0, i := writer.append(RolloutGroup(prompt, (completion,), 0)), i, 0, 0.0,
                      0.0) for prompt, completion in pairs]
    finish_step(directory, [writer.close()], rows, {"kind": "completions", "stale": False})


def prune_store(store: Path, keep_from: int) -> None:
    """Remove recorded steps before `keep_from`."""
    for path in store.glob("step_*"):
        if path.name[5:].isdigit() and int(path.name[5:]) < keep_from:
            shutil.rmtree(path, ignore_errors=True)


def _group(prompt: Prompt, answer: list[int]) -> RolloutGroup:
    completion = Completion(np.asarray(answer, np.int32), np.zeros(len(answer), np.float32),
                            (VersionSpan(0, 0, len(answer)),), "stop", "")
    return RolloutGroup(prompt, (completion,), 0)
