"""Shipped recipes fit their GPUs, and the memory that they state is what `plan` computes."""

from __future__ import annotations

import pytest

from grpo_megatron import assets
from grpo_megatron.config.presets import load_preset, preset_names
from grpo_megatron.config.run import ModelConfig, PlacementConfig, RolloutConfig
from grpo_megatron.config.toml_file import find_recipe, read_recipe_chain
from grpo_megatron.config.trainer import TrainerConfig
from grpo_megatron.plan.memory import Plan, memory_problems, plan_of
from grpo_megatron.plan.resolve import resolve

ON_GPUS = [
    name
    for name in assets.names(assets.root() / "recipes")
    if resolve(name).config.placement.gpus_per_node
]


def memory_line(plan: Plan) -> str:
    trainer = f"{plan.worst.total / 2**30:.1f} of {plan.usable_bytes / 2**30:.1f} GiB"
    if not plan.engine:
        return f"# Memory: {trainer} in the trainer; no engine."
    weights = f"{plan.engine['weights'] / 2**30:.1f} GiB of weights"
    cache = f"{plan.engine['kv_cache'] / 2**30:.1f} GiB of keys and values"
    return f"# Memory: {trainer} in the trainer; engine {weights}, {cache}."


@pytest.mark.parametrize("name", ON_GPUS)
def test_recipe_fits_and_says_how(name):
    config = resolve(name).config
    plan = plan_of(config)
    assert memory_problems(config, plan) == []
    assert plan_of(config, worst_only=True).worst == plan.worst
    said = []  # by the recipe, or by the one that it extends and whose layout it keeps
    for file in read_recipe_chain(find_recipe(name)):
        said += [line for line in file.path.read_text().splitlines() if line.startswith("# Memory")]
    assert said[-1] == memory_line(plan)


@pytest.mark.parametrize("name", [n for n in preset_names() if load_preset(n).checkpoint])
def test_recommended_layouts_fit(name):
    for layout in load_preset(name).layouts:
        config = resolve("dense/qwen3-8b").config.model_copy(
            update={
                "model": ModelConfig(preset=name),
                "placement": PlacementConfig(gpus_per_node=8),
                "trainer": TrainerConfig(**layout["trainer"], max_tokens_per_microbatch=8192),
                "rollout": RolloutConfig(**layout["rollout"], max_model_len=8192),
            }
        )
        assert memory_problems(config, plan_of(config)) == []


def test_the_promised_recipes_are_there():
    nodes = {
        name: (place.trainer_nodes, place.rollout_nodes)
        for name in ON_GPUS
        for place in [resolve(name).config.placement]
    }
    assert nodes["moe/qwen3-30b-a3b"] == (4, 4)
    assert nodes["moe/qwen3-235b-a22b"] == (16, 16)
    assert nodes["moe/deepseek-v3"] == (32, 32)
    assert {"moe/glm-4.5", "dense/qwen3-8b", "dense/qwen3-32b", "dense/llama-3.3-70b"} <= {*nodes}
