"""What an objective of turns adds to a step is within the plan."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.trace

AGENT = (
    "domains.0.template=chat",
    "domains.0.environment.name=calculator",
    "objective.preset=gigpo",
    "objective.ratio=turn_geo",
)


def test_objectives_of_turns(world1, tmp_path):
    found = world1.run(
        "tests.trace.cases:compared",
        folder=str(tmp_path),
        preset="qwen3-8b",
        trainer={"num_ranks": 4, "tensor_parallel_size": 4},
        settings=AGENT,
    )
    assert not any(found["differences"].values()), found
    assert found["num_numbers"] >= 6
