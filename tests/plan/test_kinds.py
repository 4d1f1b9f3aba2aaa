"""What is planned of a run of every kind = the model that its trainer builds."""

from __future__ import annotations

from typing import get_args

import pytest

from grpo_megatron.config.run import RunConfig
from grpo_megatron.plan.memory import plan_of
from grpo_megatron.plan.resolve import resolve

pytestmark = pytest.mark.engine
WARM = ["cold_start=null"]  # without a start that trains all weights first
RECIPES = [
    ("demo/gspo-moe-cpu", WARM),
    ("demo/lora-moe-cpu", WARM),
    ("demo/ppo-moe-cpu", WARM),
    ("demo/ppo-shared-moe-cpu", WARM),
    ("demo/ppo-shared-moe-cpu", [*WARM, "lora.rank=4"]),
    ("demo/vision-count-cpu", WARM),
    ("stages/tiny-sft", []),
    ("stages/tiny-distil", []),
    ("stages/tiny-preferences", []),
    ("stages/tiny-reward-model", []),
    ("stages/tiny-reward-labels", []),
    ("stages/tiny-process-reward-model", []),
    ("demo/gspo-moe-cpu", [*WARM, "kind=eval", "num_steps=0"]),
    ("demo/gspo-moe-cpu", [*WARM, "kind=rejection_sample", "num_steps=0"]),
    ("single_gpu/qwen2.5-1.5b-experience", []),
]
_ONE_RANK = [
    "trainer.num_ranks=1",
    "trainer.tensor_parallel_size=1",
    "trainer.expert_parallel_size=1",
]


@pytest.mark.parametrize(("recipe", "overrides"), RECIPES)
def test_parameters_are_those_of_the_model_that_is_built(world1, recipe, overrides):
    numbers = plan_of(resolve(recipe, [*_ONE_RANK, *overrides]).config).numbers
    real = world1.run(
        "tests.plan.meta_cases:real_parameters", recipe=recipe, overrides=[*_ONE_RANK, *overrides]
    )
    assert numbers["parameters"] == real["parameters"]
    assert numbers["trained_parameters"] == real["trained"]
    assert numbers.get("critic_parameters", 0) == real["critic"]


def test_every_kind_is_among_them():
    kinds = {resolve(recipe, overrides).config.kind for recipe, overrides in RECIPES}
    assert kinds == set(get_args(RunConfig.model_fields["kind"].annotation))


@pytest.mark.parametrize(("recipe", "overrides"), RECIPES)
def test_static_bytes_are_those_of_the_model_that_is_built(world1, recipe, overrides):
    fullest = plan_of(resolve(recipe, overrides).config).worst
    real = world1.run(
        "tests.plan.meta_cases:real_bytes_of_run",
        recipe=recipe,
        overrides=overrides,
        rank=fullest.rank,
    )
    assert {name: fullest.parts[name] for name in real} == real
