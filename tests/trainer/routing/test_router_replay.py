"""Replayed routes: exact at every layout, checked before use, with a gradient for the router."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest

from tests.trainer.test_layout_parity import APART, assert_same

TRAIN = "tests.trainer.routing_ranks:train"
R3 = {"replay": "r3", "on_missing": "fail"}

LAYOUTS = {
    2: {
        "dp2": {},
        "tp2_sp": {"tensor_parallel_size": 2},
        "pp2": {"pipeline_parallel_size": 2},
        "pp2_recompute": {"pipeline_parallel_size": 2, "recompute": "full"},
        "ep2_selective": {"expert_parallel_size": 2, "recompute": "selective"},
        "cp2": {"context_parallel_size": 2},
        "cp2_ep2": {"context_parallel_size": 2, "expert_parallel_size": 2},
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
        "cp2_tp2": {"context_parallel_size": 2, "tensor_parallel_size": 2},
        "cp2_pp2_recompute": {
            "context_parallel_size": 2,
            "pipeline_parallel_size": 2,
            "recompute": "full",
        },
        "cp4_ep4": {"context_parallel_size": 4, "expert_parallel_size": 4},
    },
    8: {
        "tp2_sp_pp2_ep2": {
            "tensor_parallel_size": 2,
            "pipeline_parallel_size": 2,
            "expert_parallel_size": 2,
        }
    },
}
IN_CI = ("tp2_sp", "cp2_ep2", "cp2_tp2", "pp2_vpp3_recompute", "etp2_ep2", "tp2_sp_pp2_ep2")
CASES = [
    pytest.param(size, name, id=name, marks=() if name in IN_CI else pytest.mark.matrix)
    for size, layouts in LAYOUTS.items()
    for name in layouts
]


@pytest.fixture(scope="session")
def one_rank(world1, routed):
    """With every sample computed alone; the layouts compute prompts once."""
    model, samples = routed
    return world1.run(TRAIN, model=model, samples=samples, layout=APART, routing=R3, spy=True)


def test_replayed_experts_have_their_own_scores_and_a_share_of_the_loss(world1):
    """Experts 3 and 0 are replayed for one token, 1 and 2 are the live ones of the other."""
    found = world1.run("tests.trainer.routing_ranks:held_and_replayed")
    assert found["ids"] == [[3, 0], [1, 2]]
    assert np.array(found["values"]) == pytest.approx(np.array([[0.2, 0.1], [0.4, 0.3]]))
    loss = -np.log(0.2 + 0.1) - 0.5 * np.log(0.4 + 0.3)
    assert found["loss"] == pytest.approx(loss / 2)  # of the mean over two routers


def test_one_rank_applies_the_stored_routes(one_rank):
    assert one_rank["num_microbatches"] > 2
    assert one_rank["looked_at"] > 500
    assert one_rank["wrong_routes"] == 0
    assert one_rank["metrics"]["routing/rollout_slot_flip_rate"] > 0.3  # they are random


def test_prompts_with_one_route_are_shared_and_the_others_kept_apart(world1, routed, one_rank):
    """The last sample of each of the 6 groups has other routes on its prompt."""
    model, samples = routed
    found = world1.run(TRAIN, model=model, samples=samples, layout={}, routing=R3, spy=True)
    assert found["metrics"]["routing/split_prompts"] == 6
    assert one_rank["metrics"]["routing/split_prompts"] == 0
    assert found["metrics"]["batch/computed_token_fraction"] < 0.9
    assert 300 < found["looked_at"] < one_rank["looked_at"]
    _assert_equal(found, one_rank)


def _assert_equal(found, one_rank):
    """Loss, every gradient, pre-clip norm, and the metrics of routing, with all routes applied."""
    assert found["wrong_routes"] == 0
    assert_same(found, one_rank)
    for name, value in one_rank["metrics"].items():
        if name.startswith("routing/") and name != "routing/split_prompts":
            assert found["metrics"][name] == pytest.approx(value, rel=1e-4, abs=1e-6), name


def test_live_routing_is_something_else(world1, routed, one_rank):
    model, samples = routed
    live = world1.run(TRAIN, model=model, samples=samples, layout={}, routing={}, spy=True)
    assert live["wrong_routes"] > 100
    assert abs(live["norms"][0] - one_rank["norms"][0]) > 1e-3 * one_rank["norms"][0]


@pytest.mark.parametrize(("size", "layout"), CASES)
def test_every_layout_equals_one_rank(request, routed, one_rank, size, layout):
    """Several micro-batches; recomputed layers are looked at again."""
    model, samples = routed
    found = request.getfixturevalue(f"world{size}").run(
        TRAIN, model=model, samples=samples, layout=LAYOUTS[size][layout], routing=R3, spy=True
    )
    assert found["looked_at"] > 300
    _assert_equal(found, one_rank)


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
    "layout",
    [
        {"tensor_parallel_size": 2},
        {"pipeline_parallel_size": 2, "recompute": "full"},
        {"context_parallel_size": 2},
    ],
)
def test_r2_at_two_ranks(world1, world2, moe_model, three_updates, layout):
    arguments = {"model": moe_model, "samples": three_updates, "routing": {"replay": "r2"}}
    assert_same(
        world2.run(TRAIN, layout=layout, **arguments),
        world1.run(TRAIN, layout=APART, **arguments),
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
        pytest.param(2, "cp2", marks=pytest.mark.matrix),
        pytest.param(4, "cp2_pp2_recompute", marks=pytest.mark.matrix),
        (4, "cp2_tp2"),
        pytest.param(8, "tp2_sp_pp2_ep2", marks=pytest.mark.matrix),
    ],
)
@pytest.mark.parametrize("loss", ["set_mass", "balance"])
def test_losses_on_routers_at_every_layout(request, world1, routed, size, layout, loss):
    arguments = {"model": routed[0], "samples": routed[1], "routing": HOLD[loss]}
    expected = world1.run(TRAIN, layout=APART, **arguments)
    found = request.getfixturevalue(f"world{size}").run(
        TRAIN, layout=LAYOUTS[size][layout], **arguments
    )
    assert_same(found, expected)
    assert found["metrics"]["routing/loss"] == pytest.approx(
        expected["metrics"]["routing/loss"], rel=1e-5
    )


@pytest.mark.parametrize("shared_tokens", ["each_use", "once"])
@pytest.mark.parametrize("loss", HOLD)
def test_losses_on_routers_do_not_depend_on_sharing(world1, routed, loss, shared_tokens):
    """A shared prompt counts as it would alone, and so do the losses on its last token."""
    routing = {**HOLD[loss], "shared_tokens": shared_tokens}
    arguments = {"model": routed[0], "samples": routed[1], "routing": routing}
    apart, shared = (world1.run(TRAIN, layout=layout, **arguments) for layout in (APART, {}))
    assert_same(shared, apart)
    for name in ("routing/loss", "routing/load_cv", "routing/entropy"):
        assert shared["metrics"][name] == pytest.approx(apart["metrics"][name], rel=1e-5), name


@pytest.mark.parametrize("loss", ["set_mass", "balance"])
def test_counting_a_shared_token_once_is_another_loss(world1, routed, loss):
    arguments = {"model": routed[0], "samples": routed[1], "layout": {}}
    each_use, once = (
        world1.run(TRAIN, routing={**HOLD[loss], "shared_tokens": shared_tokens}, **arguments)
        for shared_tokens in ("each_use", "once")
    )
    assert once["metrics"]["routing/loss"] != pytest.approx(
        each_use["metrics"]["routing/loss"], rel=1e-4
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
        epsilon=8e-3,
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


def test_or_are_routed_as_ever(world1, moe_model, samples):
    found = {}
    for name, routing in (("live", {}), ("missing", {"replay": "r3", "on_missing": "live"})):
        found[name] = world1.run(
            TRAIN, model=moe_model, samples=samples, layout={}, routing=routing
        )
    assert found["missing"]["metrics"]["routing/missing_routes"] > 0
    assert found["missing"]["losses"] == found["live"]["losses"]
    assert found["missing"]["norms"] == found["live"]["norms"]
