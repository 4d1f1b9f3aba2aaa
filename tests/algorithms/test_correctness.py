"""Correct is what the accuracy component says, where it is known."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from grpo_megatron.algorithms.advantages.pipeline import advantages_of
from grpo_megatron.algorithms.advantages.signal import carries_signal
from grpo_megatron.algorithms.batch import SampleBatch
from grpo_megatron.algorithms.case import parse_case
from grpo_megatron.algorithms.objective import Objective
from grpo_megatron.config.loader import load_objective
from grpo_megatron.config.objective import ObjectiveConfig
from tests.algorithms.evaluation import evaluated


def batch(rewards: list[float], correct: list[bool] | None) -> SampleBatch:
    """One group; every sample has two tokens."""
    size = len(rewards)
    entropies = torch.linspace(0.5, 1.5, 2 * size, dtype=torch.float64)
    return SampleBatch(
        rewards=torch.tensor(rewards, dtype=torch.float64),
        group_ids=torch.zeros(size, dtype=torch.int64),
        token_counts=torch.full((size,), 2),
        sample_ids=torch.arange(size),
        domains=torch.zeros(size, dtype=torch.int64),
        trained=torch.ones(size, dtype=torch.bool),
        correct=None if correct is None else torch.tensor(correct),
        tokens={"entropies": entropies},
    )


CHOICES = {
    "gtpo_entropy": {"preset": "gtpo_entropy"},
    "grpo_s": {"preset": "grpo_s"},
    "passk": {"advantage": "passk", "advantage_std": "none"},
    "pkpo": {"advantage": "pkpo", "advantage_std": "none"},
    "length_switch": {"preset": "grpo_lambda_length"},
}


@pytest.mark.parametrize("name", CHOICES)
def test_the_accuracy_component_decides_and_not_the_weighted_sum(name):
    """Format points lift a wrong answer over the threshold, a length penalty pulls a right one
    below it: neither may change who is right."""
    objective = Objective(ObjectiveConfig(**CHOICES[name]))
    shaped = batch([0.3, 0.7, 1.0, 0.0], [True, False, True, False])
    plain = batch([1.0, 0.0, 1.0, 0.0], None)
    found = advantages_of(objective, shaped).values
    torch.testing.assert_close(found, advantages_of(objective, plain).values)
    by_sum = advantages_of(objective, replace(shaped, correct=None)).values
    assert not torch.allclose(found, by_sum)


@pytest.mark.parametrize("name", CHOICES)
def test_without_the_component_rewards_decide_as_ever(name):
    objective = Objective(ObjectiveConfig(**CHOICES[name]))
    plain = batch([1.0, 0.0, 1.0, 0.0], None)
    known = replace(plain, correct=torch.tensor([True, False, True, False]))
    found = advantages_of(objective, plain).values
    assert torch.equal(found, advantages_of(objective, known).values)


@pytest.mark.parametrize("shaping", ["per_token", "length_switch"])
@pytest.mark.parametrize("name", ["passk", "pkpo"])
def test_shaped_rewards_do_not_say_what_is_correct(name, shaping):
    """Per token, a right answer of four tokens earns 0.25, which is below the threshold."""
    case = {"logprobs": [[-0.5] * 4] * 4, "rewards": [1, 1, 0, 0]}
    choices = [f"advantage={name}", "advantage_std=none", "length_switch_weight=1.2"]
    plain = evaluated("grpo", choices, **case)["advantages"]
    assert all(plain)
    assert evaluated("grpo", [*choices, f"reward_shaping={shaping}"], **case)["advantages"] == plain
    config, _ = load_objective("grpo", [*choices, f"reward_shaping={shaping}"])
    assert carries_signal(config, parse_case(case).batch)


def test_samples_keep_their_correctness_in_a_subset():
    part = batch([1.0, 0.0, 1.0], [True, False, False]).subset(torch.tensor([2, 0]))
    assert part.correct.tolist() == [False, True]


def test_gtpo_leaves_groups_without_a_signal_alone():
    """Its entropy term would make every answer of such a group less likely."""
    objective = Objective(ObjectiveConfig(preset="gtpo_conflict", conflict_entropy_limit=9.0))
    columns = {"token_ids": torch.arange(8), "entropies": torch.full((8,), 0.5)}
    same = replace(batch([1.0, 1.0, 1.0, 1.0], None), tokens=columns)
    assert not advantages_of(objective, same).values.any()
    differ = replace(same, rewards=torch.tensor([1.0, 0.0, 1.0, 0.0], dtype=torch.float64))
    assert advantages_of(objective, differ).values.all()
