"""A critic beside the policy: values, losses, gradients and norms do not depend on the layout, and
a resume goes on bit for bit."""

from __future__ import annotations

import shutil

import numpy as np
import pytest

from tests.algorithms.test_gae import by_loop
from tests.trainer.models import MOE, write_model
from tests.trainer.preference_ranks import write_preferences
from tests.trainer.test_layout_parity import APART, LAYOUTS_2, LAYOUTS_4

pytestmark = pytest.mark.engine
CASES = "tests.trainer.critic_ranks:"
TRAIN = CASES + "train_with_critic"
BEGIN = CASES + "begins_with_a_reward_model"
FIRST_WEIGHTS = CASES + "first_weights"
EXPORT = "tests.trainer.preference_ranks:reward_model_export"
TOLERANCE = 1e-5
OF_PACKING = ("batch/computed_token_fraction", "routing/split_prompts")


@pytest.fixture(scope="module")
def reference(world1, moe_model, three_updates):
    """Every sample computed alone, in one micro-batch."""
    layout = {**APART, "max_tokens_per_microbatch": 4096}
    return world1.run(TRAIN, model=moe_model, samples=three_updates, layout=layout)


@pytest.fixture(scope="module")
def reference_gradients(world1, moe_model, samples):
    layout = {**APART, "max_tokens_per_microbatch": 4096}
    return world1.run(TRAIN, model=moe_model, samples=samples, layout=layout, gradients=True)


def assert_same(found: dict, expected: dict) -> None:
    np.testing.assert_allclose(found["values"], expected["values"], rtol=0, atol=TOLERANCE)
    np.testing.assert_allclose(found["norms"], expected["norms"], rtol=TOLERANCE)
    for metric, value in expected["metrics"].items():
        if metric not in OF_PACKING:
            assert found["metrics"][metric] == pytest.approx(value, rel=1e-3, abs=1e-5), metric
    for name in ("critic/grad_norm", "critic/loss"):
        assert found["metrics"][name] == pytest.approx(expected["metrics"][name], rel=TOLERANCE)


def assert_same_gradients(found: dict, expected: dict) -> None:
    assert_same(found, expected)
    for model, tensors in expected["tensors"].items():
        assert found["tensors"][model].keys() == tensors.keys()
        for name, values in tensors.items():
            worst = np.abs(found["tensors"][model][name] - values).max()
            scale = max(np.abs(values).max(), 1e-3)
            assert worst <= TOLERANCE * scale, f"{model}, {name}: {worst} of {scale}"


# --- one rank


def test_returns_are_those_of_a_loop(reference):
    """Of samples with a reward; others teach nothing."""
    start = 0
    for reward, count in zip(reference["rewards"], reference["counts"], strict=True):
        values = reference["values"][start : start + count].tolist()
        returns = reference["returns"][start : start + count]
        rewards = [0.0] * (count - 1) + [reward]
        expected = np.add(by_loop(rewards, values, 1.0, 0.95), values)
        np.testing.assert_allclose(returns, expected, rtol=1e-4, atol=1e-6)
        start += count
    metrics = reference["metrics"]
    assert metrics["critic/value_mean"] == pytest.approx(reference["values"].mean(), rel=1e-5)
    assert metrics["critic/explained_variance"] < 1
    assert metrics["critic/loss@odd"] > 0
    assert "score.weight" in reference["tensors"]["critic"]
    assert "lm_head.weight" not in reference["tensors"]["critic"]


def test_the_critic_begins_with_the_policys_layers_and_leaves_them(reference):
    tensors = reference["tensors"]
    name = "model.layers.0.self_attn.q_proj.weight"
    assert not np.array_equal(tensors["policy"][name], tensors["critic"][name])
    assert len(reference["losses"]) == 3 and min(reference["norms"]) > 0


def test_micro_batches_and_shared_prompts_on_one_rank(
    world1, reference_gradients, moe_model, samples
):
    found = world1.run(TRAIN, model=moe_model, samples=samples, layout={}, gradients=True)
    assert found["metrics"]["batch/computed_token_fraction"] < 1
    assert_same_gradients(found, reference_gradients)


def test_values_are_of_what_was_before_the_token(world1, moe_model, samples):
    values, others = world1.run(
        CASES + "values_after_another_last_token", model=moe_model, samples=samples
    )
    assert np.unique(values.round(6)).size > 20
    np.testing.assert_allclose(values, others, rtol=0, atol=1e-6)  # experts have other rows


@pytest.mark.matrix
def test_a_warm_up_trains_the_critic_alone(world1, moe_model, samples):
    errors = world1.run(CASES + "learns_the_reward", model=moe_model, samples=samples, steps=12)
    assert errors[-1] < errors[0] / 3


def test_a_warm_up_measures_what_it_does_not_train(world1, moe_model, three_updates, reference):
    found = world1.run(
        TRAIN,
        model=moe_model,
        samples=three_updates,
        layout={},
        critic={"warmup_steps": 5, "optimizer": {"lr": 1e-4}},
    )
    assert found["updates"] == 0 and found["losses"] == [] and found["norms"] == []
    np.testing.assert_allclose(found["values"], reference["values"], rtol=0, atol=TOLERANCE)
    for name in ("advantage/std", "critic/value_mean", "critic/return_mean"):
        assert found["metrics"][name] == pytest.approx(reference["metrics"][name], rel=1e-4)
    assert "loss/value" in found["metrics"] and "grad/norm" not in found["metrics"]
    assert "optimizer/lr" not in found["metrics"]


# --- layouts


@pytest.mark.parametrize(
    "layout",
    [
        "tp2_sp",
        "pp2",
        *(
            pytest.param(name, marks=pytest.mark.matrix)
            for name in LAYOUTS_2
            if name not in ("tp2_sp", "pp2")
        ),
    ],
)
def test_two_ranks(world2, reference_gradients, moe_model, samples, layout):
    settings = LAYOUTS_2[layout]
    found = world2.run(TRAIN, model=moe_model, samples=samples, layout=settings, gradients=True)
    assert_same_gradients(found, reference_gradients)


@pytest.mark.matrix
@pytest.mark.parametrize("layout", LAYOUTS_2)
def test_three_updates_on_two_ranks(world2, reference, moe_model, three_updates, layout):
    found = world2.run(TRAIN, model=moe_model, samples=three_updates, layout=LAYOUTS_2[layout])
    assert_same(found, reference)


@pytest.mark.matrix
@pytest.mark.parametrize("layout", LAYOUTS_4)
def test_four_ranks(world4, reference_gradients, moe_model, samples, layout):
    found = world4.run(
        TRAIN, model=moe_model, samples=samples, layout=LAYOUTS_4[layout], gradients=True
    )
    assert_same_gradients(found, reference_gradients)


@pytest.mark.matrix
@pytest.mark.parametrize("layout", ["dp2", "pp2"])
def test_a_tied_embedding_is_the_policys_alone(world1, world2, tied_model, samples, layout):
    arguments = {"model": tied_model, "samples": samples, "gradients": True}
    expected = world1.run(TRAIN, layout={"max_tokens_per_microbatch": 4096}, **arguments)
    found = world2.run(TRAIN, layout=LAYOUTS_2[layout], **arguments)
    assert_same_gradients(found, expected)


# --- a critic that begins with a model of its own


@pytest.fixture(scope="module")
def scorer(world1, tmp_path_factory) -> str:
    """The export of a reward model with other weights than the policy's."""
    root = tmp_path_factory.mktemp("scorer")
    source = write_model(root / "model", MOE, 11)
    rewarded = write_preferences(root / "step_000001", is_paired=True, for_reward=True)
    directory = root / "export"
    world1.run(EXPORT, model=source, rewarded=rewarded, directory=str(directory))
    return str(directory)


@pytest.fixture(scope="module")
def scored(world1, moe_model, scorer, samples):
    return world1.run(BEGIN, model=moe_model, scored_by=scorer, samples=samples, layout={})


def test_first_values_are_the_reward_models_scalars(scored):
    assert np.unique(scored["scalars"].round(6)).size > 20
    np.testing.assert_allclose(scored["values"], scored["scalars"], rtol=0, atol=1e-6)
    starts = np.cumsum([0, *scored["counts"][:-1]])
    of_samples = np.add.reduceat(scored["values"].astype(np.float64), starts)
    np.testing.assert_allclose(of_samples, scored["scores"], rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize(
    "layout",
    [
        "tp2_sp",
        *(pytest.param(name, marks=pytest.mark.matrix) for name in LAYOUTS_2 if name != "tp2_sp"),
    ],
)
def test_first_values_on_two_ranks(world2, scored, moe_model, scorer, samples, layout):
    arguments = {"model": moe_model, "scored_by": scorer, "samples": samples}
    found = world2.run(BEGIN, layout=LAYOUTS_2[layout], **arguments)
    np.testing.assert_allclose(found["values"], scored["scalars"], rtol=0, atol=TOLERANCE)
    np.testing.assert_allclose(found["scores"], scored["scores"], rtol=0, atol=TOLERANCE)


@pytest.mark.matrix
@pytest.mark.parametrize("layout", LAYOUTS_4)
def test_first_values_on_four_ranks(world4, scored, moe_model, scorer, samples, layout):
    arguments = {"model": moe_model, "scored_by": scorer, "samples": samples}
    found = world4.run(BEGIN, layout=LAYOUTS_4[layout], **arguments)
    np.testing.assert_allclose(found["values"], scored["scalars"], rtol=0, atol=TOLERANCE)


def test_a_language_model_has_no_head_to_begin_with(world1, moe_model, tmp_path):
    """Then `seed` draws it, as for a critic that begins with the policy's weights."""
    policy, usual = world1.run(FIRST_WEIGHTS, model=moe_model)
    other = write_model(tmp_path / "model", MOE, 12)
    others, _ = world1.run(FIRST_WEIGHTS, model=other)
    policy_beside, critic = world1.run(FIRST_WEIGHTS, model=moe_model, critic={"path": other})
    names = policy.keys() - {"lm_head.weight"}
    assert names == usual.keys() - {"score.weight"} == critic.keys() - {"score.weight"}
    for name in names:
        np.testing.assert_array_equal(usual[name], policy[name])
        np.testing.assert_array_equal(critic[name], others[name])
        np.testing.assert_array_equal(policy_beside[name], policy[name])
    np.testing.assert_array_equal(critic["score.weight"], usual["score.weight"])


def test_a_checkpoint_of_another_size_is_named(world1, moe_model, tmp_path):
    """A preset's vocabulary is known only when its tokenizer is."""
    other = write_model(tmp_path / "model", MOE | {"vocab_size": 95}, 13)
    said = world1.run(CASES + "refusal_to_begin", model=moe_model, path=other)
    assert "vocab_size of its config.json is 95, of the policy 93" in said and other in said


def test_its_optimizer_begins_with_the_same_weights(world1, moe_model, scorer, samples):
    change = world1.run(
        CASES + "first_optimizer_step", model=moe_model, samples=samples, path=scorer
    )
    assert 0 < change < 0.01


# --- checkpoints


@pytest.mark.parametrize(
    "layout", ["ep2", *(pytest.param(name, marks=pytest.mark.matrix) for name in ("tp2_sp", "pp2"))]
)
def test_a_resume_goes_on_bit_for_bit(world2, moe_model, three_updates, tmp_path, layout):
    found = world2.run(
        CASES + "resume_with_critic",
        model=moe_model,
        samples=three_updates,
        layout={"num_ranks": 2, **LAYOUTS_2[layout]},
        root=str(tmp_path),
    )
    assert found["loaded"] == {"step": 2}
    assert found["found"] == found["expected"]
    assert found["is_equal"]
    assert found["folders"] == ["critic", "weights"]


def test_a_resume_does_not_read_what_the_critic_began_with(
    world1, moe_model, scorer, three_updates, tmp_path
):
    path = shutil.copytree(scorer, tmp_path / "scorer")
    found = world1.run(
        CASES + "resume_with_critic",
        model=moe_model,
        samples=three_updates,
        layout={"num_ranks": 1},
        root=str(tmp_path / "checkpoints"),
        path=str(path),
    )
    assert not path.exists()
    assert found["found"] == found["expected"]
    assert found["is_equal"]


def test_a_checkpoint_without_a_critic_is_one_from_before_the_first_step(
    world1, moe_model, tmp_path
):
    of_start, of_later = world1.run(
        CASES + "load_without_critic", model=moe_model, root=str(tmp_path)
    )
    assert of_start == ""
    assert "without a critic" in of_later and "model.path" in of_later
