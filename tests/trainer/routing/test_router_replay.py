"""Replayed routes: exact at every layout, checked before use, with a gradient for the router."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest

from tests.trainer.test_layout_parity import assert_same

TRAIN = "tests.trainer.routing_ranks:train"
R3 = {"replay": "r3", "on_missing": "fail"}

LAYOUTS = {
    2: {
        "dp2": {},
        "tp2_sp": {"tensor_parallel_size": 2},
        "pp2": {"pipeline_parallel_size": 2},
        "pp2_recompute": {"pipeline_parallel_size": 2, "recompute": "full"},
        "ep2_selective": {"expert_parallel_size": 2, "recompute": "selective"},
    },
    4: {
        "pp2_vpp3_recompute": {
            "pipeline_parallel_size": 2,
            "virtual_pipeline_parallel_size": 3,
            "recompute": "full",
        },
        "etp2_ep2": {
            "tensor_parallel_size": 2,
            "expert_tensor_parallel_size": 2,
            "expert_parallel_size": 2,
        },
        "tp2_sp_pp2_recompute": {
            "tensor_parallel_size": 2,
            "pipeline_parallel_size": 2,
            "recompute": "full",
        },
    },
    8: {
        "tp2_sp_pp2_ep2": {
            "tensor_parallel_size": 2,
            "pipeline_parallel_size": 2,
            "expert_parallel_size": 2,
        }
    },
}
IN_CI = ("tp2_sp", "pp2_vpp3_recompute", "etp2_ep2", "tp2_sp_pp2_ep2")
CASES = [
    pytest.param(size, name, id=name, marks=() if name in IN_CI else pytest.mark.matrix)
    for size, layouts in LAYOUTS.items()
    for name in layouts
]


@pytest.fixture(scope="session")
def one_rank(world1, routed):
    model, samples = routed
    return world1.run(TRAIN, model=model, samples=samples, layout={}, routing=R3, spy=True)


def test_one_rank_applies_the_stored_routes(one_rank):
    assert one_rank["num_microbatches"] > 2
    assert one_rank["looked_at"] > 500
    assert one_rank["wrong_routes"] == 0
    assert one_rank["metrics"]["routing/rollout_slot_flip_rate"] > 0.3  # they are random


def test_live_routing_is_something_else(world1, routed, one_rank):
    model, samples = routed
    live = world1.run(TRAIN, model=model, samples=samples, layout={}, routing={}, spy=True)
    assert live["wrong_routes"] > 100
    assert abs(live["norms"][0] - one_rank["norms"][0]) > 1e-3 * one_rank["norms"][0]


@pytest.mark.parametrize(("size", "layout"), CASES)
def test_every_layout_equals_one_rank(request, routed, one_rank, size, layout):
    """Loss, every gradient, pre-clip norm, and the metrics of routing; several micro-batches."""
    model, samples = routed
    found = request.getfixturevalue(f"world{size}").run(
        TRAIN, model=model, samples=samples, layout=LAYOUTS[size][layout], routing=R3, spy=True
    )
    assert found["wrong_routes"] == 0
    assert found["looked_at"] >= one_rank["looked_at"]  # recomputed layers are looked at again
    assert_same(found, one_rank)
    for name, value in one_rank["metrics"].items():
        if name.startswith("routing/"):
            assert found["metrics"][name] == pytest.approx(value, rel=1e-4, abs=1e-6), name


def test_replaying_ones_own_routes_changes_nothing(world1, moe_model, three_updates):
    """r2 replays what the old-policy pass chose: exactly the first update's live choice."""
    live, r2 = (
        world1.run(
            TRAIN,
            model=moe_model,
            samples=three_updates,
            layout={},
            routing={"replay": replay},
            gradients=False,
        )
        for replay in ("none", "r2")
    )
    assert r2["losses"][0] == live["losses"][0]
    assert r2["norms"][0] == live["norms"][0]
    assert "routing/update_slot_flip_rate" in r2["metrics"]


@pytest.mark.parametrize(
    "layout", [{"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2, "recompute": "full"}]
)
def test_r2_at_two_ranks(world1, world2, moe_model, three_updates, layout):
    arguments = {"model": moe_model, "samples": three_updates, "routing": {"replay": "r2"}}
    assert_same(
        world2.run(TRAIN, layout=layout, **arguments),
        world1.run(TRAIN, layout={}, **arguments),
        3e-5,
    )


HOLD = {
    "kl": {"replay": "r3", "keep_loss": "kl", "keep_weight": 0.3},
    "set_mass": {"replay": "r3", "keep_loss": "set_mass", "keep_weight": 0.3},
    "cross_entropy": {"replay": "r3", "keep_loss": "cross_entropy", "keep_weight": 0.3},
    "balance": {"replay": "r3", "balance_weight": 0.3},
}


@pytest.mark.parametrize(
    ("size", "layout"),
    [
        pytest.param(2, "tp2_sp", marks=pytest.mark.matrix),
        pytest.param(2, "pp2_recompute", marks=pytest.mark.matrix),
        pytest.param(2, "ep2_selective", marks=pytest.mark.matrix),
        (8, "tp2_sp_pp2_ep2"),
    ],
)
@pytest.mark.parametrize("loss", ["set_mass", "balance"])
def test_losses_on_routers_at_every_layout(request, world1, routed, size, layout, loss):
    arguments = {"model": routed[0], "samples": routed[1], "routing": HOLD[loss]}
    expected = world1.run(TRAIN, layout={}, **arguments)
    found = request.getfixturevalue(f"world{size}").run(
        TRAIN, layout=LAYOUTS[size][layout], **arguments
    )
    assert_same(found, expected)
    assert found["metrics"]["routing/loss"] == pytest.approx(
        expected["metrics"]["routing/loss"], rel=1e-5
    )


ROUTERS = {
    "softmax": {},
    "pre_softmax": {"moe_router_pre_softmax": True},
    "sigmoid": {"moe_router_score_function": "sigmoid"},
    "deepseek": {
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        "moe_router_num_groups": 4,
        "moe_router_group_topk": 3,
        "moe_router_topk_scaling_factor": 2.5,
    },
}


@pytest.mark.parametrize(
    "router",
    [
        pytest.param("softmax", marks=pytest.mark.matrix),
        pytest.param("pre_softmax", marks=pytest.mark.matrix),
        pytest.param("sigmoid", marks=pytest.mark.matrix),
        "deepseek",
    ],
)
def test_finite_differences_confirm_the_routers_gradient(world1, routed, router):
    """Under replay alone, and with each loss on routers."""
    found = world1.run(
        "tests.trainer.routing_ranks:router_gradients",
        model=routed[0],
        samples=routed[1],
        routings={"none": {"replay": "r3"}, **HOLD},
        epsilon=3e-3,
        router=ROUTERS[router],
    )
    for loss, of_routers in found.items():
        assert len(of_routers) == 4
        for analytic, difference in of_routers:
            assert analytic == pytest.approx(difference, rel=0.02, abs=4e-4), loss
        assert max(abs(a) for a, _ in of_routers) > 1e-3


@pytest.fixture
def damaged(routed, tmp_path) -> str:
    target = tmp_path / "step_000001"
    shutil.copytree(routed[1], target)
    path = target / "rollout-0.routes"
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    return str(target)


def test_a_damaged_route_file_stops_every_rank(world2, routed, damaged):
    found = world2.run(TRAIN, model=routed[0], samples=damaged, layout={}, routing=R3)
    assert len(found["error"]) == 2
    for message in found["error"]:
        assert "corrupt" in message and Path(damaged).name in message


def test_or_is_counted_and_routed_live(world1, routed, damaged, one_rank):
    found = world1.run(
        TRAIN,
        model=routed[0],
        samples=damaged,
        layout={},
        routing={"replay": "r3", "on_missing": "live"},
    )
    assert found["metrics"]["routing/corrupt_routes"] > 0
    assert one_rank["metrics"]["routing/corrupt_routes"] == 0
    assert np.isfinite(found["losses"]).all()


def test_routes_of_another_model_are_refused(world1, moe_model, routed):
    found = world1.run(TRAIN, model=moe_model, samples=routed[1], layout={}, routing=R3)
    assert "misshapen" in found["error"][0] and "3 of 8 experts" in found["error"][0]


def test_samples_without_routes_are_missing(world1, moe_model, samples):
    found = world1.run(TRAIN, model=moe_model, samples=samples, layout={}, routing=R3)
    assert "missing" in found["error"][0]
