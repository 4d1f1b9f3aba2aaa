"""Warnings of unusual values: of which, where they are said, and none for shipped recipes."""

from __future__ import annotations

import pytest

from grpo_megatron import assets
from grpo_megatron.cli.main import main
from grpo_megatron.plan.advice import advice_for
from grpo_megatron.plan.resolve import resolve

RELEASED = "dense/qwen2.5-7b"


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


def test_shipped_recipes_are_usual():
    names = assets.names(assets.root() / "recipes")
    trained = [name for name in names if not name.startswith("graphs/")]
    assert len(trained) > 25
    assert {name: keys(name) for name in trained if keys(name)} == {}


@pytest.mark.parametrize("command", [["plan"], ["config", "show"], ["config", "show", "--json"]])
def test_a_command_says_it_beside_its_output(capsys, command):
    assert main([*command, RELEASED, "optimizer.lr=1e-3"]) == 0
    found = capsys.readouterr()
    [line] = found.err.splitlines()
    assert line.startswith("warning: optimizer.lr = 0.001: published RL")
    assert "warning" not in found.out
    assert main([*command, RELEASED]) == 0
    assert capsys.readouterr().err == ""
