"""The policy loss in float64: golden numbers, and what a split must not change."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_megatron.algorithms.aggregation import AGGREGATIONS
from grpo_megatron.algorithms.objective import LossBatch, policy_loss, supervised_loss
from grpo_megatron.algorithms.presets import PRESETS, Choices
from grpo_megatron.algorithms.stats import Stats
from tests.algorithms.golden import GOLDEN

CHOICES = {
    "grpo": PRESETS["grpo"], "gspo": PRESETS["gspo"],
    "gspo_wide": Choices("group", "sequence_geo", 0.2, 0.3, "seq_mean_token_mean"),
    "token_mean": Choices("group", "token", 0.2, 0.28, "token_mean"),
}


def batch_of(old, logprobs, rollout, advantages, weights, counts) -> LossBatch:
    """Flat float64 tokens of samples with `counts` tokens; per-sample advantages and weights."""
    counts = torch.as_tensor(counts, dtype=torch.int64)
    def flat(values):
        return torch.as_tensor(values, dtype=torch.float64)
    def per_token(values):
        return flat(values).repeat_interleave(counts)
    return LossBatch(
        logprobs=logprobs, old_logprobs=flat(old), rollout_logprobs=flat(rollout),
        entropies=-flat(old), advantages=per_token(advantages), weights=per_token(weights),
        sample=torch.arange(len(counts)).repeat_interleave(counts), token_counts=counts)


@pytest.mark.parametrize("case", GOLDEN["losses_2x3"]["cases"],
                         ids=lambda c: f"{c['ratio']}-{c['aggregation']}-{c['clip'][1]}")
def test_golden_losses_and_gradients(case):
    inputs = GOLDEN["losses_2x3"]["inputs"]
    mask = torch.tensor(inputs["mask"], dtype=torch.bool)
    counts = mask.sum(1).numpy()
    logprobs = torch.tensor(inputs["logp"], dtype=torch.float64, requires_grad=True)
    old = torch.tensor(inputs["logp_old"], dtype=torch.float64)[mask]
    choices = Choices("group", case["ratio"], *case["clip"], case["aggregation"])
    loss, _ = policy_loss(choices, batch_of(
        old, logprobs[mask], old, inputs["adv"], AGGREGATIONS[choices.aggregation](counts),
        counts))
    loss.backward()
    assert loss.item() == pytest.approx(case["loss"], abs=1e-9)
    np.testing.assert_allclose(logprobs.grad.numpy(), case["grad"], atol=1e-9)


@pytest.mark.parametrize(("ratio", "advantage", "term", "clipped"), [
    (1.5, 1.0, 1.28, "high"), (0.5, -1.0, -0.8, "low"),
    (1.5, -1.0, -1.5, None), (0.5, 1.0, 0.5, None), (1.1, 1.0, 1.1, None), (1.5, 0.0, 0.0, None)])
@pytest.mark.parametrize("level", ["token", "sequence_geo"])
def test_each_side_of_the_clip(level, ratio, advantage, term, clipped):
    """The golden batch cannot tell the sides apart: its errors would cancel."""
    logprobs = torch.full((2,), np.log(ratio), dtype=torch.float64, requires_grad=True)
    loss, stats = policy_loss(Choices("group", level, 0.2, 0.28, "token_mean"), batch_of(
        [0.0, 0.0], logprobs, [0.0, 0.0], [advantage], [0.5], [2]))
    loss.backward()
    assert loss.item() == pytest.approx(-term, abs=1e-12)
    gradient = 0.0 if clipped else -ratio * advantage / 2
    np.testing.assert_allclose(logprobs.grad.numpy(), [gradient] * 2, atol=1e-12)
    found = {side: stats.result()[f"clip/{side}_fraction"] for side in ("low", "high")}
    assert found == {side: float(side == clipped) for side in ("low", "high")}


def test_golden_aggregation():
    case = GOLDEN["aggregation"]
    counts, losses = np.array(case["tokens"], np.int64), np.array(case["per_token_loss"])
    for name, expected in (("token_mean", case["exact_token_mean"]),
                           ("seq_mean_token_mean", case["seq_mean_token_mean"])):
        total = (AGGREGATIONS[name](counts) * counts * losses).sum()
        assert total == pytest.approx(expected, abs=1e-12)


def test_golden_k3():
    case = GOLDEN["kl_tokens"]
    logprobs = torch.tensor(case["logp"], dtype=torch.float64)
    _, stats = policy_loss(PRESETS["grpo"], batch_of(
        case["logp_ref"], logprobs, case["logp"], [0.0], [0.0], [3]))
    assert stats.result()["mismatch/k3"] == pytest.approx(np.mean(case["k3"]), abs=1e-12)


class Samples:
    """Random samples, of which any subset makes a micro-batch."""

    def __init__(self, counts: list[int], seed: int, aggregation: str):
        rng = np.random.default_rng(seed)
        self.counts = np.array(counts, np.int64)
        self.offsets = np.concatenate([[0], np.cumsum(self.counts)])
        n = int(self.offsets[-1])
        self.old = -rng.exponential(1.0, n)
        self.rollout = self.old + 0.05 * rng.normal(size=n)
        self.start = self.old + 0.2 * rng.normal(size=n)
        self.advantages = rng.normal(size=len(counts))
        self.weights = AGGREGATIONS[aggregation](self.counts)

    def evaluate(self, choices: Choices, parts) -> tuple[float, np.ndarray, dict[str, float]]:
        """Loss, gradient by token and metrics of micro-batches of sample numbers."""
        logprobs = torch.tensor(self.start, requires_grad=True)
        total, stats = torch.zeros((), dtype=torch.float64), Stats()
        for part in parts:
            tokens = np.concatenate([np.empty(0, np.int64), *(
                np.arange(self.offsets[i], self.offsets[i + 1]) for i in part)])
            part = np.array(part, np.int64)
            loss, found = policy_loss(choices, batch_of(
                self.old[tokens], logprobs[torch.from_numpy(tokens)], self.rollout[tokens],
                self.advantages[part], self.weights[part], self.counts[part]))
            total = total + loss
            stats.add(found)
        total.backward()
        return total.item(), logprobs.grad.numpy(), stats.result()


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 7), min_size=1, max_size=9), st.integers(0, 1000),
       st.sampled_from(sorted(CHOICES)), st.data())
def test_split_and_order_do_not_matter(counts, seed, name, data):
    choices = CHOICES[name]
    samples = Samples(counts, seed, choices.aggregation)
    loss, gradient, metrics = samples.evaluate(choices, [range(len(counts))])
    order = data.draw(st.permutations(range(len(counts))))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(counts)), max_size=4)))
    bounds = [0, *cuts, len(counts)]  # equal neighbours: empty micro-batches
    parts = [order[a:b] for a, b in itertools.pairwise(bounds)]
    other_loss, other_gradient, other_metrics = samples.evaluate(choices, parts)
    assert other_loss == pytest.approx(loss, abs=1e-12)
    np.testing.assert_allclose(other_gradient, gradient, atol=1e-13)
    assert other_metrics == pytest.approx(metrics, rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("name", CHOICES)
def test_nothing_to_train_gives_zero(name):
    logprobs = torch.zeros(0, dtype=torch.float64, requires_grad=True)
    loss, stats = policy_loss(CHOICES[name], batch_of([], logprobs, [], [], [], []))
    loss.backward()
    assert loss.item() == 0.0
    assert not torch.isnan(loss)
    assert np.isnan(list(stats.result().values())).any()  # a mean of nothing is no number


@pytest.mark.parametrize("name", CHOICES)
def test_masked_samples_give_no_gradient_however_far_off(name):
    """Weight 0 with log-probs that would overflow a ratio."""
    logprobs = torch.tensor([-1.0, -900.0, -0.1, -2.0], dtype=torch.float64, requires_grad=True)
    loss, _ = policy_loss(CHOICES[name], batch_of(
        [-1.0, -1.0, -900.0, -2.0], logprobs, [-1.0] * 4, [1.0, -1.0], [0.0, 0.0], [2, 2]))
    loss.backward()
    assert loss.item() == 0.0
    assert torch.equal(logprobs.grad, torch.zeros(4, dtype=torch.float64))


@pytest.mark.parametrize("name", CHOICES)
def test_the_first_update_has_ratio_one(name):
    """On-policy the gradient is that of plain REINFORCE."""
    samples = Samples([3, 1, 4], 0, CHOICES[name].aggregation)
    samples.start = samples.old
    loss, gradient, metrics = samples.evaluate(CHOICES[name], [range(3)])
    weighted = samples.advantages * samples.weights
    assert loss == pytest.approx(-(weighted * samples.counts).sum(), abs=1e-12)
    np.testing.assert_allclose(gradient, -np.repeat(weighted, samples.counts), atol=1e-12)
    assert metrics["ratio/mean"] == metrics["ratio/max"] == 1.0
    assert metrics["clip/low_fraction"] == metrics["clip/high_fraction"] == 0.0


def test_supervised_loss_is_the_weighted_likelihood():
    logprobs = torch.tensor([-1.0, -3.0, -0.5], dtype=torch.float64, requires_grad=True)
    loss, stats = supervised_loss(batch_of(
        [0.0] * 3, logprobs, [0.0] * 3, [0.0, 0.0], [0.25, 0.5], [2, 1]))
    loss.backward()
    assert loss.item() == pytest.approx(1.25)
    assert logprobs.grad.tolist() == [-0.25, -0.25, -0.5]
    assert stats.result()["loss/nll"] == pytest.approx(1.5)
