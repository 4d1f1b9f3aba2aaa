"""What a packed micro-batch holds, by hand: places, targets, kept sets, padding."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from grpo_megatron.batching.manifest import StepFacts
from grpo_megatron.batching.store import (
    SampleRow,
    SampleTable,
    begin_step,
    finish_step,
    write_shard,
)
from grpo_megatron.trainer.megatron import platform  # noqa: F401  (before anything of Megatron)

# isort: split
from grpo_megatron.trainer.steps.microbatch import MicroBatch, build_microbatch
from grpo_megatron.types import Completion, Prompt, RolloutGroup, SamplingMask, VersionSpan

PROMPTS = [(11, 12, 13), (21,)]
COMPLETIONS = [[(31, 32), (41,)], [(51, 52, 53)]]
"""Of both prompts; rows of the table are 0 and 1 of the first, 2 of the second."""


def completion(ids: tuple[int, ...], mask: SamplingMask | None) -> Completion:
    logprobs = -np.array(ids, np.float32) / 64
    spans = (VersionSpan(1, 0, len(ids)),)
    return Completion(np.array(ids, np.int32), logprobs, spans, "stop", "", kept=mask)


def table(directory: Path, masks: dict[int, SamplingMask] | None = None) -> SampleTable:
    """Every group in a shard of its own; masks: by row."""
    working = begin_step(directory)
    shards, rows = [], []
    for number, (prompt, completions) in enumerate(zip(PROMPTS, COMPLETIONS, strict=True)):
        made = []
        for index, ids in enumerate(completions):
            made.append(completion(ids, (masks or {}).get(len(rows))))
            rows.append(SampleRow(number, index, number, 0, 0.0))
        group = RolloutGroup(Prompt("p", "d", "", prompt, ""), tuple(made), 0)
        shards.append(write_shard(working / f"rollout-{number}.safetensors", [group]))
    finish_step(directory, shards, rows, StepFacts())
    return SampleTable(directory)


def build(samples: SampleTable, rows: list[int], pad_to: int = 1) -> MicroBatch:
    where = torch.device("cpu")
    return build_microbatch(3, samples, np.array(rows, np.int64), pad_to=pad_to, device=where)


def test_samples_lie_end_to_end(tmp_path):
    found = build(table(tmp_path / "step"), [2, 0])
    assert found.tokens.tolist() == [[21, 51, 52, 53, 11, 12, 13, 31, 32]]
    assert found.position_ids.tolist() == [[0, 1, 2, 3, 0, 1, 2, 3, 4]]
    assert found.packed.cu_seqlens_q.tolist() == [0, 4, 9]
    assert found.packed.cu_seqlens_kv.tolist() == [0, 4, 9]
    assert found.packed.cu_seqlens_q.dtype == torch.int32
    assert found.packed.max_seqlen_q == found.packed.max_seqlen_kv == 5
    assert found.lengths == (4, 5)
    assert (found.index, found.table_rows.tolist(), found.num_tokens) == (3, [2, 0], 9)


def test_a_policy_token_is_the_one_after_its_row(tmp_path):
    found = build(table(tmp_path / "step"), [2, 0, 1])
    assert found.targets.tolist() == [51, 52, 53, 31, 32, 41]
    assert found.predicting.tolist() == [0, 1, 2, 6, 7, 11]
    assert found.tokens[0, found.predicting + 1].tolist() == found.targets.tolist()
    assert found.sample.tolist() == [0, 0, 0, 1, 1, 2]
    assert found.rollout_logprobs.tolist() == [-n / 64 for n in (51, 52, 53, 31, 32, 41)]
    assert found.kept is None


@pytest.mark.parametrize(
    ("rows", "pad_to", "total"),
    [([0, 1], 8, 16), ([0, 1], 9, 9), ([0], 1, 5), ([0], 2, 6), ([2], 4, 4)],
)
def test_padding_is_a_sequence_of_its_own(tmp_path, rows, pad_to, total):
    found = build(table(tmp_path / "step"), rows, pad_to)
    used = sum(found.lengths)
    assert found.num_tokens == total and len(found.lengths) == len(rows)
    assert not found.tokens[0, used:].any()
    assert found.position_ids[0, used:].tolist() == list(range(total - used))
    assert int(found.packed.cu_seqlens_q[-1]) == total
    assert len(found.packed.cu_seqlens_q) == len(rows) + 1 + (total > used)
    assert int(found.predicting.max()) < used


def test_a_rank_without_samples_computes_padding_only(tmp_path):
    found = build(table(tmp_path / "step"), [], 4)
    assert found.tokens.tolist() == [[0] * 4]
    assert found.packed.cu_seqlens_q.tolist() == [0, 4]
    assert found.lengths == ()
    for column in (found.predicting, found.targets, found.sample, found.rollout_logprobs):
        assert column.shape == (0,)
    assert found.predicting.dtype == found.targets.dtype == torch.int64


def test_the_longest_sequence_may_be_the_padding(tmp_path):
    found = build(table(tmp_path / "step"), [1], 64)
    assert found.packed.max_seqlen_q == 60


def mask(*sets: tuple[int, ...]) -> SamplingMask:
    """One set of ids a token."""
    ids = np.array([i for of_token in sets for i in of_token], np.int32)
    return SamplingMask(ids, np.cumsum([0, *map(len, sets)]))


def test_kept_sets_are_joined_and_tokens_outside_of_theirs_are_unusable(tmp_path):
    """Row 1 has no sets at all; the second token of row 0 is not in its set, that of 2 is empty."""
    masks = {0: mask((7, 31), (8, 9)), 2: mask((51,), (), (5, 53, 6))}
    found = build(table(tmp_path / "step", masks), [0, 1, 2])
    assert found.kept is not None
    assert found.kept.ids.tolist() == [7, 31, 8, 9, 51, 5, 53, 6]
    assert found.kept.token.tolist() == [0, 0, 1, 1, 3, 5, 5, 5]
    assert found.kept.missing.tolist() == [False, True, True, False, True, False]
    usable = torch.isfinite(found.rollout_logprobs)
    assert usable.tolist() == [True, False, False, True, False, True]
    assert found.rollout_logprobs[usable].tolist() == [-n / 64 for n in (31, 51, 53)]


@pytest.mark.parametrize("rows", [[0, 2], [2, 0]])
def test_tokens_of_a_shard_without_sets_are_unusable_beside_one_with(tmp_path, rows):
    found = build(table(tmp_path / "step", {0: mask((31,), (32, 6))}), rows)
    assert found.kept is not None
    first = 3 * rows.index(0)  # of row 0 among the policy tokens
    assert found.kept.ids.tolist() == [31, 32, 6]
    assert found.kept.token.tolist() == [first, first + 1, first + 1]
    known = [first <= token < first + 2 for token in range(5)]
    assert (~found.kept.missing).tolist() == known
    assert torch.isfinite(found.rollout_logprobs).tolist() == known
    alone = build(table(tmp_path / "other", {0: mask((31,), (32, 6))}), [2])
    assert alone.kept is None and torch.isfinite(alone.rollout_logprobs).all()
