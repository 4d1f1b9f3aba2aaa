"""Runs of every kind that trains: the trace takes the step of the kind, and its plan says so."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.engine
TP_CP = [
    "trainer.num_ranks=4",
    "trainer.expert_parallel_size=1",
    "trainer.tensor_parallel_size=2",
    "trainer.context_parallel_size=2",
]
PP = ["trainer.num_ranks=2", "trainer.expert_parallel_size=1", "trainer.pipeline_parallel_size=2"]
REWARD_MODEL = "stages/tiny-reward-model"
CASES = [
    ("demo/gspo-moe-cpu", []),
    ("demo/lora-moe-cpu", ["cold_start=null"]),
    ("stages/tiny-sft", []),
    ("stages/tiny-distil", []),
    ("stages/tiny-preferences", []),
    ("stages/tiny-preferences", TP_CP),
    ("stages/tiny-preferences", ["preferences.loss=simpo"]),
    ("stages/tiny-preferences", ["preferences.loss=kto"]),
    (REWARD_MODEL, []),
    (REWARD_MODEL, TP_CP),
    (REWARD_MODEL, PP),
    ("stages/tiny-reward-labels", TP_CP),
    ("stages/tiny-process-reward-model", TP_CP),
]


def traced(world1, recipe, overrides):
    return world1.run("tests.trace.cases:compared_recipe", recipe=recipe, overrides=overrides)


@pytest.mark.parametrize(("recipe", "overrides"), CASES)
def test_the_plan_of_a_kind_is_what_its_step_does(world1, recipe, overrides):
    found = traced(world1, recipe, overrides)
    assert not any(found["differences"].values()), found["differences"]


def test_a_reward_model_is_read_at_the_end_of_every_answer(world1):
    found = traced(world1, REWARD_MODEL, [])
    assert found["policy_tokens"] == found["samples"]


def test_a_label_is_held_against_the_answers_of_others(world1):
    found = traced(world1, "stages/tiny-preferences", ["preferences.loss=kto"])
    assert [phase for phase, _ in found["passes"]] == ["log-probs", "gradients"]


def test_both_answers_of_a_pair_share_a_micro_batch(world1):
    for_three = ["trainer.max_tokens_per_microbatch=192", "rollout.max_model_len=64"]
    found = traced(world1, "stages/tiny-preferences", for_three)
    assert found["samples"] == 2
    assert not any(found["differences"].values()), found["differences"]
