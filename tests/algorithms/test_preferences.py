"""Losses of preferences: TRL's numbers, and what must hold of any."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from torch.nn.functional import cross_entropy

from grpo_megatron.algorithms.preferences import (
    MAX_SCORE,
    kto_baseline,
    kto_loss,
    log_odds,
    orpo_loss,
    pair_losses,
    sigmoid_loss,
    sigmoid_loss_slope,
    step_losses,
)
from grpo_megatron.config.preferences import PreferencesConfig

GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "preferences.json").read_text())
INPUTS = {
    name: torch.tensor(values, dtype=torch.float64) for name, values in GOLDEN["inputs"].items()
}


def scores(settings: PreferencesConfig, kind: str, sums: torch.Tensor) -> torch.Tensor:
    if settings.has_reference:
        sums = sums - INPUTS[f"reference_{kind}"]
    if settings.takes_means:
        sums = sums / INPUTS[f"tokens_{kind}"]
    return sums


def losses_of(settings: PreferencesConfig, chosen, rejected) -> torch.Tensor:
    of_chosen = scores(settings, "chosen", chosen)
    of_rejected = scores(settings, "rejected", rejected)
    if settings.is_paired:
        margins = INPUTS["margin"] if settings.use_margins else 0.0
        return pair_losses(settings, of_chosen, of_rejected, margins)
    labels = torch.arange(2 * len(chosen)) < len(chosen)
    return kto_loss(
        torch.cat([of_chosen, of_rejected]),
        labels,
        kto_baseline(INPUTS["other"] - INPUTS["reference_other"]),
        settings.beta,
        settings.desirable_weight,
        settings.undesirable_weight,
    )


@pytest.mark.parametrize("row", GOLDEN["rows"], ids=lambda row: f"{row['peer']}, {row['settings']}")
def test_trl(row):
    settings = PreferencesConfig(**row["settings"])
    chosen = INPUTS["chosen"].clone().requires_grad_()
    rejected = INPUTS["rejected"].clone().requires_grad_()
    losses = losses_of(settings, chosen, rejected)
    gradients = torch.autograd.grad(losses.sum(), [chosen, rejected])
    expected = torch.tensor(row["losses"], dtype=torch.float64)
    torch.testing.assert_close(losses, expected, rtol=1e-9, atol=1e-9)
    for found, theirs in zip(gradients, row["gradients"], strict=True):
        expected = torch.tensor(theirs, dtype=torch.float64)
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)


def test_every_loss_of_whole_answers_has_numbers_of_trl():
    losses = set(PreferencesConfig.model_fields["loss"].annotation.__args__)
    assert {row["settings"]["loss"] for row in GOLDEN["rows"]} == losses - {"stepwise"}


def test_the_loss_of_steps_is_that_of_two_classes():
    """As TRL's PRMTrainer has it: cross entropy of the classes wrong and right, whose logits here
    are 0 and x; of soft labels too."""
    logits = torch.tensor([-40.0, -2.0, 0.0, 0.5, 30.0], dtype=torch.float64, requires_grad=True)
    labels = torch.tensor([1.0, 0.0, 1.0, 0.25, 1.0], dtype=torch.float64)
    classes = torch.stack([torch.zeros_like(logits), logits], dim=1)
    targets = torch.stack([1 - labels, labels], dim=1)
    expected = cross_entropy(classes, targets, reduction="none")
    losses = step_losses(logits, labels)
    torch.testing.assert_close(losses, expected, rtol=1e-9, atol=1e-9)
    [found] = torch.autograd.grad(losses.sum(), logits)
    torch.testing.assert_close(found, logits.detach().sigmoid() - labels, rtol=1e-9, atol=1e-9)


def test_a_policy_that_is_its_reference_has_the_loss_of_a_coin():
    zero = torch.zeros(1, dtype=torch.float64)
    found = pair_losses(PreferencesConfig(), zero, zero)
    assert found.item() == pytest.approx(math.log(2), abs=1e-12)


def test_the_baseline_of_kto_is_a_constant_of_at_least_zero():
    scores = torch.tensor([1.0, 4.0], requires_grad=True)
    assert kto_baseline(scores) == 2.5
    assert kto_baseline(-scores) == 0
    assert not kto_baseline(scores).requires_grad


def test_the_slope_is_the_derivative():
    margins = torch.tensor([-30.0, -1.0, 0.0, 2.0, 30.0], dtype=torch.float64, requires_grad=True)
    (slope,) = torch.autograd.grad(sigmoid_loss(margins).sum(), margins)
    torch.testing.assert_close(sigmoid_loss_slope(margins.detach()), slope)


@pytest.mark.parametrize("logprob", [-1e-12, -0.5, -0.7, -50.0, -700.0])
def test_log_odds_near_both_ends(logprob):
    value = torch.tensor(logprob, dtype=torch.float64, requires_grad=True)
    found = log_odds(value)
    (gradient,) = torch.autograd.grad(found, value)
    assert math.isfinite(found.item()) and math.isfinite(gradient.item())
    expected = logprob - math.log(-math.expm1(logprob))
    assert found.item() == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("certain", [0.0, 1e-7, -1e-9])
def test_orpo_of_answers_that_are_certain_is_finite(certain, dtype):
    """Log-probs in float32 are 0 there, or above; such an answer counts as one of -1e-7."""
    for scores in ([certain, -2.0], [-2.0, certain], [certain, certain]):
        leaf = torch.tensor(scores, dtype=dtype, requires_grad=True)
        loss = orpo_loss(leaf[0], leaf[1], 0.1)
        (gradient,) = torch.autograd.grad(loss, leaf)
        bounded = [min(score, MAX_SCORE) for score in scores]
        expected = orpo_loss(*torch.tensor(bounded, dtype=torch.float64), 0.1)
        assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
        assert gradient.isfinite().all()
        assert (gradient == 0).tolist() == [score == certain for score in scores]
