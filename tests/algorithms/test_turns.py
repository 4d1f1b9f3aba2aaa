"""Advantages, ratios and losses of turns: GiGPO, and what all estimators of turns share."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_megatron.algorithms.advantages.estimators import turn_index
from grpo_megatron.algorithms.batch import turn_events
from grpo_megatron.algorithms.case import parse_case
from grpo_megatron.errors import DataError
from grpo_megatron.types import Turn
from tests.algorithms.evaluation import evaluated, flat, same

EPS = 1e-6


def gigpo_by_numpy(
    rewards: list[float],
    groups: list[int],
    turns: list[list[tuple[int, float, str]]],
    *,
    omega: float,
    gamma: float,
    divide: bool,
) -> list[list[float]]:
    """GiGPO's advantage of every turn, straight from equations 3 to 8 of arXiv:2505.10978, with
    deviations that divide by one less than the number, and 0 for groups without a spread."""

    def beside_mean(values: list[float], value: float) -> float:
        if max(values) - min(values) <= 1e-8:
            return 0.0
        difference = value - np.mean(values)
        if not divide:
            return difference
        return difference / (np.std(values, ddof=1) + EPS)

    visits: dict[tuple[int, str], list[float]] = {}
    returns: list[list[float]] = []
    for sample, of_sample in enumerate(turns):
        found = []
        for number, (_, _, state) in enumerate(of_sample):
            value = 0.0
            for distance, (_, reward, _) in enumerate(of_sample[number:]):
                value += gamma**distance * reward
            found.append(value)
            visits.setdefault((groups[sample], state), []).append(value)
        returns.append(found)
    advantages = []
    for sample, of_sample in enumerate(turns):
        of_group = [r for r, g in zip(rewards, groups, strict=True) if g == groups[sample]]
        of_episode = beside_mean(of_group, rewards[sample])
        found = []
        for value, (_, _, state) in zip(returns[sample], of_sample, strict=True):
            of_turn = beside_mean(visits[groups[sample], state], value)
            found.append(of_episode + omega * of_turn)
        advantages.append(found)
    return advantages


def case_of(rewards, groups, turns) -> dict[str, Any]:
    """As many tokens as the last turn ends with."""
    lengths = [of_sample[-1][0] + 1 for of_sample in turns]
    return {
        "rewards": rewards,
        "group_ids": groups,
        "logprobs": [[-1.0] * length for length in lengths],
        "turns": [[list(turn) for turn in of_sample] for of_sample in turns],
    }


def at_tokens(values: list[list[float]], turns) -> list[list[float]]:
    """Every token of a turn has its value."""
    found = []
    for of_sample, ends in zip(values, turns, strict=True):
        start = 0
        tokens: list[float] = []
        for value, (end, _, _) in zip(of_sample, ends, strict=True):
            tokens += [value] * (end + 1 - start)
            start = end + 1
        found.append(tokens)
    return found


@st.composite
def rollouts(draw):
    num_samples = draw(st.integers(1, 6))
    groups = sorted(draw(st.lists(st.integers(0, 1), min_size=num_samples, max_size=num_samples)))
    groups = [number - groups[0] for number in groups]
    number = st.sampled_from([-1.0, 0.0, 0.5, 2.0])
    turns = []
    for _ in groups:
        end = -1
        of_sample = []
        for _ in range(draw(st.integers(1, 4))):
            end += draw(st.integers(1, 3))
            of_sample.append((end, draw(number), draw(st.sampled_from("abc"))))
        turns.append(of_sample)
    return [draw(number) for _ in groups], groups, turns


@settings(max_examples=100, deadline=None)
@given(
    rollouts(),
    st.sampled_from([0.0, 0.5, 1.0]),
    st.sampled_from([0.9, 1.0]),
    st.booleans(),
)
def test_gigpo_is_what_its_equations_say(drawn, omega, gamma, divide):
    rewards, groups, turns = drawn
    settings_of = [
        f"gigpo_omega={omega}",
        f"gigpo_gamma={gamma}",
        f"advantage_std={'group' if divide else 'none'}",
    ]
    found = evaluated("gigpo", settings_of, **case_of(rewards, groups, turns))["advantages"]
    by_turn = gigpo_by_numpy(rewards, groups, turns, omega=omega, gamma=gamma, divide=divide)
    same(found, at_tokens(by_turn, turns), 1e-6)


def test_gigpo_in_numbers():
    """Two episodes pass state s; of the returns 0.5 and 0, and of the rewards 1 and 0, each
    deviation is the difference over the square root of 2."""
    turns = [[(1, 0.0, "s"), (2, 1.0, "t")], [(0, 0.0, "s")]]
    case = case_of([1.0, 0.0], [0, 0], turns)
    found = evaluated("gigpo", ["gigpo_gamma=0.5", "advantage_eps=0"], **case)["advantages"]
    one = 1 / math.sqrt(2)
    same(found, [[2 * one, 2 * one, one], [-2 * one]])


def test_without_its_weight_gigpo_is_grpo():
    turns = [[(0, 0.0, "s"), (2, 1.0, "t")], [(1, 0.0, "s")], [(0, 3.0, "s")]]
    case = case_of([1.0, 0.0, 0.25], [0, 0, 0], turns)
    found = evaluated("gigpo", ["gigpo_omega=0"], **case)
    expected = evaluated("grpo", **{k: v for k, v in case.items() if k != "turns"})
    of_tokens = []
    for advantage, count in zip(expected["advantages"], [3, 2, 1], strict=True):
        of_tokens.append([advantage] * count)
    same(found["advantages"], of_tokens)
    same(found["grad_logprobs"], expected["grad_logprobs"])


@pytest.mark.parametrize("preset", ["gigpo", "gagpo"])
def test_without_rewards_of_turns_the_episodes_own_is_that_of_its_last_turn(preset):
    with_rewards = [[(0, 0.0, "s"), (2, 1.0, "t")], [(1, 0.0, "s"), (2, 0.25, "t")]]
    without = [[(end, None, state) for end, _, state in turns] for turns in with_rewards]
    rewards = [1.0, 0.25]
    expected = evaluated(preset, **case_of(rewards, [0, 0], with_rewards))["advantages"]
    found = evaluated(preset, **case_of(rewards, [0, 0], without))["advantages"]
    assert any(flat(expected))
    same(found, expected)


def test_an_unknown_state_is_none_of_the_others():
    """Two turns without a state say nothing about each other, nor about one called None."""
    turns = [[(0, 1.0, None), (1, 0.0, "None")], [(0, 0.0, None)]]
    found = evaluated("gigpo", **case_of([1.0, 1.0], [0, 0], turns))["advantages"]
    assert flat(found) == [0.0, 0.0, 0.0]


def test_turns_with_rewards_are_steps_of_process_supervision():
    turns = [[(0, None, "s"), (2, 1.0, "t")], [(1, 0.0, "s")]]
    case = case_of([0.0, 0.0], [0, 0], turns)
    steps = {k: v for k, v in case.items() if k != "turns"}
    steps["steps"] = [[[2, 1.0]], [[1, 0.0]]]
    quiet = ["kl=none", "kl_beta=0"]
    found = evaluated("deepseekmath_process", quiet, **case)["advantages"]
    same(found, evaluated("deepseekmath_process", quiet, **steps)["advantages"])


def test_gigpo_needs_turns():
    with pytest.raises(DataError, match="the samples have no turns"):
        evaluated("gigpo", rewards=[1, 0], group_ids=[0, 0], logprobs=[[-1.0], [-1.0]])


# --- spoilt turns


SPOILT = {
    "rewards": [1.0, 0.0],
    "group_ids": [0, 0],
    "logprobs": [[-1.0, -0.5, -0.7], [-1.2, -0.4]],
    "old_logprobs": [[-1.1, -0.6, -0.5], [-1.0, -0.5]],
    "turns": [
        [[1, 0.0, "s"], {"end": 2, "reward": 1.0, "state": "t", "spoilt": 1}],
        [[0, 0.0, "s"], [1, 0.25, "t"]],
    ],
}


@pytest.mark.parametrize("preset", ["grpo", "gspo", "gigpo", "gagpo", "dapo", "deepseekmath"])
def test_a_spoilt_turn_has_statistics_and_no_gradient(preset):
    """Not even by the ratio of its sequence; whoever else is in it has the gradient as before."""
    unspoilt = [[1, 0.0, "s"], [2, 1.0, "t"]]
    whole = {**SPOILT, "turns": [unspoilt, SPOILT["turns"][1]]}
    more = {}
    if preset == "deepseekmath":
        more["ref_logprobs"] = [[-1.0, -0.9, -0.2], [-1.0, -1.0]]
    found = evaluated(preset, **SPOILT, **more)
    expected = evaluated(preset, **whole, **more)
    assert found["advantages"] == expected["advantages"]
    assert expected["grad_logprobs"][0][2] != 0
    assert found["grad_logprobs"][0][2] == 0
    for name in ("ratio/mean", "mismatch/k1", "policy/entropy", "policy/logprob_positive"):
        assert found["metrics"][name] == expected["metrics"][name]
    if preset != "gspo":  # whose ratio of the sequence had the spoilt token's term too
        same(found["grad_logprobs"][0][:2], expected["grad_logprobs"][0][:2])
    same(found["grad_logprobs"][1], expected["grad_logprobs"][1])


def test_a_spoilt_turn_stays_in_the_denominators():
    """The loss is that of the other tokens over the number of all."""
    found = evaluated("grpo", ["aggregation=token_mean"], **SPOILT)
    ratio = [math.exp(0.1), math.exp(0.1), math.exp(-0.2), math.exp(0.1)]
    advantage = found["advantages"]
    terms = [advantage[0] * ratio[0], advantage[0] * ratio[1]]
    terms += [advantage[1] * ratio[2], advantage[1] * ratio[3]]
    same(found["loss"], -sum(terms) / 5)


# --- recorded turns


def test_turns_tile_the_policy_tokens_of_an_episode():
    """Of two sequences one after the other, with tokens of the environment left out."""
    two = [((Turn(1, 3, 0.5, "s"), Turn(5, 6)), 8), ((), 2)]
    one = [((Turn(0, 2, math.nan, "s"),), 2)]
    events = turn_events([two, one, [((), 0)]])
    assert events.sample.tolist() == [0, 0, 0, 1]
    assert events.end.tolist() == [1, 2, 4, 1]
    np.testing.assert_array_equal(events.reward, [0.5, math.nan, math.nan, math.nan])
    states = events.state.tolist()
    assert states[0] == states[3] and len(set(states)) == 3


@given(st.lists(st.lists(st.integers(1, 4), min_size=1, max_size=4), min_size=1, max_size=4))
def test_every_token_is_in_the_turn_that_was_recorded(sizes):
    """`turn_geo` counts by recorded turns, wherever the environment's tokens are."""
    samples = []
    for of_sample in sizes:
        turns = []
        start = 1
        for size in of_sample:
            turns.append(Turn(start, start + size))
            start += size + 2
        samples.append([(tuple(turns), start)])
    events = turn_events(samples)
    case = {
        "rewards": [0.0] * len(sizes),
        "group_ids": [0] * len(sizes),
        "logprobs": [[-1.0] * sum(of_sample) for of_sample in sizes],
    }
    batch = replace(parse_case(case).batch, turns=events)
    _, found = torch.unique_consecutive(turn_index(batch), return_inverse=True)
    every_size = [size for of_sample in sizes for size in of_sample]
    assert found.tolist() == np.repeat(np.arange(len(every_size)), every_size).tolist()
