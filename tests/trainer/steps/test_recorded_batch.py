"""What the objective sees of a recorded step, without Megatron."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from grpo_megatron.batching.manifest import StepFacts
from grpo_megatron.batching.store import (
    SampleRow,
    SampleTable,
    begin_step,
    finish_step,
    write_shard,
)
from grpo_megatron.trainer.steps.recorded_batch import sample_batch
from grpo_megatron.types import Completion, Prompt, RolloutGroup, Turn, VersionSpan
from tests.config.conftest import unchecked_config


def recorded(directory: Path, *, stale: bool) -> SampleTable:
    """Step 7 with two samples: of versions 7 and 5, and an episode of 4 with two environment
    tokens."""
    working = begin_step(directory)

    def completion(spans: list[tuple[int, int, int]], turns: tuple[Turn, ...] = ()) -> Completion:
        size = spans[-1][2]
        logprobs = np.full(size, -1.0, np.float32)
        if turns:
            logprobs[turns[0].end : turns[1].start] = np.nan
        versions = tuple(VersionSpan(*span) for span in spans)
        return Completion(np.zeros(size, np.int32), logprobs, versions, "stop", "", turns=turns)

    first = completion([(7, 0, 2), (5, 2, 3)])
    second = completion([(4, 0, 6)], (Turn(0, 1), Turn(3, 6)))
    prompt = Prompt("0", "arithmetic", "", (1, 2), "")
    group = RolloutGroup(prompt, (first, second), 0)
    shard = write_shard(working / "rollout-0.safetensors", [group], None)
    rows = [SampleRow(0, number, 0, 0, 1.0, 0) for number in range(2)]
    finish_step(directory, [shard], rows, StepFacts(step=7, stale=stale), {"exact_match": [1, 0]})
    return SampleTable(directory)


@pytest.mark.parametrize(
    ("proximal", "stale", "expected"),
    [
        ("interpolated", True, [0, 0, 2, 3, 3, 3, 3]),
        ("interpolated", False, None),
        ("recompute", True, None),
    ],
)
def test_policy_tokens_have_the_age_of_the_weights_that_sampled_them(
    tmp_path, proximal, stale, expected
):
    table = recorded(tmp_path / "step_000007", stale=stale)
    batch = sample_batch(unchecked_config(f"objective.proximal={proximal}"), table)
    if expected is None:
        assert batch.staleness is None
    else:
        assert batch.staleness.tolist() == expected
