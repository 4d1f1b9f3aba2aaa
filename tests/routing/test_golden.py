"""Routing numbers in float64 from the specification: gates, losses on routers, agreement."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from grpo_megatron.routing import router_losses
from grpo_megatron.routing.agreement import RoutingSums, agreement

GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "objectives.json").read_text())
G = GOLDEN["moe_replay"]
LOSSES = {
    "kl": ("aux_KL(old||new)", "aux_KL_grad"),
    "set_mass": ("aux_set_mass_-log sum_S p", "aux_set_mass_grad"),
    "cross_entropy": ("aux_mean_CE_-1/k sum_S log p", "aux_mean_CE_grad"),
}


@pytest.mark.parametrize("kind", ["logits", "softmax"])
@pytest.mark.parametrize("loss", LOSSES)
def test_losses_and_their_gradients(loss, kind):
    """`softmax`: the router hands over probabilities; the gradient by its logits is the same."""
    old, new = (
        torch.tensor([G[n]], dtype=torch.float64) for n in ("logits_rollout", "logits_train")
    )
    new.requires_grad_()
    scores = new if kind == "logits" else new.softmax(-1)
    log_p, chosen = router_losses.log_probs(scores, kind), torch.tensor([G["set_rollout"]])
    value = (
        router_losses.kl(log_p, router_losses.log_probs(old, "logits"))
        if loss == "kl"
        else getattr(router_losses, loss)(log_p, chosen)
    )
    value.sum().backward()
    name, gradient = LOSSES[loss]
    assert value.item() == pytest.approx(G[name], abs=1e-12)
    assert new.grad[0].tolist() == pytest.approx(G[gradient], abs=1e-9)


def test_agreement():
    stored, live = (torch.tensor([G[n]]) for n in ("set_rollout", "set_train_native"))
    flips, jaccard = agreement(stored, live.flip(-1))
    assert flips.item() == pytest.approx(G["flip_rate(slot)"])
    assert jaccard.item() == pytest.approx(G["jaccard"])


def test_sigmoid_scores_without_their_bias():
    scores = torch.tensor([[0.2, 0.6, 0.1]], dtype=torch.float64)
    bias = torch.tensor([0.5, -0.3, 0.0], dtype=torch.float64)
    found = router_losses.log_probs(scores + bias, "sigmoid", bias).exp()
    torch.testing.assert_close(found, scores / scores.sum())


def test_balance_is_least_where_the_load_is_even():
    p = torch.tensor([[0.7, 0.2, 0.1]], dtype=torch.float64)

    def loss(counts: list[float]) -> float:
        weights = router_losses.balance_coefficients(torch.tensor([counts]).double(), 1.0, 1)
        return float((p * weights).sum())

    assert loss([5.0, 5.0, 5.0]) == pytest.approx(1.0)  # Switch's loss of an even load
    assert loss([9.0, 3.0, 3.0]) > 1 > loss([1.0, 4.0, 10.0])


def test_the_load_of_a_layer_is_its_own():
    """Experts of the second layer are chosen ten times as often."""
    counts = torch.tensor([[1.0, 3.0], [30.0, 10.0]]).double()
    found = router_losses.balance_coefficients(counts, 0.5, 4)
    assert found.tolist() == [[0.0625, 0.1875], [0.1875, 0.0625]]


def test_sums_over_ranks_and_layers():
    sums = RoutingSums((1, 4), 4, ["rollout"], torch.device("cpu"))
    chosen = torch.tensor([[0, 1], [0, 2], [0, 1]])
    sums.add_load(0, chosen, torch.tensor([0.5, 0.5, 0.2]), torch.ones(3))
    flips, jaccard = torch.tensor([0.5, 0.0, 1.0]), torch.tensor([1 / 3, 1.0, 0.0])
    known = torch.tensor([True, True, False])
    sums.add_comparison("rollout", 0, flips, jaccard, known)
    sums.any_layer[0] += torch.tensor([1, 2])
    found = sums.result()
    assert found["routing/rollout_slot_flip_rate"] == pytest.approx(0.25)
    assert found["routing/rollout_token_flip_rate/layer_1"] == pytest.approx(0.5)
    assert found["routing/rollout_any_layer_flip_rate"] == pytest.approx(0.5)
    assert found["routing/load_max_ratio/layer_1"] == pytest.approx(2.0)
    assert found["routing/dead_experts"] == 1
    assert found["routing/entropy"] == pytest.approx(0.4)
    assert not any("layer_4" in name for name in found)


def test_tokens_count_as_often_as_they_are_used():
    """Three tokens that count once, twice and never; the second layer has seen nothing."""
    sums = RoutingSums((1, 4), 4, [], torch.device("cpu"))
    chosen = torch.tensor([[0, 1], [0, 2], [3, 1]])
    sums.add_load(0, chosen, torch.tensor([0.5, 0.2, 9.0]), torch.tensor([1.0, 2.0, 0.0]))
    assert sums.load[0].tolist() == [3, 1, 2, 0]
    found = sums.result()
    assert found["routing/entropy"] == pytest.approx((0.5 + 2 * 0.2) / 3)
    assert found["routing/load_cv"] == pytest.approx(float(np.std([3, 1, 2, 0])) / 1.5)
    assert found["routing/dead_experts"] == 1


def test_the_largest_load_is_that_of_the_worst_layer():
    sums = RoutingSums((1, 4), 2, [], torch.device("cpu"))
    ones = torch.ones(4)
    sums.add_load(0, torch.tensor([[0], [1], [0], [1]]), ones, ones)
    sums.add_load(1, torch.tensor([[0], [1], [0], [0]]), ones, ones)
    found = sums.result()
    assert found["routing/load_max_ratio"] == 1.5
    assert found["routing/load_max_ratio/layer_1"] == 1.0
