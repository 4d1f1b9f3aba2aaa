"""Generalised advantages and the loss of a critic: by hand, and against a simple loop."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from grpo_megatron.algorithms.advantages.estimators import gae
from grpo_megatron.algorithms.advantages.pipeline import advantages_of, value_targets
from grpo_megatron.algorithms.advantages.signal import carries_signal
from grpo_megatron.algorithms.batch import ValueTargets
from grpo_megatron.algorithms.case import Case, parse_case
from grpo_megatron.algorithms.objective import Objective
from grpo_megatron.algorithms.value_loss import explained_variance, measured, value_losses
from grpo_megatron.config.loader import load_objective
from grpo_megatron.errors import DataError
from tests.algorithms.evaluation import evaluated, flat, same
from tests.algorithms.golden import GOLDEN

SECTION = GOLDEN["gae"]
PLAIN = ("whiten=none", "gae_gamma=0.9", "gae_lambda=0.5")


def case_of(rewards: list, values: list[list[float]], **more) -> dict:
    """Every sample a group of its own."""
    return {
        "rewards": rewards,
        "group_ids": list(range(len(rewards))),
        "logprobs": [[-1.0] * len(row) for row in values],
        "values": values,
        **more,
    }


def by_loop(rewards: list[float], values: list[float], gamma: float, decay: float) -> list[float]:
    """One sample, from the last token backwards."""
    advantages = [0.0] * len(values)
    later = 0.0
    next_value = 0.0
    for place in reversed(range(len(values))):
        delta = rewards[place] + gamma * next_value - values[place]
        later = delta + gamma * decay * later
        advantages[place] = later
        next_value = values[place]
    return advantages


def parsed_with(preset: str, overrides: tuple[str, ...], **case) -> tuple[Objective, Case]:
    parsed = parse_case(case)
    config, own = load_objective(preset, overrides, parsed.domains)
    return Objective(config, parsed.domains, own), parsed


# --- advantages


def test_golden_advantages():
    case = case_of(SECTION["rewards"], SECTION["values"])
    same(evaluated("ppo", PLAIN, **case)["advantages"], SECTION["advantages"])
    of_deltas = (*PLAIN, "gae_lambda=0.0")
    same(evaluated("ppo", of_deltas, **case)["advantages"], SECTION["delta"])


def test_golden_returns():
    objective, parsed = parsed_with("ppo", PLAIN, **case_of(SECTION["rewards"], SECTION["values"]))
    targets = value_targets(objective, parsed.batch)
    same(targets.returns.tolist(), SECTION["returns"])
    same(targets.old.tolist(), SECTION["values"])
    assert targets.is_counted.all()


def test_a_kl_in_the_reward_is_earned_by_every_token():
    k1 = SECTION["kl: beta 0.1, log pi_old - log pi_ref"]
    overrides = (*PLAIN, "kl=reward_k1", "kl_beta=0.1")
    case = case_of(
        SECTION["rewards"],
        SECTION["values"],
        ref_logprobs=[[-1.0 - kl for kl in row] for row in k1],
    )
    same(evaluated("ppo", overrides, **case)["advantages"], SECTION["advantages with kl"])
    objective, parsed = parsed_with("ppo", overrides, **case)
    returns = value_targets(objective, parsed.batch).returns
    expected = np.add(flat(SECTION["advantages with kl"]), flat(SECTION["values"]))
    same(returns.tolist(), expected.tolist())


@given(
    samples=st.lists(
        st.lists(st.tuples(*[st.floats(-3, 3)] * 2), min_size=0, max_size=9),
        min_size=1,
        max_size=5,
    ),
    gamma=st.floats(0.1, 1),
    decay=st.floats(0, 1),
)
def test_all_samples_at_once_are_what_a_loop_finds(samples, gamma, decay):
    expected = []
    sample_of = []
    for number, tokens in enumerate(samples):
        rewards = [reward for reward, _ in tokens]
        expected += by_loop(rewards, [value for _, value in tokens], gamma, decay)
        sample_of += [number] * len(tokens)
    of_tokens = [token for tokens in samples for token in tokens]
    pairs = torch.tensor(of_tokens, dtype=torch.float64).reshape(-1, 2)
    found = gae(pairs[:, 0], pairs[:, 1], torch.tensor(sample_of, dtype=torch.int64), gamma, decay)
    np.testing.assert_allclose(found, expected, rtol=1e-9, atol=1e-9)


@given(
    rewards=st.lists(st.floats(-2, 2), min_size=1, max_size=5),
    lengths=st.lists(st.integers(0, 8), min_size=5, max_size=5),
    decay=st.floats(0, 1),
    seed=st.integers(0, 1000),
)
def test_a_critic_that_knows_leaves_no_advantage(rewards, lengths, decay, seed):
    """And with lambda 1 returns do not depend on the critic."""
    exact = []
    random = []
    rng = np.random.default_rng(seed)
    for reward, length in zip(rewards, lengths, strict=False):
        exact.append([reward] * length)
        random.append(rng.normal(size=length).tolist())
    if not any(exact):
        return
    known = case_of(rewards, exact)
    found = evaluated("ppo", ("whiten=none", f"gae_lambda={decay}"), **known)["advantages"]
    same(found, [0.0] * len(flat(exact)))
    objective, parsed = parsed_with(
        "ppo", ("whiten=none", "gae_lambda=1.0"), **case_of(rewards, random)
    )
    same(value_targets(objective, parsed.batch).returns.tolist(), exact)


def test_tokens_of_an_environment_are_no_steps():
    """What the policy sampled before and after them are neighbours."""
    masked = case_of(
        [1.0],
        [[0.5, 9.0, 9.0, 0.6, 0.8]],
        loss_mask=[[1, 0, 0, 1, 1]],
    )
    [found] = evaluated("ppo", PLAIN, **masked)["advantages"]
    same([found[0], *found[3:]], SECTION["advantages"][0])
    assert found[1:3] == [0, 0]


def test_samples_without_a_reward_teach_nobody():
    case = case_of([1.0, None], [[0.5, 0.6, 0.8], [0.4, 0.1]])
    found = evaluated("ppo", PLAIN, **case)["advantages"]
    same(found[0], SECTION["advantages"][0])
    assert found[1] == [0, 0]
    objective, parsed = parsed_with("ppo", PLAIN, **case)
    targets = value_targets(objective, parsed.batch)
    assert targets.is_counted.tolist() == [True] * 3 + [False] * 2


def test_what_is_not_trained_is_no_target_and_not_in_the_whitening():
    case = case_of([1.0, 0.0, 0.5], [[0.5, 0.6], [0.4], [0.1, 0.3]])
    objective, parsed = parsed_with("ppo", (), **case)
    trained = torch.tensor([True, True, False])
    batch = replace(parsed.batch, trained=trained)
    targets = value_targets(objective, batch)
    assert targets.is_counted.tolist() == [True, True, True, False, False]
    whitened = advantages_of(objective, batch).values
    other = dict(batch.tokens)
    other["values"] = torch.where(batch.to_tokens(trained), other["values"], 99.0)
    again = advantages_of(objective, replace(batch, tokens=other)).values
    torch.testing.assert_close(whitened[:3], again[:3])
    assert whitened[:3].mean() == pytest.approx(0, abs=1e-6)


def test_spoilt_tokens_are_no_target():
    case = case_of([1.0], [[0.5, 0.6, 0.8]])
    objective, parsed = parsed_with("ppo", PLAIN, **case)
    batch = replace(parsed.batch, spoilt=torch.tensor([False, True, False]))
    targets = value_targets(objective, batch)
    assert targets.is_counted.tolist() == [True, False, True]
    same(targets.returns[[0, 2]].tolist(), [SECTION["returns"][0][0], SECTION["returns"][0][2]])


def test_spoilt_tokens_are_in_the_whitening():
    """As in all statistics: they lose their loss only."""
    case = case_of([1.0, 0.0], [[0.5, 50.0, 0.8], [0.4]])
    objective, parsed = parsed_with("ppo", (), **case)
    spoilt = replace(parsed.batch, spoilt=torch.tensor([False, True, False, False]))
    found = advantages_of(objective, spoilt).values
    torch.testing.assert_close(found, advantages_of(objective, parsed.batch).values)
    assert found.mean() == pytest.approx(0, abs=1e-6)


def test_groups_with_equal_rewards_carry_a_signal():
    objective, parsed = parsed_with("ppo", (), **case_of([1.0, 1.0], [[0.5], [0.5]]))
    assert carries_signal(objective.config, parsed.batch)


def test_values_are_asked_for():
    case = case_of([1.0], [[0.5]])
    del case["values"]
    with pytest.raises(DataError, match="values is missing"):
        evaluated("ppo", **case)


# --- the loss of a critic


@pytest.mark.parametrize(("clip", "suffix"), [(0.2, ""), (None, " without clip")])
def test_golden_value_loss(clip, suffix):
    section = GOLDEN["value_loss"]
    values = torch.tensor(section["values"], dtype=torch.float64, requires_grad=True)
    old = torch.tensor(section["old"], dtype=torch.float64)
    returns = torch.tensor(section["returns"], dtype=torch.float64)
    losses, is_clipped = value_losses(values, old, returns, clip)
    losses.sum().backward()
    same(losses.tolist(), section[f"losses{suffix}"])
    same(values.grad.tolist(), section[f"gradients{suffix}"])
    assert is_clipped.tolist() == [clip is not None, False, False]


@given(
    value=st.floats(-2, 2), old=st.floats(-2, 2), target=st.floats(-2, 2), clip=st.floats(0.01, 1)
)
def test_the_clip_only_makes_the_loss_higher(value, old, target, clip):
    """And only where the value has left the old one by more than the clip, towards the return."""
    numbers = [torch.tensor([number], dtype=torch.float64) for number in (value, old, target)]
    [loss], [is_clipped] = value_losses(*numbers, clip)
    assert loss >= (value - target) ** 2 / 2 - 1e-12
    if is_clipped:
        assert abs(value - old) >= clip
        assert abs(value - target) < abs(old - target)


def test_explained_variance():
    section = GOLDEN["value_loss"]["explained_variance"]
    returns = torch.tensor([*section["returns"], 7.0], dtype=torch.float64)
    old = torch.tensor([*section["old"], -5.0], dtype=torch.float64)
    is_counted = torch.tensor([True] * 4 + [False])
    targets = ValueTargets(old, returns, is_counted)
    assert explained_variance(targets) == pytest.approx(section["out"])
    found = measured(targets)
    assert found["critic/value_mean"] == found["critic/return_mean"] == 0.5
    assert found["critic/error"] == pytest.approx(0.15625**0.5)
    same_everywhere = replace(targets, returns=torch.ones(5, dtype=torch.float64))
    assert explained_variance(same_everywhere) is None
    assert "critic/explained_variance" not in measured(same_everywhere)
    nobody = replace(targets, is_counted=torch.zeros(5, dtype=torch.bool))
    assert explained_variance(nobody) is None
    assert measured(nobody) == {}
