"""Warnings of unusual values: of which, where they are said, and none for shipped recipes."""

from __future__ import annotations

import pytest

from grpo_megatron import assets
from grpo_megatron.cli.main import main
from grpo_megatron.plan.advice import advice_for
from grpo_megatron.plan.resolve import resolve

RELEASED = "dense/qwen2.5-7b"
SMALL_STEP = ["batch.num_prompts=8", "batch.num_samples_per_prompt=8"]


def keys(recipe: str, *overrides: str) -> list[str]:
    return [unusual.key for unusual in advice_for(resolve(recipe, overrides).config)]


@pytest.mark.parametrize(
    ("override", "wanted"),
    [
        ("optimizer.lr=1e-7", []),
        ("optimizer.lr=1e-5", []),
        ("optimizer.lr=9e-8", ["optimizer.lr"]),
        ("optimizer.lr=1e-3", ["optimizer.lr"]),
        ("batch.num_samples_per_prompt=2", []),
        ("batch.num_samples_per_prompt=64", []),
        ("batch.num_samples_per_prompt=65", ["batch.num_samples_per_prompt"]),
    ],
)
def test_what_is_unusual(override, wanted):
    assert keys(RELEASED, override) == wanted


def test_tiny_models_learn_fast_and_supervision_has_rates_of_its_own():
    assert keys("demo/gspo-moe-cpu", "optimizer.lr=1e-2") == []
    assert keys("demo/gspo-moe-cpu", "optimizer.lr=1e-8") == ["optimizer.lr"]
    assert keys("stages/deepseek-v3-sft", "optimizer.lr=1e-4") == []


@pytest.mark.parametrize(
    ("overrides", "wanted"),
    [
        (["batch.max_staleness=4", "optimizer.lr=1e-5"], []),
        (["batch.max_staleness=5", "optimizer.lr=1e-5"], ["optimizer.lr"]),
        (["batch.max_staleness=5", "optimizer.lr=1e-6"], []),
        (["batch.max_staleness=2", "batch.updates_per_rollout=4"], ["optimizer.lr"]),
        (["batch.max_staleness=128", "optimizer.lr=1e-6"], []),
        (["batch.max_staleness=129", "optimizer.lr=1e-6"], ["batch.max_staleness"]),
        (["batch.max_staleness=12", *SMALL_STEP, "optimizer.lr=1e-6"], []),
        (["batch.max_staleness=13", *SMALL_STEP, "optimizer.lr=1e-6"], ["batch.num_prompts"]),
    ],
)
def test_what_is_unusual_so_far_ahead(overrides, wanted):
    shape = ["batch.num_prompts=64", "batch.num_samples_per_prompt=16", "optimizer.lr=1e-5"]
    found = keys(RELEASED, *shape, *overrides)
    assert found == wanted


def test_prompts_that_are_proposed_are_enough():
    overrides = ["batch.max_staleness=20", "batch.num_samples_per_prompt=24", "optimizer.lr=1e-6"]
    config = resolve(RELEASED, [*overrides, "batch.num_prompts=8"]).config
    [unusual] = advice_for(config)
    assert unusual.nearest == (22,)
    assert keys(RELEASED, *overrides, "batch.num_prompts=22") == []


def test_tiny_models_learn_fast_ahead_too():
    assert keys("demo/gspo-moe-cpu", "batch.max_staleness=8") == []


LEFT_OUT_OF_PLANS = {"systems/vlm_r1": ["model.path"]}
"""Told of every released model that sees, however usual its recipe is."""


def test_shipped_recipes_are_usual():
    names = assets.names(assets.root() / "recipes")
    trained = [name for name in names if not name.startswith("graphs/")]
    assert len(trained) > 25
    assert {name: keys(name) for name in trained if keys(name)} == LEFT_OUT_OF_PLANS


@pytest.mark.parametrize("command", [["plan"], ["config", "show"], ["config", "show", "--json"]])
def test_a_command_says_it_beside_its_output(capsys, command):
    assert main([*command, RELEASED, "optimizer.lr=1e-3"]) == 0
    found = capsys.readouterr()
    [line] = found.err.splitlines()
    assert line.startswith("warning: optimizer.lr = 0.001: published RL")
    assert "warning" not in found.out
    assert main([*command, RELEASED]) == 0
    assert capsys.readouterr().err == ""
