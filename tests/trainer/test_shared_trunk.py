"""A critic that shares the policy's layers: values, losses, gradients and norms do not depend on
the layout, they are those of a critic of its own, and a resume goes on bit for bit."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open

from tests.tiers import rest_in_matrix
from tests.trainer.shared_trunk_ranks import HEAD
from tests.trainer.test_layout_parity import APART, LAYOUTS_2, LAYOUTS_4

pytestmark = pytest.mark.engine
CASES = "tests.trainer.shared_trunk_ranks:"
TRAIN = CASES + "train_both"
OWN = "tests.trainer.critic_ranks:train_with_critic"
TOLERANCE = 1e-5
OF_PACKING = ("batch/computed_token_fraction", "routing/split_prompts")
ALONE = {**APART, "max_tokens_per_microbatch": 4096}

COLD = {"target_accuracy": 0.5, "max_steps": 5}


@pytest.fixture(scope="module")
def reference(world1, moe_model, samples):
    """Every sample computed alone, in one micro-batch."""
    return world1.run(TRAIN, model=moe_model, samples=samples, layout=ALONE, gradients=True)


@pytest.fixture(scope="module")
def with_adapters(world1, moe_model, samples):
    arguments = {"model": moe_model, "samples": samples, "lora": {"rank": 3}}
    return world1.run(TRAIN, layout=ALONE, gradients=True, **arguments)


def assert_same(found: dict, expected: dict) -> None:
    np.testing.assert_allclose(found["values"], expected["values"], rtol=0, atol=TOLERANCE)
    np.testing.assert_allclose(found["norms"], expected["norms"], rtol=TOLERANCE)
    for metric, value in expected["metrics"].items():
        if metric not in OF_PACKING:
            assert found["metrics"][metric] == pytest.approx(value, rel=1e-3, abs=1e-5), metric
    assert found["tensors"].keys() == expected["tensors"].keys()
    for name, values in expected["tensors"].items():
        worst = np.abs(found["tensors"][name] - values).max()
        scale = max(np.abs(values).max(), 1e-3)
        assert worst <= TOLERANCE * scale, f"{name}: {worst} of {scale}"


# --- one rank


def test_values_are_the_head_on_what_the_output_layer_gets(world1, moe_model, samples):
    found = world1.run(CASES + "states_and_head", model=moe_model, samples=samples)
    expected = found["states"].astype(np.float64) @ found["head"][0].astype(np.float64)
    assert np.unique(expected.round(6)).size > 20
    np.testing.assert_allclose(found["values"], expected, rtol=0, atol=1e-5)


def test_the_value_loss_is_that_of_a_critic_of_its_own(world1, moe_model, samples, reference):
    """Which begins with the same layers and the same head; and it is there beside the policy's
    loss, by its weight."""
    own = world1.run(OWN, model=moe_model, samples=samples, layout=ALONE, gradients=True)
    twice = world1.run(
        TRAIN, model=moe_model, samples=samples, layout=ALONE, gradients=True, loss_weight=1.5
    )
    np.testing.assert_allclose(reference["values"], own["values"], rtol=0, atol=TOLERANCE)
    np.testing.assert_allclose(reference["returns"], own["returns"], rtol=0, atol=TOLERANCE)
    for name in ("critic/loss", "critic/error", "critic/explained_variance", "critic/value_mean"):
        assert reference["metrics"][name] == pytest.approx(own["metrics"][name], rel=1e-5), name
    of_critic = own["tensors"]["critic"]
    of_policy = own["tensors"]["policy"]
    for name, gradient in reference["tensors"].items():
        of_values = twice["tensors"][name] - gradient  # of a weight of 1
        theirs = np.zeros_like(gradient)
        if name == HEAD:
            theirs = of_critic["score.weight"]
        elif name in of_critic:
            theirs = of_critic[name]
        scale = max(np.abs(gradient).max(), 1e-3)
        np.testing.assert_allclose(of_values, theirs, rtol=0, atol=1e-5 * scale, err_msg=name)
        if name in of_policy:
            np.testing.assert_allclose(
                gradient - 0.5 * theirs,
                of_policy[name],
                rtol=0,
                atol=1e-5 * scale,
                err_msg=name,
            )
    values_beside = 0.5 * reference["metrics"]["critic/loss"]
    assert reference["losses"][-1] - values_beside == pytest.approx(own["losses"][-1], abs=1e-6)


def test_micro_batches_and_shared_prompts_on_one_rank(world1, reference, moe_model, samples):
    found = world1.run(TRAIN, model=moe_model, samples=samples, layout={}, gradients=True)
    assert found["metrics"]["batch/computed_token_fraction"] < 1
    assert_same(found, reference)


def test_several_updates_train_the_head_too(world1, moe_model, three_updates):
    found = world1.run(TRAIN, model=moe_model, samples=three_updates, layout={})
    assert len(found["losses"]) == 3
    assert found["metrics"]["critic/loss"] > 0
    assert "critic/grad_norm" not in found["metrics"]


# --- layouts


@pytest.mark.parametrize("layout", rest_in_matrix(LAYOUTS_2, ("tp2_sp", "pp2_vpp2", "cp2")))
def test_two_ranks(world2, reference, moe_model, samples, layout):
    settings = LAYOUTS_2[layout]
    found = world2.run(TRAIN, model=moe_model, samples=samples, layout=settings, gradients=True)
    assert_same(found, reference)


@pytest.mark.matrix
@pytest.mark.parametrize("layout", LAYOUTS_4)
def test_four_ranks(world4, reference, moe_model, samples, layout):
    settings = LAYOUTS_4[layout]
    found = world4.run(TRAIN, model=moe_model, samples=samples, layout=settings, gradients=True)
    assert_same(found, reference)


@pytest.mark.parametrize("layout", rest_in_matrix(LAYOUTS_2, ("tp2_sp", "ep2")))
def test_adapters_and_a_head(world2, with_adapters, moe_model, samples, layout):
    arguments = {"model": moe_model, "samples": samples, "lora": {"rank": 3}}
    found = world2.run(TRAIN, layout=LAYOUTS_2[layout], gradients=True, **arguments)
    assert_same(found, with_adapters)


@pytest.mark.matrix
@pytest.mark.parametrize("layout", ["dp2", "pp2", "tp2_sp"])
def test_tied_embeddings(world1, world2, tied_model, samples, layout):
    arguments = {"model": tied_model, "samples": samples, "gradients": True}
    expected = world1.run(TRAIN, layout={"max_tokens_per_microbatch": 4096}, **arguments)
    assert_same(world2.run(TRAIN, layout=LAYOUTS_2[layout], **arguments), expected)


# --- checkpoints


ADAPTERS = {"rank": 2}


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({}, id="whole", marks=pytest.mark.matrix),
        pytest.param({"cold_start": COLD, "lora": ADAPTERS}, id="adapters_after_a_cold_start"),
        pytest.param({"lora": ADAPTERS}, id="adapters", marks=pytest.mark.matrix),
        pytest.param({"cold_start": COLD}, id="cold_start", marks=pytest.mark.matrix),
    ],
)
@pytest.mark.parametrize("layout", rest_in_matrix(LAYOUTS_2, ("pp2",)))
def test_a_resume_goes_on_bit_for_bit(world2, moe_model, three_updates, tmp_path, layout, settings):
    found = world2.run(
        CASES + "resume",
        model=moe_model,
        samples=three_updates,
        layout={"num_ranks": 2, **LAYOUTS_2[layout]},
        root=str(tmp_path),
        settings=settings,
    )
    assert found["loaded"] == {"step": 2}
    assert found["found"] == found["expected"]
    assert found["is_equal"]
    assert found["folders"] == ["weights"]
    for directory in (found["export"], found["converted"]):
        names = set()
        for file in Path(directory).glob("*.safetensors"):
            with safe_open(file, "numpy") as tensors:
                names |= set(tensors.keys())
        assert [name for name in names if "head" in name] == ["lm_head.weight"]


def test_checkpoints_with_and_without_a_head_are_told_apart(world1, moe_model, tmp_path):
    of_other, of_none, of_eval = world1.run(
        CASES + "load_others", model=moe_model, root=str(tmp_path)
    )
    assert 'critic.trunk = "policy"' in of_other and "with which the run began" in of_other
    assert "has no value head" in of_none and "model.path" in of_none
    assert of_eval == ""
