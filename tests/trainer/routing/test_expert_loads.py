"""Micro-batches are chosen by the routes that the store has."""

from __future__ import annotations

import numpy as np
import pytest

pytestmark = pytest.mark.engine

LOADS = "tests.trainer.routing_ranks:loads_in_microbatches"
R3 = {"replay": "r3", "on_missing": "fail"}
SEVERAL = {"max_tokens_per_microbatch": 64}
"""Micro-batches of every rank: with one there would be nothing to choose."""


@pytest.mark.parametrize(
    ("layout", "ranks_per_group"),
    [
        ({"expert_parallel_size": 2}, 2),
        ({"expert_parallel_size": 4}, 4),
        ({"expert_parallel_size": 2, "tensor_parallel_size": 2}, 2),
    ],
    ids=["ep2", "ep4", "tp2_ep2"],
)
def test_what_is_planned_is_what_ranks_get(world4, routed, layout, ranks_per_group):
    model, samples = routed
    layout = SEVERAL | layout
    found = world4.run(LOADS, model=model, samples=samples, layout=layout, routing=R3)
    groups = np.stack(found["loads"])
    groups = groups.reshape(-1, ranks_per_group, *groups.shape[1:]).sum(1)
    seen = groups.max(-1).sum() / groups.mean(-1).sum()
    planned = found["metrics"]
    assert seen == pytest.approx(planned["routing/rank_imbalance"])
    assert seen < planned["routing/rank_imbalance_by_cost"]
    rows = sorted(row for of_rank in found["table_rows"] for rows in of_rank for row in rows)
    assert rows == list(range(24))


def test_it_can_be_switched_off(world2, routed):
    model, samples = routed
    layout = SEVERAL | {"expert_parallel_size": 2}
    off = R3 | {"level_experts": False}
    found = world2.run(LOADS, model=model, samples=samples, layout=layout, routing=off)
    assert found["metrics"] == {}
    unknown = world2.run(LOADS, model=model, samples=samples, layout=layout, routing={})
    assert unknown["metrics"] == {}
    assert found["table_rows"] == unknown["table_rows"]
