"""Corrections for rollouts of an older or another policy, against their formulas by hand."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from grpo_megatron.algorithms.ratios import discounted_from, lowest_before
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
    assert evaluated("trm", ["trm_max=9", f"trm_mean={means[0] - 1e-9}"], **case())["loss"] == 0
    found = evaluated("trm", ["trm_max=null", f"trm_mean={means[1] + 1e-9}"], **case())
    same(found["metrics"]["rejected/trm_fraction"], 0)


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


def test_drpo_weighs_by_the_old_probability_also_where_the_ratio_is_bounded():
    case = {"logprobs": [[-25.0]], "old_logprobs": [[-0.1]], "advantages": [-1.0]}
    found = evaluated("drpo", ["proximal=recompute", "drpo_delta=0.5"], **case)
    ratio = math.exp(-20)
    same(found["loss"], ratio + math.exp(-0.1) * (ratio - 1) ** 2)


def test_drpo_on_policy_is_plain():
    found = evaluated("drpo", **case(then=NOW))
    same(found["grad_logprobs"], [[-2 / 6] * 3, [1 / 6] * 2])


# --- M2PO


def of_the_old_policy(**more: Any) -> dict[str, Any]:
    """The same probabilities of the present and of the old policy."""
    given = case(**more)
    return {**given, "old_logprobs": given["logprobs"]}


def test_m2po_leaves_out_the_largest_ratios_until_the_mean_is_small_enough():
    """Candidates: ratios 1.5 and 1.25 with A > 0, 0.5 with A < 0."""
    squares = [math.log(r) ** 2 for r in (1.25, 1.5, 0.5)]
    found = evaluated("m2po", [f"m2po_limit={sum(squares) / 3 + 1e-9}"], **of_the_old_policy())
    same(found["metrics"]["rejected/m2po_fraction"], 0)
    same(found["grad_logprobs"], [[-2 * r / 5 for r in (1.5, 0.8, 1.25)], [0.5 / 5, 1.2 / 5]])
    found = evaluated("m2po", [f"m2po_limit={sum(squares) / 3 - 1e-9}"], **of_the_old_policy())
    same(found["grad_logprobs"], [[-2 * r / 5 for r in (1.5, 0.8, 1.25)], [0, 1.2 / 5]])
    found = evaluated("m2po", [f"m2po_limit={squares[0] + 1e-9}"], **of_the_old_policy())
    same(found["grad_logprobs"], [[0, -2 * 0.8 / 5, -2 * 1.25 / 5], [0, 1.2 / 5]])
    found = evaluated("m2po", ["m2po_limit=1e-9"], **of_the_old_policy())
    same(found["grad_logprobs"], [[0, -2 * 0.8 / 5, 0], [0, 1.2 / 5]])
    same(found["metrics"]["rejected/m2po_fraction"], 3 / 5)


def test_m2po_looks_at_each_domain_for_itself():
    two = of_the_old_policy(domains=["a", "b"], group_ids=[0, 1])
    limit = math.log(0.5) ** 2 - 1e-9  # domain b has this one candidate, a has smaller ones
    found = evaluated("m2po", [f"m2po_limit={limit}"], **two)
    same(found["metrics"]["rejected/m2po_fraction@a"], 0)
    same(found["metrics"]["rejected/m2po_fraction@b"], 1 / 2)
    together = [f"m2po_limit={limit}", "statistics_scope=global"]
    same(evaluated("m2po", together, **two)["metrics"]["rejected/m2po_fraction"], 0)


def test_tokens_without_a_loss_are_none_of_m2pos():
    """The ratio 0.5 is spoilt: of 1.5 and 1.25 the mean is below the limit."""
    turns = [[[2, None, None]], [{"end": 0, "reward": None, "state": None, "spoilt": 1}, [1, 0, 0]]]
    squares = [math.log(r) ** 2 for r in (1.25, 1.5)]
    limit = sum(squares) / 2 + 1e-9
    found = evaluated("m2po", [f"m2po_limit={limit}"], **of_the_old_policy(turns=turns))
    same(found["metrics"]["rejected/m2po_fraction"], 0)
    same(found["grad_logprobs"], [[-2 * r / 5 for r in (1.5, 0.8, 1.25)], [0, 1.2 / 5]])
    whole = evaluated("m2po", [f"m2po_limit={limit}"], **of_the_old_policy())
    same(whole["metrics"]["rejected/m2po_fraction"], 1 / 5)


# --- A-3PO


def test_a3po_takes_the_engine_for_old_where_it_is_one_version_behind():
    plain = ["clip=none", "mismatch=tis", "mismatch_max=100"]
    for more in ({"staleness": [[0, 1, 0], [1, 1]]}, {}):
        found = evaluated("a3po", plain, **case(**more))
        same(found["grad_logprobs"], [[-2 * r / 5 for r in (1.5, 0.8, 1.25)], [0.5 / 5, 1.2 / 5]])
        same(found["metrics"]["mismatch/rho/mean"], 1)


def test_a3po_interpolates_by_the_age_of_each_token():
    """Ages 2, 3, 1 and 4, 2: the old policy is 1/2, 2/3, 0 and 3/4, 1/2 of the way."""
    ages = case(staleness=[[2, 3, 1], [4, 2]])
    ratios = [1.5, 0.8, 1.25, 0.5, 1.2]
    shares = [1 / 2, 2 / 3, 0, 3 / 4, 1 / 2]
    weights = [r**s for r, s in zip(ratios, shares, strict=True)]
    updates = [r ** (1 - s) for r, s in zip(ratios, shares, strict=True)]
    found = evaluated("a3po", ["clip=none"], **ages)
    same(found["grad_logprobs"], [[-2 * r / 5 for r in ratios[:3]], [r / 5 for r in ratios[3:]]])
    same(found["metrics"]["ratio/mean"], sum(updates) / 5)
    same(found["metrics"]["mismatch/rho/mean"], sum(weights) / 5)
    found = evaluated("a3po", ["clip_high=0.24", "mismatch_max=1.1"], **ages)
    # weights 1.22, 0.86, 1, 0.59, 1.10 and updates 1.22, 0.93, 1.25, 0.84, 1.10
    same(found["grad_logprobs"], [[0, -2 * 0.8 / 5, 0], [0.5 / 5, 1.2 / 5]])


# --- FIPO


def as_old(**more: Any) -> dict[str, Any]:
    """The engine's probabilities are those of the old policy, too."""
    given = case(**more)
    return {**given, "old_logprobs": given["rollout_logprobs"]}


def test_fipo_weighs_a_token_by_what_became_likelier_behind_it():
    gamma = 2.0 ** (-1 / 2)
    wide = ["future_kl_half_life=2", "future_kl_min=0", "future_kl_max=9", "clip=none"]
    found = evaluated("fipo", [*wide, "dual_clip=null"], **as_old())
    expected = []
    for row, value in zip(ratios_of(NOW, THEN), (2.0, -1.0), strict=True):
        sums = []
        for place in range(len(row)):
            sums.append(sum(gamma**far * math.log(r) for far, r in enumerate(row[place:])))
        expected.append([-value * r * math.exp(s) / 5 for r, s in zip(row, sums, strict=True)])
    same(found["grad_logprobs"], expected)


def test_fipo_bounds_its_weights_and_leaves_out_what_has_run_away():
    """Ratios 45, which is above future_kl_ratio_max, and 1.5, the only one in a sum."""
    now, then = [[0.9, 0.3], [0.9, 0.3]], [[0.02, 0.2], [0.02, 0.2]]
    given = as_old(now=now, then=then, values=[1.0, -1.0])
    plain = ["clip=none", "dual_clip=null"]
    found = evaluated("fipo", plain, **given)
    same(found["grad_logprobs"], [[-45 * 1.2 / 4, -1.5 * 1.2 / 4], [45 * 1.0 / 4, 1.5 * 1.2 / 4]])
    same(found["metrics"]["credit/mean"], (3 * 1.2 + 1.0) / 4)
    found = evaluated("fipo", ["future_kl_half_life=1", "future_kl_max=9", *plain], **given)
    same(found["metrics"]["credit/mean"], (1.5**0.5 + 1.5 + 1.0 + 1.5) / 4)
    low = ["future_kl_min=0.5", "future_kl_max=0.6", *plain]
    found = evaluated("fipo", low, **given)
    same(found["grad_logprobs"], [[-45 * 0.6 / 4, -1.5 * 0.6 / 4], [45 * 0.8 / 4, 1.5 * 0.6 / 4]])


def test_discounted_sums_end_with_their_segment():
    generator = torch.Generator().manual_seed(4)
    lengths = [3, 1, 40, 2, 17]
    segment = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
    values = torch.randn(len(segment), generator=generator, dtype=torch.float64)
    expected = []
    for part in values.split(lengths):
        for place in range(len(part)):
            later = part[place:].tolist()
            expected.append(sum(0.9**far * value for far, value in enumerate(later)))
    same(discounted_from(values, segment, 0.9).tolist(), expected, 1e-12)


# --- Kimi K2.5


def test_both_sides_are_clipped_for_both_signs_and_the_distance_is_held():
    """Ratios 1.5, 0.8, 1.25 and 0.5, 1.2 within [0.75, 1.3]."""
    bounds = ["clip_low=0.25", "clip_high=0.3", "rollout_drift_weight=0.1"]
    found = evaluated("kimi_k2_5", bounds, **case())
    surrogate = [[0, -2 * 0.8 / 5, -2 * 1.25 / 5], [0, 1.2 / 5]]
    expected = []
    for row, terms in zip(ratios_of(NOW, THEN), surrogate, strict=True):
        expected.append([t + 0.2 * math.log(r) / 5 for r, t in zip(row, terms, strict=True)])
    same(found["grad_logprobs"], expected)
    same(found["metrics"]["clip/high_fraction"], 1 / 5)
    same(found["metrics"]["clip/low_fraction"], 1 / 5)


# --- RSPO

SHIFT = {"router_shift": [[1.0, 0.9, 0.5], [0.7, 0.85]]}
"""With a floor of 0.8: 1, 0.9, 0.8 and 0.8, 0.85."""


def test_rspo_scales_ratios_by_what_routers_have_shifted_before_the_clip():
    given = as_old(**SHIFT)
    plain = ["clip=ppo", "ratio=token", "clip_low=0.5", "clip_high=0.3"]
    found = evaluated("rspo", plain, **given)
    # 1.5 and 1.25 * 0.8 against at most 1.3 with A > 0; 0.5 * 0.8 against at least 0.5 with A < 0
    same(found["grad_logprobs"], [[0, -2 * 0.72 / 6, -2 / 6], [0, 1.2 * 0.85 / 4]])
    same(found["metrics"]["router_shift/mean"], (1 + 0.9 + 0.5 + 0.7 + 0.85) / 5)
    same(found["metrics"]["router_shift/floored_fraction"], 2 / 5)
    same(found["metrics"]["update/k1"], -sum(map(math.log, (1.5, 0.8, 1.25, 0.5, 1.2))) / 5)


def test_rspo_is_gmpo_of_the_scaled_ratios():
    given = as_old(**SHIFT)
    found = evaluated("rspo", ["clip_low=1", "clip_high=9"], **given)
    means = [(1.5 * 0.72 * 1.0) ** (1 / 3), (0.4 * 1.02) ** (1 / 2)]
    same(found["grad_logprobs"], [[-2 * means[0] / 6] * 3, [means[1] / 4] * 2])
    same_routers = evaluated("rspo", **as_old(router_shift=[[1.0] * 3, [1.0] * 2]))
    assert same_routers["loss"] == evaluated("rspo", **as_old())["loss"]
    assert same_routers["loss"] == evaluated("gmpo", **given)["loss"]


# --- VCPO

RIGHT_AND_WRONG = {
    "rewards": [1.0, 0.0],
    "logprobs": [[math.log(p) for p in row] for row in NOW],
    "rollout_logprobs": [[math.log(p) for p in row] for row in THEN],
    "squared_probs": [[0.2, 0.3, 0.4], [0.3, 0.5]],
}
"""Trajectory ratios 1.5 * 0.8 * 1.25 = 1.5 and 0.5 * 1.2 = 0.6; the old policy is the present."""


def test_vcpos_baseline_weighs_rewards_by_ratios_and_gradients_squared():
    norms = [
        sum(1 - 2 * p + s for p, s in zip(now, squares, strict=True))
        for now, squares in zip(NOW, RIGHT_AND_WRONG["squared_probs"], strict=True)
    ]
    weights = [1.5**2 * norms[0], 0.6**2 * norms[1]]
    baseline = weights[0] / sum(weights)
    plain = evaluated("vcpo", ["advantage_std=none"], **RIGHT_AND_WRONG)
    same(plain["advantages"], [1 - baseline, -baseline])
    found = evaluated("vcpo", **RIGHT_AND_WRONG)
    deviation = math.sqrt(0.5) + 1e-6
    same(found["advantages"], [(1 - baseline) / deviation, -baseline / deviation])
    first, second = found["advantages"]
    same(found["grad_logprobs"], [[-1.5 * first / 6] * 3, [-0.6 * second / 4] * 2])


@pytest.mark.parametrize(
    ("rewards", "expected"), [([1.0, 1.0], [0, 0]), ([None, 1.0], [0, 0]), ([None, None], [0, 0])]
)
def test_vcpos_baseline_of_equal_rewards_leaves_nothing(rewards, expected):
    found = evaluated("vcpo", **{**RIGHT_AND_WRONG, "rewards": rewards})
    same(found["advantages"], expected)
    without_gradients = {**RIGHT_AND_WRONG, "logprobs": [[0.0] * 3, [0.0] * 2]}
    without_gradients["squared_probs"] = [[1.0] * 3, [1.0] * 2]
    plain = evaluated("vcpo", ["advantage_std=none"], **without_gradients)
    same(plain["advantages"], [0.5, -0.5])  # nothing to weigh by: the mean


def test_the_learning_rate_goes_by_the_effective_share_of_samples():
    share = (1.5 + 0.6) ** 2 / (1.5**2 + 0.6**2) / 2
    metrics = evaluated("vcpo", **RIGHT_AND_WRONG)["metrics"]
    same(metrics["optimizer/ess_fraction"], share)
    same(metrics["optimizer/lr_factor"], math.sqrt(share))
    linear = ["ess_scaling=linear", "ess_reference=0.9"]
    same(
        evaluated("vcpo", linear, **RIGHT_AND_WRONG)["metrics"]["optimizer/lr_factor"], share / 0.9
    )
    relaxed = evaluated("vcpo", ["ess_reference=0.5"], **RIGHT_AND_WRONG)["metrics"]
    assert relaxed["optimizer/lr_factor"] == 1
    on_policy = {**RIGHT_AND_WRONG, "rollout_logprobs": RIGHT_AND_WRONG["logprobs"]}
    assert evaluated("vcpo", **on_policy)["metrics"]["optimizer/ess_fraction"] == 1
    assert "optimizer/lr_factor" not in evaluated("grpo", **RIGHT_AND_WRONG)["metrics"]


def test_samples_that_cannot_be_compared_do_not_spoil_the_share():
    impossible = {**RIGHT_AND_WRONG, "rollout_logprobs": [[-math.inf, 0, 0], [-700.0, -700.0]]}
    impossible["logprobs"] = [[-1.0, 0.0, 0.0], [-1.0, -1.0]]
    metrics = evaluated("vcpo", **impossible)["metrics"]
    same(metrics["optimizer/ess_fraction"], 1 / 2)


# --- what they have in common

PRESETS = ("topr", "minpro", "trm", "drpo", "m2po", "a3po", "fipo", "kimi_k2_5", "rspo")


@pytest.mark.parametrize("preset", PRESETS)
def test_what_the_environment_said_is_in_no_ratio_and_no_denominator(preset):
    with_environment = case(
        now=[[0.3, 0.9, 0.4, 0.5], [0.25, 0.6, 0.1]],
        then=[[0.2, 0.01, 0.5, 0.4], [0.5, 0.5, 0.9]],
        loss_mask=[[1, 0, 1, 1], [1, 1, 0]],
    )
    wide = {
        "trm": ["trm_max=9", "trm_mean=9"],
        "drpo": ["aggregation_length=3"],
        "m2po": ["m2po_limit=0.1"],
        "a3po": ["clip_high=9", "mismatch_max=9"],
        "fipo": ["proximal=rollout"],
    }
    found = evaluated(preset, wide.get(preset, []), **with_environment)
    alone = evaluated(preset, wide.get(preset, []), **case())
    same(found["loss"], alone["loss"])
    first, second = alone["grad_logprobs"]
    same(found["grad_logprobs"], [[first[0], 0, *first[1:]], [*second, 0]])
