"""What an objective takes from outside of the trained groups: earlier steps, dropped groups."""

import json
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_megatron.algorithms.advantages.pipeline import select, state_after
from grpo_megatron.algorithms.case import parse_case
from grpo_megatron.algorithms.objective import Objective
from grpo_megatron.algorithms.running_distribution import MAX_VALUES, RunningDistribution
from grpo_megatron.config.loader import load_objective
from grpo_megatron.errors import DataError
from tests.algorithms.evaluation import evaluated

NOTHING = RunningDistribution.from_state([])


@settings(max_examples=200, deadline=None)
@given(
    st.lists(
        st.lists(st.sampled_from([0.0, 0.125, 0.5, 0.875, 1.0, 3.7]), max_size=9),
        min_size=1,
        max_size=5,
    ),
    st.floats(0, 1),
)
def test_quantiles_of_few_values_are_numpys(steps, q):
    distribution = NOTHING
    for values in steps:
        distribution = distribution.with_values(np.array(values, np.float64))
        stored = json.loads(json.dumps(distribution.state))
        distribution = RunningDistribution.from_state(stored)
    every_value = np.concatenate([np.array(values, np.float64) for values in steps])
    if len(every_value) == 0:
        assert math.isnan(distribution.quantile(q))
    else:
        assert distribution.quantile(q) == pytest.approx(np.quantile(every_value, q), abs=1e-12)


def test_quantiles_of_many_values_are_close():
    rng = np.random.default_rng(3)
    distribution = NOTHING
    steps = [rng.normal(size=700) ** 3 for _ in range(40)]
    for values in steps:
        distribution = distribution.with_values(values)
        assert len(distribution.values) <= MAX_VALUES
    every_value = np.concatenate(steps)
    assert distribution.counts.sum() == len(every_value)
    for q in (0.05, 0.5, 0.75, 0.95):
        share = np.mean(every_value < distribution.quantile(q))
        assert share == pytest.approx(q, abs=0.01)


def test_as_many_values_as_there_is_room_for_stay_exact():
    full = NOTHING.with_values(np.arange(MAX_VALUES, dtype=np.float64))
    assert full.values.tolist() == list(range(MAX_VALUES))
    assert full.counts.tolist() == [1] * MAX_VALUES
    merged = full.with_values(np.array([-1.0]))
    assert len(merged.values) <= MAX_VALUES // 2
    assert merged.counts.sum() == MAX_VALUES + 1


# --- GFPO's adaptive subset

ADAPTIVE = ["subset=adaptive", "subset_size=4"]


def groups_case(rates: list[float], **more) -> dict:
    """Groups of four samples of lengths 1 to 4; rates: of right answers, in quarters."""
    rewards, ids, logprobs = [], [], []
    for group, rate in enumerate(rates):
        for sample in range(4):
            rewards.append(float(sample < 4 * rate))
            ids.append(group)
            logprobs.append([-1.0] * (sample + 1))
    return {"rewards": rewards, "group_ids": ids, "logprobs": logprobs, **more}


def kept_by_group(case: dict, overrides=()) -> list[int]:
    parsed = parse_case(case)
    config, own = load_objective("gfpo", [*ADAPTIVE, *overrides], parsed.domains)
    trained = select(Objective(config, parsed.domains, own, parsed.state), parsed.batch)
    return torch.bincount(parsed.batch.group_ids[trained]).tolist()


def test_quartiles_are_those_of_the_batch_at_first():
    assert kept_by_group(groups_case([0.0, 0.25, 0.75, 1.0])) == [4, 4, 3, 2]


def test_parts_of_a_subset_are_rounded_up():
    """Of 3 samples the easiest quarter keeps 1.5, the next one 2.25."""
    case = groups_case([0.0, 0.25, 0.75, 1.0])
    assert kept_by_group(case, ["subset_size=3"]) == [3, 3, 3, 2]


def test_quartiles_are_those_of_the_run():
    """Among many hard groups before, one of a quarter right is easy."""
    hard_before = {"all": [0.0] * 40}
    assert kept_by_group(groups_case([0.0, 0.25], earlier_success=hard_before)) == [4, 2]
    easy_before = {"all": [1.0] * 40}
    assert kept_by_group(groups_case([0.0, 0.25], earlier_success=easy_before)) == [4, 4]


def test_domains_have_quartiles_of_their_own():
    domains = ["a"] * 4 + ["b"] * 4
    case = groups_case(
        [0.25, 0.25], domains=domains, earlier_success={"a": [0.0] * 9, "b": [1.0] * 9}
    )
    assert kept_by_group(case) == [2, 4]
    assert kept_by_group(case, ["statistics_scope=global"]) == [4, 4]  # their own median


def test_the_state_carries_quartiles_from_step_to_step():
    config, _ = load_objective("gfpo", ADAPTIVE)
    state, steps = {}, [[0.0, 0.0, 0.25], [0.25, 0.5], [0.5, 0.75, 1.0]]
    for rates in steps:
        batch = parse_case(groups_case(rates)).batch
        state = state_after(Objective(config, state=state), batch)
        state = json.loads(json.dumps(state))
    assert state == {"success@all": [[0.0, 2], [0.25, 2], [0.5, 2], [0.75, 1], [1.0, 1]]}
    every_rate = [rate for rates in steps for rate in rates]
    together = parse_case(groups_case([0.5], earlier_success={"all": every_rate}))
    assert Objective(config, state=state).state == {"success@all": together.state["success@all"]}


def test_no_other_objective_keeps_success():
    config, _ = load_objective("gfpo", ["subset_size=2"])
    batch = parse_case(groups_case([0.5])).batch
    assert state_after(Objective(config, state={"lambda": 0.5}), batch) == {"lambda": 0.5}


# --- Lite PPO's deviation


def test_the_raw_deviation_counts_groups_that_were_dropped():
    case = groups_case([0.5, 0.25], dropped_rewards={"all": [1.0] * 4 + [0.0] * 4})
    rewards = torch.tensor([*case["rewards"], *case["dropped_rewards"]["all"]], dtype=torch.float64)
    found = evaluated("lite_ppo", ["advantage_eps=0"], **case)["advantages"]
    centred = [0.5, 0.5, -0.5, -0.5, 0.75, -0.25, -0.25, -0.25]
    assert found == pytest.approx([value / float(rewards.std()) for value in centred], abs=1e-12)
    residual = ["advantage_std=batch_residual"]
    without = {**case, "dropped_rewards": {}}
    assert (
        evaluated("lite_ppo", residual, **case)["advantages"]
        == evaluated("lite_ppo", residual, **without)["advantages"]
    )


def test_dropped_rewards_belong_to_their_domain():
    case = groups_case(
        [0.5, 0.5], domains=["a"] * 4 + ["b"] * 4, dropped_rewards={"b": [7.0, -7.0]}
    )
    a, b = np.array(evaluated("lite_ppo", [], **case)["advantages"]).reshape(2, 4)
    assert np.abs(b).max() < np.abs(a).max() / 3
    a, b = np.array(
        evaluated("lite_ppo", ["statistics_scope=global"], **case)["advantages"]
    ).reshape(2, 4)
    assert a.tolist() == b.tolist()


@pytest.mark.parametrize("field", ["dropped_rewards", "earlier_success"])
def test_a_domain_that_the_case_has_not_is_named(field):
    with pytest.raises(DataError, match=rf"{field}\.maths is no domain of the case") as error:
        parse_case(groups_case([0.5], domains=["math"] * 4, **{field: {"maths": [1.0]}}))
    assert "math" in error.value.remedy


# --- others


def test_traces_do_not_go_below_their_least_advantage():
    """One wrong of eight has -2.5 deviations: without the clamp it weighs as much as all others."""
    case = {"rewards": [1.0] * 7 + [0.0], "group_ids": [0] * 8, "logprobs": [[-1.0, -1.0]] * 8}
    found = np.array(evaluated("grpo_lambda_trace", [], **case)["advantages"])
    assert found[-1].tolist() == [-0.98, -1.0]
    free = np.array(
        evaluated("grpo_lambda_trace", ["trace_min_advantage=null"], **case)["advantages"]
    )
    assert free[-1, -1] == pytest.approx(-2.4748, abs=1e-4)
    assert found[:-1].tolist() == free[:-1].tolist()


def test_the_preference_loss_moves_on_policy():
    """Before the first update the policy is the old one, but it may have left the reference."""
    case = {
        "rewards": [1, 0],
        "group_ids": [0, 0],
        "logprobs": [[-1.0, -0.4], [-1.0]],
        "ref_logprobs": [[-1.5, -0.4], [-0.6]],
    }
    overrides = ["preference_weight=1.0", "preference_beta=0.5"]
    both = evaluated("dr_grpo", overrides, **case)
    alone = evaluated("dr_grpo", [], **case)
    margin = (0.5) - (-0.4)
    assert both["loss"] - alone["loss"] == pytest.approx(math.log1p(math.exp(-0.5 * margin)))
    pull = -0.5 / (1 + math.exp(0.5 * margin))
    difference = both["grad_logprobs"][0][1] - alone["grad_logprobs"][0][1]
    assert difference == pytest.approx(pull)


def test_the_preference_loss_asks_for_the_reference():
    with pytest.raises(DataError, match="ref_logprobs is missing"):
        evaluated("dr_grpo", ["preference_weight=1.0"], **groups_case([0.5]))
