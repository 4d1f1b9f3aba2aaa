"""Lite PPO's deviation is of all that was sampled: dropped groups leave their rewards behind."""

import json

import numpy as np
import pytest

from grpo_megatron.algorithms.advantages.pipeline import advantages_of
from grpo_megatron.controller.group_filter import GroupFilter
from grpo_megatron.trainer.steps.recorded_batch import objective_of, sample_batch
from tests.controller.loops import Loop
from tests.controller.scored_groups import group, recipe

LITE = {"preset": "lite_ppo"}


def test_rewards_of_dropped_groups_are_told_by_domain():
    selection = GroupFilter(recipe(sampling={"dynamic": True}))
    groups = [group([1, 1], short=[0, 0.5]), group([1, 0]), group([0, np.nan])]
    assert selection.dropped_rewards(groups) == {"d": [1.0, 1.5, 0.0]}


def test_what_an_overlong_filter_unscores_is_no_part_of_it():
    selection = GroupFilter(recipe(sampling={"dynamic": True}, objective={"overlong": "drop"}))
    assert selection.dropped_rewards([group([1, 0, 0], truncated=[0])]) == {"d": [0.0, 0.0]}


def test_a_step_trains_with_the_deviation_of_everything_that_was_sampled(tmp_path):
    config = recipe(sampling={"dynamic": True}, objective=LITE, num_steps=4)
    loop = Loop(tmp_path, config)
    loop.run()
    kept_and_dropped = 0
    for _, table in loop.trained:
        manifest = json.loads((table.directory / "manifest.json").read_text())
        dropped = manifest["dropped_rewards"].get("d", [])
        batch = sample_batch(config, table)
        if dropped:
            assert batch.dropped.rewards.tolist() == dropped
        everything = np.concatenate([table.reward, dropped])
        centred = batch.rewards.reshape(-1, config.batch.num_samples_per_prompt)
        centred = (centred - centred.mean(1, keepdim=True)).flatten()
        expected = centred / (everything.std(ddof=1) + config.objective.advantage_eps)
        found = advantages_of(objective_of(config, {}), batch)
        np.testing.assert_allclose(found.values, expected, atol=1e-12)
        kept_and_dropped += len(dropped)
    assert kept_and_dropped > 0


@pytest.mark.parametrize("objective", [{"preset": "grpo"}, LITE])
def test_a_recorded_step_without_dropped_rewards_trains_as_before(tmp_path, objective):
    config = recipe(objective=objective, num_steps=2)
    loop = Loop(tmp_path, config)
    loop.run()
    for _, table in loop.trained:
        assert sample_batch(config, table).dropped is None
