"""Advantages that are 0 but for rounding are 0: masks and regularisers go by their sign."""

from __future__ import annotations

from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_megatron.algorithms.groups import Groups, without_rounding
from tests.algorithms.evaluation import advantages, evaluated, flat, same

WHOLE = [3, 1, 2]
TENTHS = [0.3, 0.1, 0.2]
"""The same rewards on another scale; in floating point, 0.2 is not quite the mean of these."""


def test_m2po_leaves_out_the_same_tokens_on_every_scale():
    case = {
        "logprobs": [[-1, -1], [-1, -1], [-1] * 8],
        "rollout_logprobs": [[-1.3, -1.35], [-1, -1], [-0.99] * 8],
    }
    losses = [evaluated("m2po", rewards=rewards, **case)["loss"] for rewards in (WHOLE, TENTHS)]
    assert losses[0] == pytest.approx(1 / 6, abs=1e-5)
    assert losses[1] == pytest.approx(1 / 6, abs=1e-5)


def test_llds_holds_an_answer_of_mean_reward_on_every_scale():
    case = {"logprobs": [[-2.0, -2.0], [-1, -1], [-1, -1]], "old_logprobs": [[-1.0, -1.0]] * 3}
    for rewards in ([2, 1, 3], [0.2, 0.1, 0.3]):
        found = evaluated("grpo", ["llds_weight=1"], rewards=rewards, **case)
        assert found["loss"] == pytest.approx(1 / 3, abs=1e-5)


def test_an_answer_of_mean_reward_is_in_no_conflict():
    case = {
        "logprobs": [[-1.0, -1.0]] * 3,
        "token_ids": [[5, 6], [7, 8], [5, 6]],
        "entropies": [[0.1, 0.1]] * 3,
    }
    for rewards in ([2, 1, 3], [0.2, 0.1, 0.3]):
        found = evaluated("gtpo_conflict", ["conflict_entropy_weight=0"], rewards=rewards, **case)
        same(found["advantages"][2], [1, 1], 1e-4)


def test_a_covariance_of_0_is_a_tie():
    """Kl-Cov takes tokens of mean reward by chance, not by what rounding made of their mean."""
    chosen = []
    for rewards in (WHOLE, TENTHS):
        case = {"logprobs": [[-2.0], [-2.0], [-1.0, -3.0, -1.5, -2.5]], "rewards": rewards}
        old = [[-2.1], [-2.1], [-1.1, -3.1, -1.6, -2.6]]
        settings = ["covariance_share=0.5", "aggregation=token_mean"]
        found = evaluated("kl_cov", settings, old_logprobs=old, **case)
        chosen.append([gradient != 0 for gradient in flat(found["grad_logprobs"])])
    assert chosen[0] == chosen[1]


SUMS = (
    ["advantage=group", "advantage_std=none"],
    ["advantage=group", "advantage_std=group"],
    ["advantage=group", "advantage_std=batch_residual"],
    ["advantage=batch", "advantage_std=none"],
    ["advantage=rloo", "advantage_std=none"],
    ["advantage=maxrl", "advantage_std=none"],
    ["advantage=opo", "advantage_std=none"],
    ["advantage=reward", "advantage_std=none", "whiten=samples"],
    ["advantage=reward", "advantage_std=none", "whiten=tokens"],
    ["advantage=opo", "advantage_std=none", "whiten=samples"],
)


@pytest.mark.parametrize("choices", SUMS, ids=" ".join)
@settings(max_examples=15, deadline=None)
@given(
    rewards=st.lists(st.tuples(*[st.integers(0, 6)] * 3), min_size=1, max_size=3),
    lengths=st.tuples(*[st.integers(1, 4)] * 3),
)
def test_the_scale_of_rewards_decides_no_sign(choices, rewards, lengths):
    of_groups = [list(lengths)] * len(rewards)
    signs = []
    for scale in (1, 0.1, 0.7, 1e5 / 3):
        scaled = [[scale * reward for reward in group] for group in rewards]
        found = flat(advantages("grpo", scaled, of_groups, *choices))
        signs.append([(value > 0) - (value < 0) for value in found])
    assert signs.count(signs[0]) == len(signs)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(-50, 50), min_size=2, max_size=9), st.sampled_from([0.1, 0.3, 1e-3]))
def test_what_is_exactly_the_mean_has_no_difference(values, scale):
    groups = Groups(torch.zeros(len(values), dtype=torch.int64), torch.ones(len(values)).bool())
    found = groups.centred(scale * torch.tensor(values, dtype=torch.float64))
    mean = Fraction(sum(values), len(values))
    assert [value == 0 for value in found.tolist()] == [value == mean for value in values]


def test_small_differences_are_kept():
    rewards = torch.tensor([0.5, 0.5 + 1e-7], dtype=torch.float64)
    groups = Groups(torch.zeros(2, dtype=torch.int64), torch.ones(2).bool())
    assert groups.centred(rewards).all()
    differences = torch.tensor([1e-9, 1e-5, 1e-7])
    assert without_rounding(differences, torch.ones(3)).tolist() == pytest.approx([0, 1e-5, 0])


def test_rewards_of_turns_that_cancel_leave_exactly_0():
    """A token before two steps with opposite standardised rewards; cumulative sums do not end at
    0."""
    rows = []
    for rewards in ([3, 1, 2], [0.3, 0.1, 0.2]):
        steps = [[[0, rewards[0]], [1, rewards[1]]], [[0, rewards[2]]]]
        case = {"logprobs": [[-1.0, -1.0], [-1.0]], "steps": steps, "rewards": [1, 0]}
        rows.append(evaluated("deepseekmath_process", ["kl=none", "kl_beta=0"], **case))
    for found in rows:
        assert found["advantages"][0][0] == 0
        assert found["advantages"][1][0] == 0
