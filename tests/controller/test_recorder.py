"""Where step rewards land among the tokens."""

from __future__ import annotations

import numpy as np
import pytest

from grpo_megatron.batching.store import SampleTable, ShardWriter, begin_step
from grpo_megatron.controller.recorder import record_step, token_at
from grpo_megatron.types import Completion, Prompt, RolloutGroup, ScoredGroup, VersionSpan

WORDS = {0: "", 1: "a", 2: "bc", 3: "def"}


def decode(ids) -> str:
    return "".join(WORDS[i] for i in ids)


@pytest.mark.parametrize(("end", "token"), [(0, 0), (1, 0), (2, 1), (3, 1), (4, 3), (6, 3),
                                            (99, 3)])
def test_the_token_that_reaches_a_place(end, token):
    assert token_at(np.array([1, 2, 0, 3]), end, decode) == token


def test_steps_are_recorded_by_row(tmp_path):
    def completion(*ids):
        return Completion(np.array(ids, np.int32), np.zeros(len(ids), np.float32),
                          (VersionSpan(0, 0, len(ids)),), "stop", decode(ids))

    def scored(name, completions, steps):
        group = RolloutGroup(Prompt(name, "d", "", (1,), ""), completions, 0)
        rewards = np.arange(len(completions), dtype=float)
        return ScoredGroup(group, {"r": rewards}, rewards, steps)

    groups = [scored("p", (completion(1, 2), completion(3,)), (((1, 0.5), (3, 0.25)), ())),
              scored("q", (completion(2, 3), completion()), ()),
              scored("s", (completion(3, 1), completion()), (((4, 1.0),), ((0, 9.0),)))]
    directory = tmp_path / "step_000001"
    writer = ShardWriter(begin_step(directory) / "rollout-0.safetensors")
    for group in groups:
        writer.append(group.group)
    record_step(directory, groups, [(0, 0), (0, 2), (0, 4)], [writer.close()],
                np.zeros(3, int), ["d"], {"stale": False}, decode)
    row, end, reward = SampleTable(directory).steps
    assert list(zip(row.tolist(), end.tolist(), reward.tolist(), strict=True)) == [
        (0, 0, 0.5), (0, 1, 0.25), (4, 1, 1.0)]
