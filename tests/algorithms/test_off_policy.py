"""Corrections for rollouts of an older or another policy, against their formulas by hand."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from grpo_megatron.algorithms.ratios import lowest_before
from tests.algorithms.evaluation import evaluated, same

NOW = [[0.3, 0.4, 0.5], [0.25, 0.6]]
THEN = [[0.2, 0.5, 0.4], [0.5, 0.5]]
"""Probabilities of the tokens of two samples, under the trained policy and the engine's."""


def case(
    now: list[list[float]] = NOW,
    then: list[list[float]] = THEN,
    values: list[float] | None = None,
    **more: Any,
) -> dict[str, Any]:
    """Samples of one group, which the engine sampled with the probabilities `then`."""
    return {
        "advantages": values or [2.0, -1.0],
        "logprobs": [[math.log(p) for p in row] for row in now],
        "rollout_logprobs": [[math.log(p) for p in row] for row in then],
        **more,
    }


def ratios_of(now: list[list[float]], then: list[list[float]]) -> list[list[float]]:
    return [[a / b for a, b in zip(x, y, strict=True)] for x, y in zip(now, then, strict=True)]


# --- TOPR


def test_topr_takes_right_answers_as_they_are_and_tapers_wrong_ones():
    """The wrong sample's ratio is 0.25 / 0.5 * 0.6 / 0.5 = 0.6; the right one's does not count."""
    found = evaluated("topr", **case())
    same(found["grad_logprobs"], [[-1.0] * 3, [0.3] * 2])
    loss = -(2 * sum(map(math.log, NOW[0])) - 0.6 * sum(map(math.log, NOW[1]))) / 2
    same(found["loss"], loss)
    assert found["metrics"]["clip/high_fraction"] == 0


def test_topr_truncates_the_ratio_of_wrong_answers():
    likelier = [[0.3, 0.4, 0.5], [0.9, 0.6]]
    found = evaluated("topr", **case(now=likelier))
    same(found["grad_logprobs"], [[-1.0] * 3, [0.5] * 2])
    same(found["metrics"]["clip/high_fraction"], 2 / 5)
    bounds = ["topr_min_negative=0.7", "topr_max_positive=1.25"]
    found = evaluated("topr", bounds, **case())
    same(found["grad_logprobs"], [[-1.25 * 2 / 2] * 3, [0.7 / 2] * 2])  # 1.5 and 0.6 are outside
    same(found["metrics"]["clip/low_fraction"], 2 / 5)


def test_topr_by_tokens_weighs_each_with_its_own_ratio():
    found = evaluated("topr", ["ratio=token"], **case())
    same(found["grad_logprobs"], [[-1.0] * 3, [0.5 / 2, 1 / 2]])


# --- MinPRO


def test_minpro_weighs_tokens_by_the_lowest_ratio_before_them():
    """Ratios 1.5, 0.8, 1.25 and 0.5, 1.2."""
    found = evaluated("minpro", **case())
    weights = [[1.5, 0.8 * 1.5, 1.25 * 0.8], [0.5, 1.2 * 0.5]]
    same(found["grad_logprobs"], [[-2 * w / 5 for w in weights[0]], [w / 5 for w in weights[1]]])
    found = evaluated("minpro", ["ratio_min=0.7", "ratio_max=1.1"], **case())
    same(found["grad_logprobs"], [[-0.44, -0.44, -0.4], [0.14, 0.14]])
    same(found["metrics"]["clip/high_fraction"], 2 / 5)
    same(found["metrics"]["clip/low_fraction"], 2 / 5)


def test_the_lowest_ratio_of_a_prefix_is_a_constant_for_the_gradient():
    """With PPO's clip: `d(r_t m_t A) = r_t m_t A`, of the token's own log-prob alone."""
    found = evaluated("minpro", ["clip=none"], **case())
    weights = [[1.5, 1.2, 1.0], [0.5, 0.6]]
    same(found["grad_logprobs"], [[-2 * w / 5 for w in weights[0]], [w / 5 for w in weights[1]]])
    same(found["loss"], -(2 * 3.7 - 1.1) / 5)


def test_the_lowest_value_before_a_token_is_that_of_its_segment():
    generator = torch.Generator().manual_seed(3)
    lengths = [1, 7, 2, 64, 3, 1, 33]
    segment = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
    values = torch.randn(len(segment), generator=generator)
    expected = []
    for part in values.split(lengths):
        expected.append(0.0)
        expected += [float(part[:place].min()) for place in range(1, len(part))]
    assert lowest_before(values, segment).tolist() == expected


# --- trust region masking


def test_trm_leaves_out_whole_samples_that_one_token_spoils():
    """Largest k2: (log 1.5)^2 / 2 = 0.0822 and (log 0.5)^2 / 2 = 0.2402."""
    found = evaluated("trm", ["trm_max=0.1", "trm_mean=null"], **case())
    same(found["grad_logprobs"], [[-1.5, -0.8, -1.25], [0, 0]])
    same(found["loss"], -(1.5 + 0.8 + 1.25))  # two samples count, also the one without a loss
    same(found["metrics"]["rejected/trm_fraction"], 2 / 5)
    same(found["metrics"]["rejected/trm_sample_fraction"], 1 / 2)
    assert evaluated("trm", ["trm_max=0.08", "trm_mean=null"], **case())["loss"] == 0


def test_trm_bounds_the_mean_divergence_too():
    k3 = [[r - 1 - math.log(r) for r in row] for row in ratios_of(NOW, THEN)]
    means = [sum(row) / len(row) for row in k3]
    assert means[0] < means[1]
    between = sum(means) / 2
    found = evaluated("trm", ["trm_max=null", f"trm_mean={between}"], **case())
    same(found["metrics"]["rejected/trm_sample_fraction"], 1 / 2)
    same(found["grad_logprobs"][1], [0, 0])
    assert evaluated("trm", ["trm_max=9", f"trm_mean={means[0] / 2}"], **case())["loss"] == 0


def test_trm_has_bounds_of_domains():
    two = case(domains=["a", "b"], group_ids=[0, 1])
    of_b = ["domain.b.trm_max=1", "trm_max=0.01", "trm_mean=null"]
    found = evaluated("trm", of_b, **two)
    same(found["metrics"]["rejected/trm_sample_fraction@a"], 1)
    same(found["metrics"]["rejected/trm_sample_fraction@b"], 0)


# --- DRPO


def test_drpo_holds_probabilities_smoothly_and_pulls_back_beyond_the_bound():
    """Weights `r (1 - sign(A) (p - q) / delta)`, of the constant length 3."""
    found = evaluated("drpo", ["drpo_delta=0.05"], **case())
    expected = []
    for now, then, value in zip(NOW, THEN, (2.0, -1.0), strict=True):
        sign = math.copysign(1, value)
        weights = [p / q * (1 - sign * (p - q) / 0.05) for p, q in zip(now, then, strict=True)]
        expected.append([-value * weight / 6 for weight in weights])
    same(found["grad_logprobs"], expected)
    assert found["grad_logprobs"][0][0] > 0  # 0.1 too likely already: it becomes less likely
    term = sum(
        p / q * value - abs(value) * q * (p / q - 1) ** 2 / 0.1
        for row, (now, then, value) in enumerate(zip(NOW, THEN, (2.0, -1.0), strict=True))
        for p, q in zip(now, then, strict=True)
    )
    same(found["loss"], -term / 6)


def test_drpo_on_policy_is_plain():
    found = evaluated("drpo", **case(then=NOW))
    same(found["grad_logprobs"], [[-2 / 6] * 3, [1 / 6] * 2])


# --- what they have in common


@pytest.mark.parametrize("preset", ["topr", "minpro", "trm", "drpo"])
def test_what_the_environment_said_is_in_no_ratio_and_no_denominator(preset):
    with_environment = case(
        now=[[0.3, 0.9, 0.4, 0.5], [0.25, 0.6, 0.1]],
        then=[[0.2, 0.01, 0.5, 0.4], [0.5, 0.5, 0.9]],
        loss_mask=[[1, 0, 1, 1], [1, 1, 0]],
    )
    wide = {"trm": ["trm_max=9", "trm_mean=9"], "drpo": ["aggregation_length=3"]}
    found = evaluated(preset, wide.get(preset, []), **with_environment)
    alone = evaluated(preset, wide.get(preset, []), **case())
    same(found["loss"], alone["loss"])
    first, second = alone["grad_logprobs"]
    same(found["grad_logprobs"], [[first[0], 0, *first[1:]], [*second, 0]])
