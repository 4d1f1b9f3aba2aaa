"""PPO's memory beside GRPO's: the planner's own numbers, added up."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from grpo_megatron.cli.main import main
from grpo_megatron.config.presets import load_preset, preset_names
from grpo_megatron.config.run import ModelConfig
from grpo_megatron.plan.memory import plan_of, vocabulary_of
from grpo_megatron.plan.ppo import Comparison, ModelMemory, comparison_of, comparison_of_model
from grpo_megatron.plan.resolve import resolve

DOCUMENTATION = Path(__file__).parents[2] / "docs/planning.md"


def models_of(found: Comparison) -> dict[str, ModelMemory]:
    return {model.model: model for model in found.models}


@pytest.mark.parametrize(
    ("name", "parameters"),
    [("7b", 6_738_415_616), ("13b", 13_015_864_320), ("70b", 68_976_648_192)],
)
def test_dense_shapes_are_llama_2(name, parameters):
    models = models_of(comparison_of_model(name))
    assert models["policy"].parameters == parameters


@pytest.mark.parametrize("name", preset_names())
def test_every_preset_has_a_critic_with_a_value_head(name):
    hf = load_preset(name).hf
    found = comparison_of_model(name)
    models = models_of(found)
    hidden = hf["hidden_size"]
    output_layer = vocabulary_of(hf, ModelConfig(preset=name)) * hidden
    if hf["tie_word_embeddings"]:
        output_layer = 0
    wanted = models["policy"].parameters - output_layer + hidden
    assert models["critic"].parameters == models["reward model"].parameters == wanted
    assert models["reference"].parameters == models["policy"].parameters
    ppo, with_reward, with_kl, without_kl = found.algorithms
    assert with_reward.all_ranks > ppo.all_ranks > with_kl.all_ranks > without_kl.all_ranks
    assert without_kl.all_ranks == models["policy"].all_ranks
    for algorithm in found.algorithms:
        assert algorithm.all_ranks == sum(models[name].all_ranks for name in algorithm.models)
    assert ppo.rank == sum(models[name].rank for name in ppo.models)
    assert ppo.share_of_ppo == 1 and 0.4 < without_kl.share_of_ppo < 0.5


@pytest.mark.parametrize(
    "recipe", ["demo/gspo-moe-cpu", "dense/qwen2.5-7b", "dense/llama-3.3-70b", "moe/deepseek-v3"]
)
def test_the_policy_is_that_of_the_plan(recipe):
    config = resolve(recipe).config
    found = comparison_of(config)
    of_plan = plan_of(config).stages[found.stage].parts
    assert models_of(found)["policy"].parts == {
        name: of_plan[name] for name in ("weights", "gradients", "optimizer", "buffers")
    }


def test_a_recipe_with_a_critic_plans_it():
    """As the comparison has it, and nothing else of a rank changes."""
    config = resolve("demo/ppo-moe-cpu").config
    without = resolve("demo/gspo-moe-cpu").config
    parts = plan_of(config).worst.parts
    critic = models_of(comparison_of(config))["critic"]
    of_critic = {}
    for name, num_bytes in parts.items():
        if name.startswith("critic_"):
            of_critic[name.removeprefix("critic_")] = num_bytes
    assert of_critic == critic.parts
    rest = {name: size for name, size in parts.items() if not name.startswith("critic_")}
    assert rest == plan_of(without).worst.parts
    numbers = plan_of(config).numbers
    assert numbers["critic_parameters"] == critic.parameters
    saved = numbers["checkpoint_bytes"] - plan_of(without).numbers["checkpoint_bytes"]
    assert saved == critic.parameters * (4 + 12)


def test_a_critic_on_the_policys_layers_costs_its_head():
    """Of the last stage: a weight for each size of the state, in float32 with Adam's moments."""
    config = resolve("demo/ppo-shared-moe-cpu").config
    without = resolve("demo/gspo-moe-cpu").config
    parts = plan_of(config).worst.parts
    assert not [name for name in parts if name.startswith("critic_")]
    assert "critic_parameters" not in plan_of(config).numbers
    hidden = load_preset(config.model.preset).hf["hidden_size"]
    of_plain = plan_of(without).worst.parts
    assert parts["weights"] - of_plain["weights"] == 4 * hidden
    assert parts["gradients"] - of_plain["gradients"] == 4 * hidden
    assert 0 < parts["optimizer"] - of_plain["optimizer"] <= 8 * hidden


def test_numbers_without_padding():
    """A model on one rank, by hand: bfloat16, Adam."""
    recipe = "dense/qwen2.5-7b"
    layout = ["num_ranks=1", "tensor_parallel_size=1", "distributed_optimizer=false"]
    overrides = [f"trainer.{setting}" for setting in layout]
    config = resolve(recipe, [*overrides, "placement.gpus_per_node=0"]).config
    models = models_of(comparison_of(config))
    policy = 7_615_616_512
    critic = policy - 152064 * 3584 + 3584
    assert models["policy"].rank == policy * (2 + 4 + 12)
    assert models["critic"].rank == critic * (2 + 4 + 12)
    assert models["reference"].rank == policy * 2
    assert models["reward model"].rank == critic * 2


def test_frozen_routers_are_not_trained_in_either():
    frozen = resolve("moe/qwen3-30b-a3b", ["routing.router_policy=freeze_weights"]).config
    models = models_of(comparison_of(frozen))
    free = models_of(comparison_of(resolve("moe/qwen3-30b-a3b").config))
    for name in ("policy", "critic"):
        assert models[name].parts["gradients"] < free[name].parts["gradients"]


def test_the_command(capsys):
    assert main(["plan", "moe/qwen3-30b-a3b", "--compare", "ppo"]) == 0
    out = capsys.readouterr().out
    for words in ("PPO with a reward model\t", "GRPO without KL\tpolicy\t", "of experts by 4"):
        assert words in out
    assert main(["plan", "70b", "--compare", "ppo", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [model["model"] for model in found["models"]][:2] == ["policy", "critic"]
    assert found["per_parameter"] == {"weights": 2, "gradients": 4, "optimizer": 12}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["7b", "--compare", "dpo"], "--compare ppo"),
        (["7b", "trainer.num_ranks=4", "--compare", "ppo"], "name a recipe"),
        (["dense/qwen3-8b", "--compare", "ppo", "--search", "1x8"], "exclude each other"),
        (["dense/qwen3-8b", "--compare", "ppo", "--answer-tokens", "9"], "exclude each other"),
        (["8b", "--compare", "ppo"], "no recipe at '8b'"),
    ],
)
def test_wrong_arguments(capsys, arguments, words):
    assert main(["plan", *arguments]) == 2
    assert words in capsys.readouterr().err


@pytest.mark.parametrize("name", ["7b", "70b", "deepseek-v3"])
def test_the_documentation_has_these_numbers(name):
    found = comparison_of_model(name)
    ppo, _, with_kl, without_kl = found.algorithms
    cells = [f"{name}, {found.num_ranks} ranks", f"{ppo.all_ranks / 2**30:.0f} GiB"]
    for algorithm in (with_kl, without_kl):
        size = f"{algorithm.all_ranks / 2**30:.0f} GiB"
        cells.append(f"{size} ({algorithm.share_of_ppo * 100:.0f} %)")
    assert f"| {' | '.join(cells)} |" in DOCUMENTATION.read_text()
