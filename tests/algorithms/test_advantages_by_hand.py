"""Advantages, subsets, and the constants of a step, of small batches by hand."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import combinations

import numpy as np
import pytest
import torch

from grpo_megatron.algorithms import batch as batch_module
from grpo_megatron.algorithms.advantages.after import whiten
from grpo_megatron.algorithms.advantages.before import REWARD_SHAPINGS
from grpo_megatron.algorithms.advantages.estimators import turn_index
from grpo_megatron.algorithms.advantages.pipeline import (
    advantages_of,
    needed_columns,
    select,
)
from grpo_megatron.algorithms.advantages.signal import carries_signal
from grpo_megatron.algorithms.aggregation import (
    AGGREGATIONS,
    Lengths,
    lambda_grpo,
    loss_constants,
    token_weights,
)
from grpo_megatron.algorithms.batch import Events, SampleBatch
from grpo_megatron.algorithms.case import parse_case
from grpo_megatron.algorithms.evaluate import evaluate
from grpo_megatron.algorithms.groups import Groups
from grpo_megatron.algorithms.objective import Objective
from grpo_megatron.config.loader import load_objective
from grpo_megatron.config.objective import ObjectiveConfig
from grpo_megatron.errors import DataError
from tests.algorithms.evaluation import evaluated
from tests.algorithms.test_invariance import random_case

EXACT = ("advantage_eps=0", "std_kind=population")
NAN = float("nan")


def group(rewards: list[float], lengths: list[int] | None = None, **more) -> dict:
    """A case of one group."""
    lengths = lengths or [1] * len(rewards)
    logprobs = [[-1.0] * length for length in lengths]
    return {"rewards": rewards, "group_ids": [0] * len(rewards), "logprobs": logprobs, **more}


def advantages(preset: str, *overrides: str, **case) -> list:
    return evaluated(preset, overrides, **case)["advantages"]


# --- estimators


def test_maxrl_of_an_all_wrong_group_is_zero():
    found = advantages("grpo", "advantage=maxrl", "advantage_std=none", *EXACT, **group([0, 0]))
    assert found == [0, 0]


@pytest.mark.parametrize("preset", ["grpo", "dr_grpo", "rloo", "opo"])
def test_rewards_that_differ_by_rounding_only_leave_no_advantage(preset):
    """A deviation would make one of the smallest differences, a baseline leave a rest."""
    assert advantages(preset, *EXACT, **group([0.1 + 0.2, 0.3])) == [0, 0]
    assert advantages(preset, *EXACT, **group([0.1] * 3, [1, 2, 3])) == [0] * 3


def test_the_raw_deviation_of_a_global_scope_counts_dropped_rewards_of_all_domains():
    case = {
        "rewards": [1, 0, 1, 0],
        "group_ids": [0, 0, 1, 1],
        "domains": ["a", "a", "b", "b"],
        "logprobs": [[-1.0]] * 4,
        "dropped_rewards": {"b": [3.0, 3.0]},
    }
    found = advantages("lite_ppo", "statistics_scope=global", *EXACT, **case)
    std = float(np.std([1, 0, 1, 0, 3, 3]))
    assert found == pytest.approx([0.5 / std, -0.5 / std] * 2)


def test_the_raw_deviation_is_of_samples_with_a_reward():
    found = advantages("lite_ppo", *EXACT, **group([1, 0, NAN]))
    assert found == pytest.approx([1, -1, 0])


def test_a_skipped_component_leaves_the_others_theirs():
    """One component of the third sample was skipped: the first two are compared without it."""
    components = {"a": [1, 0, NAN], "b": [0, 0, 3]}
    found = advantages("mo_grpo", *EXACT, **group([1, 0, 3]), components=components)
    low, high = -1 / math.sqrt(2), math.sqrt(2)
    assert found == pytest.approx([1 + low, -1 + low, high])


def test_pkpo_without_a_larger_set_to_compare_with_is_zero():
    overrides = ("advantage=pkpo", "advantage_std=none", "passk_k=2")
    assert advantages("grpo", *overrides, **group([1, 0])) == [0, 0]
    assert advantages("grpo", *overrides, **group([0, 0])) == [0, 0]
    assert any(advantages("grpo", *overrides, **group([1, 0, 0])))


def test_pkpo_without_a_baseline_is_the_reward_of_the_only_set():
    overrides = ("advantage=pkpo", "advantage_std=none", "passk_k=2", "pkpo_baseline=false")
    assert advantages("grpo", *overrides, **group([1, 0])) == [1, 1]
    assert advantages("grpo", *overrides, **group([0, 0])) == [0, 0]
    assert advantages("grpo", *overrides, **group([1])) == [0]


def test_pkpo_is_the_reward_of_sets_with_a_sample_less_that_of_sets_without_it():
    """Of all sets of k: whether one has a right answer, its share among k samples."""
    rewards, k = [1, 0, 0, 1, 0], 3
    found = advantages(
        "grpo", "advantage=pkpo", "advantage_std=none", f"passk_k={k}", **group(rewards)
    )
    n = len(rewards)
    for sample in range(n):
        others = [i for i in range(n) if i != sample]
        with_it = [
            max(rewards[sample], *(rewards[i] for i in s)) for s in combinations(others, k - 1)
        ]
        without = [max(rewards[i] for i in s) for s in combinations(others, k)]
        expected = k / n * (np.mean(with_it) - np.mean(without))
        assert found[sample] == pytest.approx(expected)


@pytest.mark.parametrize("preset", ["grpo_s", "gtpo_entropy"])
def test_an_entropy_of_zero_counts_as_a_very_small_one(preset):
    """It earns a right answer the least of its pool, and costs a wrong one the most."""
    entropies = [[0.0], [0.5], [0.0], [0.5]]
    found = evaluated(preset, EXACT, **group([1, 1, 0, 0], entropies=entropies))["advantages"]
    assert np.array(found, float).ravel().tolist() == pytest.approx([-1, 1, -1, 1])


def test_pools_of_right_and_wrong_samples_are_joined_on_request():
    """Apart, each pool has a mean of zero; together, every right answer is above every wrong."""
    case = group([1, 1, 0, 0], entropies=[[0.2], [0.6], [0.3], [0.9]])
    apart = advantages("grpo_s", "gtpo_pool=separate", *EXACT, **case)
    assert apart == pytest.approx([-1, 1, -1, 1])
    joint = advantages("grpo_s", "gtpo_pool=joint", *EXACT, **case)
    assert sum(joint) == pytest.approx(0)
    assert min(joint[:2]) > 0 > max(joint[2:])


@pytest.mark.parametrize(
    ("preset", "missing"), [("deepseekmath_process", "steps"), ("gagpo", "turns")]
)
def test_samples_without_steps_or_turns_are_refused(preset, missing):
    with pytest.raises(DataError, match=f"the samples have no {missing}"):
        evaluated(preset, ["kl=none", "kl_beta=0"], **group([1, 0]))


def test_steps_come_before_turns_in_process_supervision():
    turns = parse_case(TURNS).batch
    steps = Events(torch.tensor([0, 1]), torch.tensor([3, 1]), torch.tensor([0.0, 2.0]).double())
    objective = Objective(load_objective("deepseekmath_process", EXACT)[0])
    found = advantages_of(objective, replace(turns, events=steps))
    assert found.values.tolist() == [-1, -1, -1, -1, 1, 1]


def test_a_step_without_a_reward_leaves_its_group_the_others():
    """Of steps that were recorded so."""
    batch = parse_case(group([1, 1, 1])).batch
    nan = float("nan")
    rewards = torch.tensor([nan, 1.0, 0.0]).double()
    steps = Events(torch.tensor([0, 1, 2]), torch.tensor([0, 0, 0]), rewards)
    objective = Objective(load_objective("deepseekmath_process", EXACT)[0])
    with_it = replace(batch, events=steps)
    assert advantages_of(objective, with_it).values.tolist() == [0, 1, -1]
    assert carries_signal(objective.config, with_it)
    without = advantages_of(objective, replace(batch, events=steps[torch.tensor([1, 2])]))
    assert without.values.tolist() == [0, 1, -1]


def test_a_counted_sample_without_a_value_is_no_group_without_spread():
    groups = Groups(torch.tensor([0, 0, 1]), torch.tensor([True, True, False]))
    nan = float("nan")
    with pytest.raises(ValueError, match="a sample that counts has the value NaN"):
        groups.spread(torch.tensor([nan, 1.0, 2.0]))
    assert groups.spread(torch.tensor([0.5, 1.0, nan])).tolist() == [0.5, 0.5, 0]


@pytest.mark.parametrize("preset", ["gagpo", "gigpo"])
def test_the_order_in_which_turns_are_told_does_not_matter(preset):
    batch = parse_case(TURNS).batch
    objective = Objective(load_objective(preset, [])[0])
    expected = advantages_of(objective, batch)
    found = advantages_of(objective, replace(batch, turns=batch.turns[torch.tensor([2, 1, 0])]))
    assert bool(expected.values.any())
    assert torch.equal(found.values, expected.values)


def test_gagpo_discounts_by_both_factors():
    """Two rollouts through the same two states, of which one is paid in the second."""
    case = {
        "rewards": [0, 0],
        "group_ids": [0, 0],
        "logprobs": [[-1.0] * 2] * 2,
        "turns": [[[0, 0.0, "s"], [1, 1.0, "t"]], [[0, 0.0, "s"], [1, 0.0, "t"]]],
    }
    gamma, trace = 0.5, 0.25
    settings = (f"gagpo_gamma={gamma}", f"gagpo_lambda={trace}", *EXACT)
    found = advantages("gagpo", *settings, **case)
    first, second = gamma / 2, 1 / 2  # values: means of the returns
    paid, unpaid = 1 - second, 0 - second
    begun = 0 + gamma * second - first
    raw = np.array([begun + gamma * trace * paid, paid, begun + gamma * trace * unpaid, unpaid])
    assert [*found[0], *found[1]] == pytest.approx(((raw - raw.mean()) / raw.std()).tolist())


TURNS = {
    "rewards": [0, 0],
    "group_ids": [0, 0],
    "logprobs": [[-1.0] * 4, [-1.0] * 2],
    "turns": [[[1, 1.0, "s"], [2, 0.0, "t"]], [[1, 0.0, "s"]]],
}


def test_tokens_after_the_last_turn_form_one_of_their_own():
    index = turn_index(parse_case(TURNS).batch)
    assert torch.unique_consecutive(index, return_inverse=True)[1].tolist() == [0, 0, 1, 2, 3, 3]


def test_the_ratio_of_a_turn_is_the_geometric_mean_of_its_tokens():
    old = [[-1.0, -3.0, -1.5, -0.5], [-1.0, -1.2]]
    metrics = evaluated("gagpo", ["ratio=turn_geo"], **TURNS, old_logprobs=old)["metrics"]
    logs = [1.0, 1.0, 0.5, -0.5, 0.1, 0.1]
    assert metrics["ratio/mean"] == pytest.approx(np.exp(logs).mean())
    assert metrics["ratio/max"] == pytest.approx(math.e)


# --- what follows the estimator


def test_traces_fade_from_the_last_token_or_from_the_nearer_end():
    case = group([1, 0], [5, 1])
    base = ("advantage_std=none", "trace_decay=0.5", "trace_min_advantage=null")
    recent = advantages("grpo", "shaping=trace_recent", *base, **case)
    both = advantages("grpo", "shaping=trace_both", *base, **case)
    assert recent == [[0.5 / 16, 0.5 / 8, 0.5 / 4, 0.5 / 2, 0.5], [-0.5]]
    assert both == [[0.5, 0.25, 0.125, 0.25, 0.5], [-0.5]]


def test_entropies_of_zero_leave_advantages_as_they_are():
    case = group([1, 0], entropies=[[0.0], [0.0]])
    found = advantages("edge_grpo", "advantage_std=none", **case)
    assert found == [0.5, -0.5]


CONFLICT = group(
    [-1.0, -1.0, -4.0],
    [3, 3, 2],
    token_ids=[[1, 5, 9], [1, 6, 9], [1, 7]],
    entropies=[[0.1] * 3, [0.2] * 3, [0.3] * 2],
)


def test_conflicts_are_decided_by_the_sign_and_weighed_by_the_advantage():
    """The first tokens are in conflict: 2 for the better answers, 0 for the worst."""
    base = ("advantage_std=none", "conflict_weight=2.0", "conflict_entropy_weight=0.5")
    found = advantages("gtpo_conflict", *base, "conflict_entropy_limit=9", **CONFLICT)
    better, second, worst = 1 - 0.05, 1 - 0.1, -2 - 0.15
    assert found[0] == pytest.approx([2 * better, better, better])
    assert found[1] == pytest.approx([2 * second, second, second])
    assert found[2] == pytest.approx([0, worst])
    limited = advantages("gtpo_conflict", *base, "conflict_entropy_limit=0.25", **CONFLICT)
    assert limited[:2] == found[:2] and limited[2] == [0, 0]


def test_a_sample_at_the_entropy_limit_is_within_it():
    case = group([1, 0], token_ids=[[1], [2]], entropies=[[0.25], [0.25]])
    overrides = ("advantage_std=none", "conflict_entropy_weight=0", "conflict_entropy_limit=0.25")
    assert advantages("gtpo_conflict", *overrides, **case) == [[0.5], [-0.5]]


def test_a_sample_without_an_advantage_is_in_no_conflict():
    """The middle one begins as the best one does, which the worst one does not."""
    case = group(
        [2, 1, 0],
        [2, 2, 2],
        token_ids=[[1, 5], [1, 6], [2, 7]],
        entropies=[[0.0, 0.0]] * 3,
    )
    overrides = ("advantage_std=none", "conflict_weight=2.0", "conflict_entropy_limit=9")
    found = advantages("gtpo_conflict", *overrides, **case)
    assert found == [[1, 1], [0, 0], [-1, -1]]


@pytest.mark.parametrize("per_token", [False, True])
def test_whitening_leaves_samples_without_a_reward_at_zero(per_token):
    config, _ = load_objective("reinforce_pp", EXACT)
    batch = parse_case(group([3, 1, NAN])).batch
    values = torch.tensor([3.0, 1.0, 0.0], dtype=torch.float64)
    found = whiten(config, batch, values, batch.valid, per_token=per_token)
    assert found.tolist() == [1, -1, 0]


def test_a_group_of_negative_advantages_is_compared_too():
    overrides = ("advantage=reward", "advantage_std=none", "conflict_entropy_weight=0")
    found = advantages("gtpo_conflict", *overrides, "conflict_entropy_limit=9", **CONFLICT)
    assert found == [[-1.0] * 3, [-1.0] * 3, [-4.0] * 2]


def test_a_kl_in_the_reward_is_whitened_by_token():
    """Long samples count more: the mean over all tokens is zero, their deviation one."""
    case = group(
        [1, 0, 0],
        [1, 4, 2],
        old_logprobs=[[-1.0], [-1.0, -0.5, -2.0, -0.1], [-0.3, -0.4]],
        ref_logprobs=[[-1.5], [-0.5, -0.5, -1.0, -0.2], [-0.3, -0.9]],
    )
    settings = ("kl=reward_k1", "kl_beta=0.1", *EXACT)
    found = advantages("reinforce_pp", *settings, **case)
    future = [
        [0.5],
        [-0.5 + 0.0 - 1.0 + 0.1, 0.0 - 1.0 + 0.1, -1.0 + 0.1, 0.1],
        [0.0 + 0.5, 0.5],
    ]
    raw = np.array([r - 0.1 * k for r, row in zip([1, 0, 0], future, strict=True) for k in row])
    expected = (raw - raw.mean()) / raw.std()
    assert [a for row in found for a in row] == pytest.approx(expected.tolist())


def test_a_kl_in_the_reward_is_added_to_advantages_of_tokens():
    case = group(
        [1, 1, 0],
        [2, 1, 2],
        entropies=[[0.2, 0.4], [0.3], [0.5, 0.1]],
        ref_logprobs=[[-1.5, -0.8], [-1.0], [-1.0, -1.1]],
    )
    plain = advantages("gtpo_entropy", **case)
    found = advantages("gtpo_entropy", "kl=reward_k1", "kl_beta=0.2", **case)
    difference = [np.subtract(a, b).tolist() for a, b in zip(found, plain, strict=True)]
    expected = [[-0.2 * (0.5 - 0.2), -0.2 * -0.2], [0.0], [-0.2 * 0.1, -0.2 * 0.1]]
    for mine, theirs in zip(difference, expected, strict=True):
        assert mine == pytest.approx(theirs)


def test_columns_are_asked_for_only_where_advantages_read_them():
    def columns(*overrides: str, preset: str = "grpo", weighs_kl: bool = True) -> set[str]:
        config, _ = load_objective(preset, overrides)
        return set(needed_columns(config, weighs_kl=weighs_kl))

    assert columns() == columns("kl=k3", "kl_beta=0.1") == set()
    assert columns("kl=reward_k1", "kl_beta=0", weighs_kl=False) == set()
    assert columns("kl=reward_k1", "kl_beta=0.1") == {"old_logprobs", "ref_logprobs"}
    assert columns(preset="grpo_s") == columns(preset="edge_grpo") == {"entropies"}
    assert columns(preset="gtpo_conflict") == {"token_ids", "entropies"}


# --- shaping and subsets


def test_rewards_by_token_of_an_empty_response_are_its_reward():
    shaped = ("reward_shaping=per_token", "kl=none", "kl_beta=0", "whiten=none")
    found = advantages("reinforce_pp", *shaped, **group([1.0, 0.5, 3.0], [0, 1, 2]))
    assert found == [1.0, 0.5, 1.5]


def test_a_single_token_is_half_as_long_as_two():
    parsed = parse_case(group([1.0, 1.5, 1.0], [1, 2, 3]))
    config, _ = load_objective("gfpo", ["subset=token_efficiency", "subset_size=1"])
    assert select(Objective(config), parsed.batch).tolist() == [True, False, False]


@pytest.mark.parametrize("subset", ["shortest", "token_efficiency", "adaptive"])
def test_unscorable_and_untrained_samples_are_in_no_subset(subset):
    """Also where a group has fewer others than the subset may hold."""
    case = group([1, NAN, 0, 1], [4, 1, 2, 3], truncated=[True, False, False, False])
    parsed = parse_case(case)
    config, _ = load_objective(
        "gfpo", [f"subset={subset}", "subset_size=4", "overlong=loss"], parsed.domains
    )
    batch = parsed.batch.without_truncated(parsed.truncated, "loss")
    assert select(Objective(config, parsed.domains), batch).tolist() == [False, False, True, True]
    plain, _ = load_objective("grpo", ["overlong=loss"], parsed.domains)
    assert select(Objective(plain, parsed.domains), batch).tolist() == [False, True, True, True]


@pytest.mark.parametrize("first", [True, False])
def test_only_the_most_successful_groups_pay_for_length(first):
    """One of two groups leads, wherever it stands; of equal ones, that of the lowest sample id."""
    good, bad = [1, 1, 0], [1, 0, 0]
    rewards = [*good, *bad] if first else [*bad, *good]
    case = {
        "rewards": rewards,
        "group_ids": [0, 0, 0, 1, 1, 1],
        "logprobs": [[-1.0] * n for n in (1, 2, 3, 3, 1, 2)],
    }
    overrides = ("length_switch_fraction=0.5", "advantage=reward", "whiten=none")
    found = advantages("grpo_lambda_length", *overrides, "advantage_std=none", **case)
    of_leader, of_other = [True, True, False], [False] * 3
    assert [0 < a < 1 for a in found] == (
        [*of_leader, *of_other] if first else [*of_other, *of_leader]
    )
    equal = {**case, "rewards": [*good, *good], "sample_ids": [5, 4, 3, 2, 1, 0]}
    found = advantages("grpo_lambda_length", *overrides, "advantage_std=none", **equal)
    assert [0 < a < 1 for a in found] == [*of_other, *of_leader]


def test_right_answers_of_one_length_pay_alike():
    """Without a spread of lengths there is no z-score: it counts as 0, of which sigmoid is 1/2."""
    overrides = (
        "length_switch_fraction=1",
        "length_switch_weight=0.5",
        "advantage=reward",
        "advantage_std=none",
    )
    case = group([1, 1, 0], [2, 2, 9])
    found = advantages("grpo_lambda_length", *overrides, "whiten=none", *EXACT, **case)
    assert found == [0.75, 0.75, 0]


def test_a_length_switch_gives_no_reward_to_samples_without_one():
    batch = parse_case(group([1, 0, NAN])).batch
    config, _ = load_objective("grpo_lambda_length", ["length_switch_fraction=0"])
    shaped = REWARD_SHAPINGS["length_switch"](config, batch, Groups(batch.group_ids, batch.valid))
    assert shaped[:2].tolist() == [1, 0]
    assert math.isnan(shaped[2])


def test_a_group_without_a_right_answer_does_not_lead():
    case = {
        "rewards": [0, 0, NAN, NAN, 1, 1],
        "group_ids": [0, 0, 1, 1, 2, 2],
        "logprobs": [[-1.0] * n for n in (1, 2, 3, 4, 1, 3)],
    }
    overrides = ("length_switch_fraction=0.5", "advantage=reward", "whiten=none")
    found = advantages("grpo_lambda_length", *overrides, "advantage_std=none", **case)
    assert found[:4] == [0] * 4
    assert [0 < a < 1 for a in found[4:]] == [True, True]


def test_groups_lead_by_their_number_not_by_their_samples():
    case = {
        "rewards": [1, 1, 1, 1, 0, 0],
        "group_ids": [0, 0, 1, 1, 1, 1],
        "logprobs": [[-1.0] * n for n in (1, 2, 1, 2, 1, 2)],
    }
    overrides = ("length_switch_fraction=0.5", "advantage=reward", "whiten=none")
    found = advantages("grpo_lambda_length", *overrides, "advantage_std=none", **case)
    assert [0 < a < 1 for a in found] == [True, True] + [False] * 4


def test_a_sample_that_is_not_trained_stays_so_beside_truncated_ones():
    batch = parse_case(group([1, 0, 1])).batch
    batch = replace(batch, trained=torch.tensor([False, True, True]))
    found = batch.without_truncated(torch.tensor([False, True, False]), "loss")
    assert found.trained.tolist() == [False, False, True]
    assert torch.equal(found.rewards, batch.rewards)
    dropped = batch.without_truncated(torch.tensor([False, True, False]), "drop")
    assert dropped.valid.tolist() == [True, False, True]
    assert batch.without_truncated(torch.tensor([True, True, True]), "none") is batch


def test_a_reward_of_just_the_threshold_is_right():
    rewards = torch.tensor([0.5, 0.5 - 1e-9, 1.0], dtype=torch.float64)
    batch = parse_case(group([0.5, 0.5 - 1e-9, 1.0])).batch
    assert batch.is_correct(0.5).tolist() == [True, False, True]
    assert torch.equal(batch.rewards, rewards)


# --- work on whole groups


@pytest.mark.parametrize(
    "name", ["gtpo_entropy", "gtpo_conflict", "gagpo", "grpo_lambda_trace", "deepseekmath_process"]
)
@pytest.mark.parametrize("chunk_tokens", [1, 7, 40])
def test_how_many_groups_are_worked_on_at_once_does_not_matter(monkeypatch, name, chunk_tokens):
    case = random_case(11, 8)
    order = np.random.default_rng(0).permutation(len(case["rewards"]))
    columns = {name: values for name, values in case.items() if name != "components"}
    case = {name: [values[i] for i in order] for name, values in columns.items()}
    numbers = {label: number for number, label in enumerate(dict.fromkeys(case["group_ids"]))}
    case["group_ids"] = [numbers[label] for label in case["group_ids"]]
    if name == "deepseekmath_process":
        case["steps"] = [
            [[turn["end"], turn["reward"]] for turn in turns] for turns in case.pop("turns")
        ]
    parsed = parse_case(case)
    config, _ = load_objective(name, [], parsed.domains)
    objective = Objective(config, parsed.domains)
    expected = advantages_of(objective, parsed.batch)
    assert expected.per_token and bool(expected.values.any())
    sizes: list[int] = []
    whole = SampleBatch.subset

    def counted(self: SampleBatch, rows: torch.Tensor) -> SampleBatch:
        sizes.append(len(rows))
        return whole(self, rows)

    monkeypatch.setattr(batch_module, "CHUNK_TOKENS", chunk_tokens)
    monkeypatch.setattr(SampleBatch, "subset", counted)
    found = advantages_of(objective, parsed.batch)
    torch.testing.assert_close(found.values, expected.values, rtol=1e-12, atol=1e-12)
    assert len(sizes) > 1 and max(sizes) < len(parsed.batch)


def test_statistics_of_a_group_without_valid_samples_are_zero():
    ids = torch.tensor([0, 0, 1])
    groups = Groups(ids, torch.tensor([True, True, False]))
    values = torch.tensor([1.0, 4.0, 9.0], dtype=torch.float64)
    assert groups.spread(values).tolist() == [3, 3, 0]
    assert groups.sum(values).tolist() == [5, 5, 0]
    assert groups.mean(values).tolist() == [2.5, 2.5, 0]
    assert groups.std(values, "population").tolist() == [1.5, 1.5, 0]
    assert groups.std(values, "sample").tolist() == pytest.approx([math.sqrt(4.5)] * 2 + [0])
    assert groups.rank(-values, torch.arange(3)).tolist() == [1, 0, 0]


# --- weights and constants of a step


def test_one_token_weighs_one():
    lengths = Lengths(np.array([1]), np.array([0]), 1)
    for aggregation in ("token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "prompt_mean"):
        config = ObjectiveConfig(preset="grpo", aggregation=aggregation)
        assert token_weights(config, lengths, np.array([0])).tolist() == [[1.0], [0.0]]
    config = ObjectiveConfig(preset="lambda_grpo")
    assert token_weights(config, lengths, np.array([0]))[0].tolist() == [1.0]


def test_the_mean_over_prompts_gives_each_prompt_the_same():
    """Prompts of 4 and of 2 tokens weigh one half each."""
    lengths = Lengths(np.array([1, 3, 2]), np.array([7, 7, 9]), 1)
    config = ObjectiveConfig(preset="grpo", aggregation="prompt_mean")
    weights, _ = token_weights(config, lengths, np.zeros(3, np.int64))
    assert weights.tolist() == [1 / 8, 1 / 8, 1 / 4]


@pytest.mark.parametrize("aggregation", sorted(AGGREGATIONS))
def test_empty_responses_have_finite_weights(aggregation):
    config = ObjectiveConfig(preset="grpo", aggregation=aggregation)
    lengths = Lengths(np.array([0, 2, 0]), np.array([0, 0, 1]), 8)
    assert np.isfinite(token_weights(config, lengths, np.zeros(3, np.int64))).all()


def test_lambda_grpo_bounds_its_base_and_leaves_equal_lengths_alone():
    config = ObjectiveConfig(preset="lambda_grpo", lambda_rho=1.0)
    lengths = Lengths(np.array([1, 1, 10, 5, 5]), np.array([0, 0, 0, 1, 1]), 1, 1.0)
    weights, slopes = lambda_grpo(config, lengths)
    z = (np.array([1, 1, 10]) - 4) / math.sqrt(18)
    base = np.maximum(1 + z, 1e-3)
    share = 3 * np.exp(base) / np.exp(base).sum()
    assert weights.tolist() == pytest.approx([*(share / 22), 1 / 22, 1 / 22])
    assert slopes[3:].tolist() == [0, 0]
    steep = ObjectiveConfig(preset="lambda_grpo", lambda_rho=4.0)
    base = np.maximum(1 + 4 * z, 1e-3)
    assert base[0] == 1e-3
    share = 3 * np.exp(base) / np.exp(base).sum()
    found, _ = lambda_grpo(steep, lengths)
    assert found[:3].tolist() == pytest.approx((share / 22).tolist(), rel=1e-12)


def test_the_gradient_of_lambda_is_the_slope_of_the_loss():
    case = random_case(4, 5)
    parsed = parse_case(case)
    config, _ = load_objective("lambda_grpo", [], parsed.domains)

    def at(exponent: float):
        objective = Objective(config, parsed.domains, state={"lambda": exponent})
        return evaluate(objective, parsed.batch, parsed.columns)

    slope = (at(0.7 + 1e-6).loss - at(0.7 - 1e-6).loss) / 2e-6
    assert at(0.7).stats.result()["lambda/gradient"] == pytest.approx(slope, rel=1e-6)
    assert slope != 0


def test_slopes_and_turns_are_for_objectives_that_use_them():
    parsed = parse_case(TURNS)
    rows = torch.arange(2)
    values = advantages_of(Objective(load_objective("grpo", [])[0]), parsed.batch)
    for preset, has_slopes, has_turns in (
        ("grpo", False, False),
        ("lambda_grpo", True, False),
        ("gagpo", False, True),
    ):
        overrides = ["ratio=turn_geo"] if has_turns else []
        objective = Objective(load_objective(preset, overrides)[0])
        found = loss_constants(objective, parsed.batch, values, rows, 4)
        assert (found.weight_slopes is not None) is has_slopes
        assert (found.turns is not None) is has_turns


def test_the_preference_loss_is_a_mean_over_pairs_of_scorable_samples():
    """Of two groups and a third without a signal; the unscorable sample is in no pair."""
    case = {
        "rewards": [1, 0, NAN, 0.5, 2, 1, 1],
        "group_ids": [0, 0, 0, 1, 1, 2, 2],
        "logprobs": [[-1.0], [-1.5], [-9.0], [-0.5], [-2.0], [-1.0], [-1.0]],
        "ref_logprobs": [[-1.2], [-1.0], [-1.0], [-1.0], [-1.0], [-1.0], [-1.0]],
    }
    overrides = ["preference_weight=3.0", "preference_beta=0.7"]
    both = evaluated("dr_grpo", overrides, **case)
    alone = evaluated("dr_grpo", [], **case)
    gaps = [0.2 - -0.5, -1.0 - 0.5]  # margin of the best less that of the worst
    losses = [math.log1p(math.exp(-0.7 * gap)) for gap in gaps]
    assert both["loss"] - alone["loss"] == pytest.approx(3.0 * sum(losses) / 2)
    pulls = [3.0 * 0.7 / (1 + math.exp(0.7 * gap)) / 2 for gap in gaps]
    gradient = [
        a[0] - b[0] for a, b in zip(both["grad_logprobs"], alone["grad_logprobs"], strict=True)
    ]
    expected = [-pulls[0], pulls[0], 0, pulls[1], -pulls[1], 0, 0]
    assert gradient == pytest.approx(expected)
