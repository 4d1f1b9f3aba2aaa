"""Choices that other libraries have too, against their formulas written out in plain numbers."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from grpo_megatron.algorithms.advantages.estimators import ESTIMATORS
from grpo_megatron.algorithms.advantages.signal import SUM_TO_ZERO, carries_signal
from grpo_megatron.algorithms.batch import ClipInputs
from grpo_megatron.algorithms.case import parse_case
from grpo_megatron.algorithms.groups import Groups
from grpo_megatron.algorithms.ratios import binary_kl
from grpo_megatron.algorithms.terms import clip_status
from grpo_megatron.config.loader import load_objective
from grpo_megatron.config.objective import PRESETS, TOKEN_LEVEL, ObjectiveConfig
from grpo_megatron.config.rules.check import check_rules
from tests.algorithms.evaluation import advantages, evaluated, flat, same
from tests.algorithms.test_invariance import random_case
from tests.config.conftest import unchecked_config

TOKEN_MEAN = "aggregation=token_mean"
PLAIN = "advantage_std=none"


def double(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def of_probabilities(
    new: list[list[float]], old: list[list[float]], values: list[float], **more: Any
) -> dict[str, Any]:
    """A case with these probabilities of tokens and these advantages of samples, one group."""
    return {
        "advantages": values,
        "group_ids": [0] * len(values),
        "logprobs": [[math.log(p) for p in row] for row in new],
        "old_logprobs": [[math.log(p) for p in row] for row in old],
        **more,
    }


# --- advantages


def test_the_mean_of_the_batch_is_a_baseline_for_every_prompt():
    rewards = [[1, 0], [1, 1], [0]]
    lengths = [[3, 1], [2, 2], [4]]
    found = advantages("grpo", rewards, lengths, "advantage=batch", PLAIN)
    same(found, [[0.4, -0.6], [0.4, 0.4], [-0.6]])


def test_the_mean_of_the_batch_is_that_of_the_domain():
    case = {
        "rewards": [1, 0, 3, 9, None],
        "group_ids": [0, 0, 1, 1, 1],
        "domains": ["a", "a", "b", "b", "b"],
        "logprobs": [[-1.0]] * 5,
    }
    settings = ["advantage=batch", PLAIN]
    same(evaluated("grpo", settings, **case)["advantages"], [0.5, -0.5, -3, 3, 0])
    coupled = evaluated("grpo", [*settings, "statistics_scope=global"], **case)["advantages"]
    same(coupled, [-2.25, -3.25, -0.25, 5.75, 0])


@pytest.mark.parametrize(("rewards", "expected"), [([[2]], [[0]]), ([[1, 1], [1]], [[0, 0], [0]])])
def test_a_batch_without_spread_has_no_advantage(rewards, expected):
    lengths = [[1] * len(row) for row in rewards]
    same(advantages("grpo", rewards, lengths, "advantage=batch", PLAIN), expected)


def test_opo_weighs_its_baseline_by_length():
    """(10 * 1 + 30 * 0 + 20 * 0.5) / 60 = 1/3; without spread, and alone, exactly 0."""
    found = advantages("opo", [[1, 0, 0.5], [1, 1], [1]], [[10, 30, 20], [3, 9], [5]])
    same(found, [[2 / 3, -1 / 3, 1 / 6], [0, 0], [0]])


def test_opo_is_the_group_mean_for_equal_lengths():
    rewards, lengths = [[1, 0, 0, 1, 1]], [[7] * 5]
    same(advantages("opo", rewards, lengths), advantages("dr_grpo", rewards, lengths))


def test_opo_leaves_out_the_unscorable_and_weighs_the_empty_by_nothing():
    case = {
        "rewards": [1, 0, None, 0.5],
        "group_ids": [0] * 4,
        "logprobs": [[-1.0] * 4, [-1.0] * 4, [-1.0] * 100, []],
    }
    same(evaluated("opo", **case)["advantages"], [0.5, -0.5, 0, 0])
    nobody_spoke = case | {"logprobs": [[], [], [], []]}
    assert np.isfinite(evaluated("opo", **nobody_spoke)["advantages"]).all()


def test_best_minus_second_with_a_deviation():
    """verl's pass@k advantage: (1 - 0.25) / (std + eps), std with n - 1."""
    rewards = [[1, 0.25, 0.25, 0], [0.5, 0.5]]
    settings = ("advantage=best_minus_second", "advantage_std=group", "advantage_eps=1e-6")
    mean = 1.5 / 4
    squares = (1 - mean) ** 2 + 2 * (0.25 - mean) ** 2 + mean**2
    expected = 0.75 / (math.sqrt(squares / 3) + 1e-6)
    found = advantages("grpo", rewards, [[1] * 4, [1] * 2], *settings)
    same(found, [[expected, 0, 0, 0], [0, 0]])
    same(advantages("grpo", [[1]], [[1]], *settings), [[0]])


@pytest.mark.parametrize("whiten", ["none", "samples"])
def test_the_advantage_clip_comes_last(whiten):
    settings = [PLAIN, f"whiten={whiten}", "std_kind=population"]
    rewards, lengths = [[3, 0, 0, 0, 0, 0]], [[1] * 6]
    plain = advantages("grpo", rewards, lengths, *settings)
    found = advantages("grpo", rewards, lengths, *settings, "advantage_clip=1.5")
    assert max(flat(plain)) > 1.5
    same(found, [np.clip(plain[0], -1.5, 1.5).tolist()])
    negative = advantages("grpo", [[-3, 0, 0]], [[1] * 3], PLAIN, "advantage_clip=0.5")
    same(negative, [[-0.5, 0.5, 0.5]])


def test_advantages_of_tokens_are_clipped_one_by_one():
    case = {"rewards": [1, 0], "group_ids": [0, 0], "logprobs": [[-1.0] * 3, [-1.0]]}
    settings = [PLAIN, "shaping=trace_recent", "trace_decay=0.5", "advantage_clip=0.2"]
    found = evaluated("grpo", settings, **case)["advantages"]
    same(found, [[0.125, 0.2, 0.2], [-0.2]])


def group_of(rewards: list[float | None]):
    size = len(rewards)
    case = {"rewards": rewards, "group_ids": [0] * size, "logprobs": [[-1.0]] * size}
    return parse_case(case).batch


@pytest.mark.parametrize(
    ("settings", "rewards", "expected"),
    [
        (["advantage=batch"], [1, 1], True),
        (["advantage=batch"], [None, None], False),
        (["advantage=opo"], [1, 1], False),
        (["advantage=opo"], [1, 0], True),
        (["positive_nll_weight=0.1"], [1, 1], True),
        (["positive_nll_weight=0.1"], [0, 0], False),
        (["positive_nll_weight=0.1"], [None, 1], True),
        ([], [1, 1], False),
        (["whiten=samples"], [1, 1], False),
        (["whiten=tokens"], [1, 1], True),
        (["advantage=rloo", "whiten=samples"], [1, 1], False),
        (["advantage=opo", "whiten=samples"], [1, 1], True),
        (["advantage=opo", "whiten=samples"], [None, None], False),
        (["advantage=best_minus_second", "whiten=samples"], [1, 1], True),
    ],
)
def test_which_groups_teach_something(settings, rewards, expected):
    config, _ = load_objective("grpo", [PLAIN, *settings])
    assert carries_signal(config, group_of(rewards)) is expected


def test_whitening_gives_a_signal_to_groups_that_have_none():
    """The baseline of OPO leaves a mean of the batch, which whitening takes off every sample."""
    lengths = [[1, 9], [3, 4]]
    rewards = [[1, 0], [1, 1]]
    plain = ["advantage=opo", "advantage_std=none"]
    assert advantages("grpo", rewards, lengths, *plain)[1] == [0, 0]
    assert all(advantages("grpo", rewards, lengths, *plain, "whiten=samples")[1])


def test_which_advantages_sum_to_zero_in_every_group():
    """Of all estimators: whitening by samples leaves their groups without a signal alone."""
    zero_sums = set(ESTIMATORS)
    for seed in range(4):
        batch = parse_case(random_case(seed, 8)).batch
        groups = Groups(batch.group_ids, batch.valid)
        for name in sorted(zero_sums):
            config = ObjectiveConfig(preset="grpo", advantage=name, advantage_std="group")
            found = ESTIMATORS[name](config, batch, groups).double()
            if name in TOKEN_LEVEL:
                found = batch.means(found)
            if groups.sum(found).abs().max() > 1e-9:
                zero_sums.discard(name)
    assert zero_sums == {*SUM_TO_ZERO, "grpo_s"}  # by entropies, which always are a signal


def test_without_its_baseline_pkpo_has_a_mean():
    config, _ = load_objective("grpo", [PLAIN, "advantage=pkpo", "whiten=samples"])
    assert not carries_signal(config, group_of([0, 0, 0]))
    config = config.model_copy(update={"pkpo_baseline": False})
    assert carries_signal(config, group_of([0, 0, 0]))


# --- clips


def test_dppo_holds_probabilities_and_not_ratios():
    """A rare token five times likelier is free, a frequent one a fifth likelier is held."""
    new = [[0.05, 0.9, 0.5], [0.05, 0.5, 0.9]]
    old = [[0.01, 0.7, 0.9], [0.30, 0.6, 0.5]]
    case = of_probabilities(new, old, [2.0, -1.0])
    found = evaluated("dppo", ["proximal=recompute"], **case)
    # up by 0.04, by 0.2 (held), down by 0.4; A < 0: down by 0.25 (held), by 0.1, up by 0.4
    terms = [[2 * 5.0, 0, 2 * 5 / 9], [0, -5 / 6, -9 / 5]]
    same(found["loss"], -sum(flat(terms)) / 6)
    same(found["grad_logprobs"], [[-value / 6 for value in row] for row in terms])
    assert found["metrics"]["clip/high_fraction"] == pytest.approx(1 / 6)
    assert found["metrics"]["clip/low_fraction"] == pytest.approx(1 / 6)


def kl_of_two(p: float, q: float) -> float:
    return p * math.log(p / q) + (1 - p) * math.log((1 - p) / (1 - q))


def test_dppo_by_the_divergence_of_the_token():
    new, old = [[0.6, 0.8, 0.3]], [[0.5, 0.5, 0.5]]
    assert kl_of_two(0.5, 0.6) < 0.05 < kl_of_two(0.5, 0.8)
    settings = ["clip=dppo_kl", "clip_low=0.05", "clip_high=0.05", "proximal=recompute"]
    up = evaluated("dppo", settings, **of_probabilities(new, old, [1.0]))
    same(up["grad_logprobs"], [[-1.2 / 3, 0, -0.6 / 3]])
    down = evaluated("dppo", settings, **of_probabilities(new, old, [-1.0]))
    same(down["grad_logprobs"], [[1.2 / 3, 1.6 / 3, 0]])


def test_dppo_measures_from_the_old_policy():
    """From 0.2 to 0.01 the divergence is 0.44, the other way it is 0.16."""
    assert kl_of_two(0.01, 0.2) < 0.3 < kl_of_two(0.2, 0.01)
    settings = ["clip=dppo_kl", "clip_low=0.3", "clip_high=0.3", "proximal=recompute"]
    fallen = of_probabilities([[0.01]], [[0.2]], [-1.0])
    same(evaluated("dppo", settings, **fallen)["grad_logprobs"], [[0]])
    risen = of_probabilities([[0.2]], [[0.01]], [1.0])
    same(evaluated("dppo", settings, **risen)["grad_logprobs"], [[-20.0]])


def test_dppo_holds_the_policy_to_the_engine():
    """By default: the old policy is the one that sampled."""
    case = of_probabilities([[0.9]], [[0.85]], [1.0], rollout_logprobs=[[math.log(0.5)]])
    same(evaluated("dppo", **case)["grad_logprobs"], [[0]])
    same(evaluated("dppo", ["proximal=recompute"], **case)["grad_logprobs"], [[-0.9 / 0.85]])


@pytest.mark.parametrize("clip", ["dppo_tv", "dppo_kl"])
def test_dppo_has_nothing_to_say_of_tokens_without_an_advantage_and_of_certain_ones(clip):
    config = ObjectiveConfig(preset="dppo", clip=clip)
    logprobs = double(0.0, 0.0, -1e-12, -30.0)
    log_ratio = double(3.0, 0.0, 0.0, -20.0)
    old = logprobs - log_ratio
    inputs = ClipInputs(log_ratio, double(0.0, 1.0, -1.0, -1.0), logprobs, old, 0.15, 0.15)
    status = clip_status(config, inputs)
    assert not status["high"].any()
    assert not status["low"].any()


def test_dppo_sees_how_likely_a_token_was_that_became_impossible():
    """Its ratio is bounded, from which the old probability cannot be had: 0.90, not 0.007."""
    case = {"logprobs": [[-25.0]], "old_logprobs": [[-0.1]], "advantages": [-1.0]}
    for clip in ("dppo_tv", "dppo_kl"):
        found = evaluated("dppo", ["proximal=recompute", f"clip={clip}"], **case)
        assert found["metrics"]["clip/low_fraction"] == 1
        same(found["loss"], 0)


def test_binary_kl_is_that_of_two_outcomes_and_finite_at_its_ends():
    p, q = [0.2, 0.5, 0.999], [0.3, 0.5, 0.1]
    found = binary_kl(double(*p).log(), double(*q).log())
    same(found.tolist(), [kl_of_two(a, b) for a, b in zip(p, q, strict=True)], 1e-12)
    ends = binary_kl(double(0.0, -50.0, 0.0), double(-50.0, 0.0, 0.0))
    assert torch.isfinite(ends).all()
    assert ends[2] == 0
    single = binary_kl(double(0.0, -50.0).float(), double(-50.0, 0.0).float())
    assert torch.isfinite(single).all()


def test_vespo_weighs_a_sequence_by_the_power_and_the_decay_of_its_ratio():
    """W = 1.5 * 0.8 = 1.2 with A > 0, W = 0.5 with A < 0."""
    case = of_probabilities([[0.3, 0.4], [0.25]], [[0.2, 0.5], [0.5]], [2.0, -1.0])
    found = evaluated("vespo", ["proximal=recompute"], **case)
    up = 1.2**2.0 * math.exp(3.0 * (1 - 1.2))
    down = 0.5**3.0 * math.exp(2.0 * (1 - 0.5))
    loss = -(2 * up * (math.log(0.3) + math.log(0.4)) - down * math.log(0.25)) / 3
    same(found["loss"], loss)
    same(found["grad_logprobs"], [[-2 * up / 3] * 2, [down / 3]])
    assert not any(name.startswith("clip/") for name in found["metrics"])


def test_vespo_is_reinforce_on_policy_and_vanishes_far_away():
    same_policy = of_probabilities([[0.3, 0.4]], [[0.3, 0.4]], [1.0])
    same(evaluated("vespo", ["proximal=recompute"], **same_policy)["grad_logprobs"], [[-0.5] * 2])
    impossible_before = of_probabilities([[0.3, 0.4]], [[1e-300, 1e-300]], [1.0])
    gradient = evaluated("vespo", ["proximal=recompute"], **impossible_before)["grad_logprobs"]
    same(gradient, [[0, 0]])
    impossible_now = of_probabilities([[1e-300, 0.4]], [[0.9, 0.4]], [1.0])
    gradient = evaluated("vespo", ["proximal=recompute"], **impossible_now)["grad_logprobs"]
    same(gradient, [[0, 0]])
    very_likely_now = of_probabilities([[0.9, 0.9]], [[1e-3, 1e-3]], [1.0])
    gradient = evaluated("vespo", ["proximal=recompute"], **very_likely_now)["grad_logprobs"]
    same(gradient, [[0, 0]])


def test_vespo_counts_the_ratio_of_a_sequence_as_a_hundred_millionth_at_least():
    """The weight of a ratio W is `W^0.1 e^(1 - W)` here; that of e^-20 is the one of 1e-8."""
    settings = ["proximal=recompute", "vespo_k_negative=0.1", "vespo_lambda_negative=1"]
    half = of_probabilities([[0.25]], [[0.5]], [-1.0])
    same(evaluated("vespo", settings, **half)["grad_logprobs"], [[0.5**0.1 * math.exp(0.5)]])
    tiny = of_probabilities([[0.5 * math.exp(-20)]], [[0.5]], [-1.0])
    same(evaluated("vespo", settings, **tiny)["grad_logprobs"], [[1e-8**0.1 * math.exp(1 - 1e-8)]])


def test_luspo_is_gspo_times_the_length():
    case = of_probabilities([[0.3, 0.4, 0.5], [0.2]], [[0.31, 0.4, 0.5], [0.2]], [1.0, -1.0])
    wide = ["clip_low=0.2", "clip_high=0.2"]
    ratio = (0.3 / 0.31) ** (1 / 3)
    found = evaluated("luspo", wide, **case)
    same(found["loss"], -(3 * ratio - 1) / 2)
    same(found["grad_logprobs"], [[-ratio / 2] * 3, [1 / 2]])
    gspo = evaluated("gspo", wide, **case)
    same([3 * gradient for gradient in gspo["grad_logprobs"][0]], found["grad_logprobs"][0])


# --- the mismatch of trainer and engine

RHO = [[0.2, 2.0, 1.0], [0.4, 0.5]]


def weights(*settings: str) -> list[list[float]]:
    """What the mismatch multiplies the gradient of each token with."""
    case = {
        "advantages": [1.0, 1.0],
        "group_ids": [0, 0],
        "logprobs": [[-1.0] * 3, [-1.0] * 2],
        "rollout_logprobs": [[-1.0 - math.log(rho) for rho in row] for row in RHO],
    }
    found = evaluated("grpo", [TOKEN_MEAN, *settings], **case)["grad_logprobs"]
    return [[-5 * gradient for gradient in row] for row in found]


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (("tis", 1.5, 0.0), [[0.2, 1.5, 1.0], [0.4, 0.5]]),
        (("tis", 1.5, 0.5), [[0.5, 1.5, 1.0], [0.5, 0.5]]),
        (("tis", 1.5, 1.5), [[1.5] * 3, [1.5] * 2]),
        (("tis_sequence", 1.5, 0.0), [[0.4] * 3, [0.2] * 2]),
        (("tis_sequence", 1.5, 0.3), [[0.4] * 3, [0.3] * 2]),
        (("tis_sequence", 0.3, 0.25), [[0.3] * 3, [0.25] * 2]),
        (("mis_sequence", 1.5, 0.0), [[0.4] * 3, [0.2] * 2]),
        (("mis_sequence", 1.5, 0.3), [[0.4] * 3, [0.0] * 2]),
        (("mis_sequence", 1.5, 0.5), [[0.0] * 3, [0.0] * 2]),
        (("mis_sequence", 0.3, 0.1), [[0.0] * 3, [0.2] * 2]),
    ],
)
def test_the_floor_of_mismatch_weights(settings, expected):
    """Token weights and sequence weights are raised to it; a masked sequence below it gets 0."""
    kind, largest, floor = settings
    found = weights(f"mismatch={kind}", f"mismatch_max={largest}", f"mismatch_floor={floor}")
    same(found, expected)


def test_kpop_keeps_what_is_near_in_both_directions():
    trainer = [[0.5, 0.9, 0.011, 0.5]]
    engine = [[0.6, 0.5, 0.001, 0.5]]
    case = of_probabilities(trainer, trainer, [1.0], rollout_logprobs=np.log(engine).tolist())
    settings = [TOKEN_MEAN, "mismatch=kpop", "kpop_threshold=0.1"]
    expected = []
    for p, q in zip(trainer[0], engine[0], strict=True):
        is_near = max(kl_of_two(p, q), kl_of_two(q, p)) <= 0.1
        expected.append(-p / q / 4 if is_near else 0.0)
    assert expected[1] == 0 and expected[2] != 0  # eleven times likelier, yet as rare
    found = evaluated("grpo", settings, **case)
    same(found["grad_logprobs"], [expected])
    assert found["metrics"]["rejected/mismatch_fraction"] == 0.25


def test_kpop_needs_both_directions():
    """From 0.01 to 0.2 the two divergences differ, 0.53 and 0.16."""
    assert kl_of_two(0.01, 0.2) < 0.3 < kl_of_two(0.2, 0.01)
    for p, q in ((0.01, 0.2), (0.2, 0.01)):
        case = of_probabilities([[p]], [[p]], [1.0], rollout_logprobs=[[math.log(q)]])
        for threshold, kept in ((0.3, False), (0.6, True)):
            settings = ["mismatch=kpop", f"kpop_threshold={threshold}"]
            assert bool(evaluated("grpo", settings, **case)["grad_logprobs"][0][0]) is kept


# --- what is added to the loss


def test_the_drift_from_the_engine_is_held_at_every_token():
    """Rejected tokens too; `tau d^2` with the gradient `2 tau d`."""
    new, engine = [[0.5, 0.3], [0.9]], [[0.25, 0.3], [0.1]]
    case = of_probabilities(new, new, [1.0, -1.0], rollout_logprobs=np.log(engine[0]).tolist())
    case["rollout_logprobs"] = [[math.log(q) for q in row] for row in engine]
    settings = [TOKEN_MEAN, "mismatch=icepop", "mismatch_min=0.5", "mismatch_max=3"]
    plain = evaluated("grpo", settings, **case)
    found = evaluated("grpo", [*settings, "rollout_drift_weight=0.3"], **case)
    drift = [[math.log(2), 0.0], [math.log(9)]]
    assert plain["grad_logprobs"][1] == [0]
    same(found["loss"] - plain["loss"], 0.3 * sum(d**2 for d in flat(drift)) / 3)
    for i in range(2):
        for t, d in enumerate(drift[i]):
            gain = found["grad_logprobs"][i][t] - plain["grad_logprobs"][i][t]
            same(gain, 2 * 0.3 * d / 3)


def positive_case(**more: Any) -> dict[str, Any]:
    return {
        "rewards": [1, 0, 1, 0],
        "group_ids": [0, 0, 1, 1],
        "logprobs": [[-1.0, -0.5], [-2.0], [-0.3, -0.2, -0.1], [-1.5]],
        **more,
    }


def added_by_nll(*settings: str, **more: Any) -> tuple[float, list[list[float]]]:
    """Loss and gradient with a weight of 0.1, less those without."""
    case = positive_case(**more)
    plain = evaluated("grpo", settings, **case)
    found = evaluated("grpo", [*settings, "positive_nll_weight=0.1"], **case)
    gradient = []
    for with_it, without in zip(found["grad_logprobs"], plain["grad_logprobs"], strict=True):
        gradient.append([a - b for a, b in zip(with_it, without, strict=True)])
    return found["loss"] - plain["loss"], gradient


def test_correct_samples_are_made_likelier():
    """VAPO's term: a mean over the five tokens of both correct samples, in any aggregation."""
    loss, gradient = added_by_nll()
    same(loss, 0.1 * (1.0 + 0.5 + 0.3 + 0.2 + 0.1) / 5)
    same(gradient, [[-0.02] * 2, [0.0], [-0.02] * 3, [0.0]])
    _, by_token = added_by_nll(TOKEN_MEAN)
    same(by_token, gradient)


def test_correctness_and_not_the_reward_decides():
    loss, _ = added_by_nll(correct=[0, 1, 0, 0])
    same(loss, 0.1 * 2.0)


def test_domains_have_a_mean_of_their_own_where_they_have_a_denominator():
    domains = {"domains": ["a", "a", "b", "b"]}
    loss, gradient = added_by_nll("denominator=domain", **domains)
    same(loss, 0.1 * (1.5 / 2 + 0.6 / 3))
    same(gradient, [[-0.05] * 2, [0], [-0.1 / 3] * 3, [0]])


@pytest.mark.parametrize(
    ("more", "settings"),
    [
        ({"rewards": [0, 0, 0, 0]}, ()),
        ({"rewards": [None, 0, None, 0], "correct": [1, 0, 1, 0]}, ()),
        ({"loss_mask": [[0, 0], [0], [0, 0, 0], [0]]}, ()),
        ({"truncated": [1, 0, 1, 0]}, ("overlong=loss",)),
    ],
)
def test_without_a_correct_sample_nothing_is_added(more, settings):
    loss, gradient = added_by_nll(*settings, **more)
    assert loss == 0
    assert not any(flat(gradient))


def test_an_infinite_log_prob_has_no_likelihood():
    old = [[-math.inf, -0.5], [-2.0], [-0.3, -0.2, -0.1], [-1.5]]
    _, gradient = added_by_nll(old_logprobs=old)
    same(gradient[0], [0.0, -0.02])


# --- KL


def test_weighted_k2_has_the_gradient_of_its_expectation():
    """Over all outcomes: the gradient of `sum_a pi_a d_a^2 / 2` by the logits."""
    pi, ref = np.array([0.5, 0.3, 0.2]), np.array([0.3, 0.3, 0.4])
    found = evaluated(
        "grpo",
        [TOKEN_MEAN, "kl=is_k2", "kl_beta=1.0"],
        advantages=[0],
        group_ids=[0],
        logprobs=[np.log(pi).tolist()],
        ref_logprobs=[np.log(ref).tolist()],
    )
    score = np.eye(3) - pi
    by_token = 3 * np.array(found["grad_logprobs"][0])
    gradient = (pi[:, None] * by_token[:, None] * score).sum(0)

    def expectation(logits: np.ndarray) -> float:
        p = np.exp(logits) / np.exp(logits).sum()
        return float((p * (np.log(ref) - np.log(p)) ** 2 / 2).sum())

    numeric = []
    for place in range(3):
        step = np.eye(3)[place] * 1e-6
        high, low = expectation(np.log(pi) + step), expectation(np.log(pi) - step)
        numeric.append((high - low) / 2e-6)
    same(gradient.tolist(), numeric, 1e-8)


def test_weighted_k2_off_policy():
    """`r d^2 / 2`, gradient `r d^2 / 2 - r d`: r = 1.5, d = log(0.2 / 0.3)."""
    case = of_probabilities([[0.3]], [[0.2]], [0.0], ref_logprobs=[[math.log(0.2)]])
    found = evaluated("grpo", ["kl=is_k2", "kl_beta=0.4"], **case)
    d = math.log(0.2 / 0.3)
    same(found["loss"], 0.4 * 1.5 * d**2 / 2)
    same(found["grad_logprobs"], [[0.4 * (1.5 * d**2 / 2 - 1.5 * d)]])


# --- presets


@pytest.mark.parametrize("name", PRESETS)
def test_training_refuses_what_the_list_says(name):
    group_size = PRESETS[name].group_size or 8
    overrides = [f"objective.preset={name}", f"batch.num_samples_per_prompt={group_size}"]
    if PRESETS[name].values.get("advantage") == "gae":
        overrides.append("critic={}")
    is_refused = bool(check_rules(unchecked_config(*overrides)))
    assert is_refused == bool(PRESETS[name].not_trained)
