"""Losses and gradients of preferences do not depend on the layout, and are those of the formula."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn.functional import binary_cross_entropy_with_logits
from transformers import AutoModelForSequenceClassification

from grpo_megatron.algorithms.preferences import REFERENCE, pair_losses
from grpo_megatron.batching.store import SampleTable
from grpo_megatron.config.preferences import PreferencesConfig
from tests.trainer.models import DENSE, write_model
from tests.trainer.preference_ranks import write_preferences, write_steps
from tests.trainer.test_layout_parity import LAYOUTS_2, LAYOUTS_4

STEP = "tests.trainer.preference_ranks:preference_step"
REFERENCE_SCORES = "tests.trainer.preference_ranks:scores_of_another_checkpoint"
FIRST_STEP = "tests.trainer.preference_ranks:first_step_after_a_checkpoint"
EXPORT = "tests.trainer.preference_ranks:reward_model_export"
EXPORT_OF_STEPS = "tests.trainer.preference_ranks:process_reward_model_export"
TOLERANCE = 1e-5
LOSSES = {
    "dpo": {"loss": "dpo", "label_smoothing": 0.1},
    "dpo_mean": {"loss": "dpo", "length_normalised": True, "beta": 5.0},
    "hinge": {"loss": "hinge"},
    "ipo": {"loss": "ipo"},
    "kto": {"loss": "kto", "undesirable_weight": 1.3},
    "simpo": {"loss": "simpo", "beta": 2.0},
    "orpo": {"loss": "orpo"},
    "reward_model": {"loss": "bradley_terry", "use_margins": True, "centre_weight": 0.01},
    "process_reward_model": {"loss": "stepwise"},
    "labels": {"loss": "bradley_terry", "scalar_per_domain": True, "centre_weight": 0.01},
}
GATE = {
    name: LOSSES[name] for name in ("dpo", "kto", "reward_model", "process_reward_model", "labels")
}
ON_TWO = {name: LOSSES[name] for name in ("dpo", "labels")}
APART = {"share_prefixes": False}
OF_PACKING = ("batch/computed_token_fraction", "routing/split_prompts")


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    folder = tmp_path_factory.mktemp("preferences")
    return {
        "pairs": write_preferences(folder / "pairs", is_paired=True),
        "labelled": write_preferences(folder / "labelled", is_paired=False),
        "rewarded": write_preferences(folder / "rewarded", is_paired=True, for_reward=True),
        "steps": write_steps(folder / "steps"),
    }


def on_one_rank(world1, model: str, recorded: dict, settings: dict) -> dict:
    """Nothing shared, all in one micro-batch."""
    layout = {**APART, "max_tokens_per_microbatch": 4096}
    return world1.run(STEP, model=model, layout=layout, settings=settings, **recorded)


@pytest.fixture(scope="module")
def few_losses(world1, moe_model, recorded):
    return on_one_rank(world1, moe_model, recorded, GATE)


@pytest.fixture(scope="module")
def reference(world1, moe_model, recorded):
    return on_one_rank(world1, moe_model, recorded, LOSSES)


def assert_same(found: dict, expected: dict) -> None:
    for name, of_loss in found.items():
        theirs = expected[name]
        near_zero = 0.0
        if name in ("process_reward_model", "labels"):  # of which any may be near 0
            near_zero = TOLERANCE * np.abs(theirs["scores"]).max()
        np.testing.assert_allclose(
            of_loss["scores"], theirs["scores"], rtol=TOLERANCE, atol=near_zero
        )
        for metric, value in theirs["metrics"].items():
            if metric not in OF_PACKING:
                assert of_loss["metrics"][metric] == pytest.approx(value, rel=1e-4, abs=1e-6)
        np.testing.assert_allclose(of_loss["norm"], theirs["norm"], rtol=TOLERANCE)
        for tensor, values in theirs["tensors"].items():
            worst = np.abs(of_loss["tensors"][tensor] - values).max()
            scale = max(np.abs(values).max(), 1e-3)
            assert worst <= TOLERANCE * scale, f"{name}, {tensor}: {worst} of {scale}"


@pytest.mark.matrix
def test_the_loss_is_the_formula_of_the_scores(reference, recorded):
    table = SampleTable(Path(recorded["pairs"]))
    for name in ("dpo", "dpo_mean", "hinge", "ipo", "simpo"):
        settings = PreferencesConfig(**LOSSES[name])
        scores = reference[name]["scores"].copy()
        if settings.has_reference:
            scores -= table.components[REFERENCE]
        if settings.takes_means:
            scores /= table.policy_lengths
        chosen, rejected = torch.from_numpy(scores[0::2]), torch.from_numpy(scores[1::2])
        losses = pair_losses(settings, chosen, rejected)
        metrics = reference[name]["metrics"]
        assert metrics["preference/loss"] == pytest.approx(losses.mean().item(), rel=1e-5)
        assert metrics["preference/loss@odd"] == pytest.approx(losses[1::2].mean().item(), rel=1e-5)
        right = (chosen > rejected).double().mean().item()
        assert metrics["preference/accuracy"] == pytest.approx(right)


def test_the_loss_of_steps_is_their_cross_entropy(few_losses, recorded):
    table = SampleTable(Path(recorded["steps"]))
    found = few_losses["process_reward_model"]
    labels = [turn.reward for row in range(len(table)) for turn in table.turns(row)]
    logits, wanted = torch.from_numpy(found["scores"]), torch.tensor(labels, dtype=torch.float64)
    losses = binary_cross_entropy_with_logits(logits, wanted, reduction="none")
    metrics = found["metrics"]
    assert metrics["preference/loss"] == pytest.approx(losses.mean().item(), rel=1e-5)
    assert metrics["loss/value"] == pytest.approx(losses.mean().item(), rel=1e-5)
    is_odd = np.repeat(table.domain == 1, table.policy_lengths)
    expected = losses[torch.from_numpy(is_odd)].mean().item()
    assert metrics["preference/loss@odd"] == pytest.approx(expected, rel=1e-5)
    right = ((logits > 0) == (wanted > 0.5)).double().mean().item()
    assert metrics["preference/accuracy"] == pytest.approx(right)


@pytest.mark.matrix
def test_orpo_adds_the_likelihood_of_chosen_tokens(reference, recorded):
    table = SampleTable(Path(recorded["pairs"]))
    chosen = table.reward == 1
    nll = -reference["orpo"]["scores"][chosen].sum() / table.policy_lengths[chosen].sum()
    metrics = reference["orpo"]["metrics"]
    assert metrics["loss/nll"] == pytest.approx(nll, rel=1e-5)
    assert metrics["loss/value"] == pytest.approx(nll + metrics["preference/loss"], rel=1e-5)


def test_micro_batches_and_shared_prompts_on_one_rank(world1, few_losses, moe_model, recorded):
    found = world1.run(STEP, model=moe_model, layout={}, settings=GATE, **recorded)
    assert found["dpo"]["metrics"]["batch/computed_token_fraction"] < 1
    assert_same(found, few_losses)


@pytest.mark.parametrize("layout", ["dp2", "tp2_sp", "pp2"])
def test_two_ranks(world2, few_losses, moe_model, recorded, layout):
    found = world2.run(STEP, model=moe_model, layout=LAYOUTS_2[layout], settings=ON_TWO, **recorded)
    assert_same(found, few_losses)


@pytest.mark.parametrize("by_domain", [False, True])
@pytest.mark.parametrize(
    "model", ["dense_model", pytest.param("tied_model", marks=pytest.mark.matrix)]
)
def test_transformers_gives_the_scalars(world1, recorded, tmp_path, request, model, by_domain):
    """Of the export, and so does a model that begins with it."""
    source = request.getfixturevalue(model)
    directory = tmp_path / "export"
    rewarded = recorded["rewarded"]
    scores = world1.run(
        EXPORT, model=source, rewarded=rewarded, directory=str(directory), by_domain=by_domain
    )
    loaded = AutoModelForSequenceClassification.from_pretrained(directory, dtype=torch.float32)
    labels = {0: "even", 1: "odd"} if by_domain else {0: "LABEL_0"}
    assert loaded.config.id2label == labels
    table = SampleTable(Path(rewarded))
    for row, score in enumerate(scores):
        answer, _ = table.completion(row)
        ids = np.concatenate([table.prompt_ids(row), answer[:-1]]).astype(np.int64)
        with torch.no_grad():
            [found] = loaded(torch.from_numpy(ids)[None]).logits.tolist()
        label = int(table.domain[row]) if by_domain else 0
        assert found[label] == pytest.approx(score, abs=1e-5)


@pytest.mark.parametrize("dora", [False, True])
def test_adapters_are_no_part_of_a_named_reference(world1, dense_model, recorded, tmp_path, dora):
    """Neither trained ones nor, of DoRA, magnitudes of the weights that the run begins with."""
    other = write_model(tmp_path / "other", DENSE, 7)
    pairs = recorded["pairs"]
    lora = {"rank": 2, "dora": dora}
    found = world1.run(REFERENCE_SCORES, model=dense_model, other=other, pairs=pairs, lora=lora)
    np.testing.assert_allclose(found["reference"], found["other"], rtol=TOLERANCE)
    assert np.abs(found["with_adapters"] - found["other"]).max() > 0.01
    np.testing.assert_array_equal(found["policy_after"], found["policy_before"])


@pytest.mark.parametrize("dora", [False, True])
def test_adapters_of_a_checkpoint_are_no_part_of_the_reference(world1, dense_model, recorded, dora):
    """Before its first step, too: a run that was told to stop has a checkpoint there."""
    lora = {"rank": 2, "dora": dora}
    pairs = f"{recorded['pairs']}_{dora}"
    write_preferences(Path(pairs), is_paired=True)
    assert world1.run(FIRST_STEP, model=dense_model, pairs=pairs, lora=lora) > 0.01


def test_transformers_gives_the_logits_of_steps(world1, recorded, tmp_path, dense_model):
    directory = tmp_path / "export"
    logits = world1.run(
        EXPORT_OF_STEPS, model=dense_model, steps=recorded["steps"], directory=str(directory)
    )
    loaded = AutoModelForSequenceClassification.from_pretrained(directory, dtype=torch.float32)
    assert loaded.config.problem_type == "multi_label_classification"  # vLLM: a sigmoid
    table = SampleTable(Path(recorded["steps"]))
    for row, of_steps in enumerate(logits):
        ids, _ = table.completion(row)
        num_prompt = len(table.prompt_ids(row))
        text = torch.from_numpy(np.concatenate([table.prompt_ids(row), ids]).astype(np.int64))
        with torch.no_grad():
            states = loaded.model(text[None]).last_hidden_state[0]
            scalars = loaded.score(states)[:, 0]
        places = [num_prompt + turn.start - 1 for turn in table.turns(row)]
        assert of_steps == pytest.approx(scalars[places].tolist(), abs=1e-5)


@pytest.mark.matrix
@pytest.mark.parametrize("layout", LAYOUTS_2)
def test_every_loss_on_two_ranks(world2, reference, moe_model, recorded, layout):
    found = world2.run(STEP, model=moe_model, layout=LAYOUTS_2[layout], settings=LOSSES, **recorded)
    assert_same(found, reference)


@pytest.mark.matrix
@pytest.mark.parametrize("layout", LAYOUTS_4)
def test_four_ranks(world4, reference, moe_model, recorded, layout):
    found = world4.run(STEP, model=moe_model, layout=LAYOUTS_4[layout], settings=GATE, **recorded)
    assert_same(found, reference)
