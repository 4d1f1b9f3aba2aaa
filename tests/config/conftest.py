"""Small recipes for the loader's tests."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from grpo_megatron.config.overlay import ConfigOverlay, Origin, apply_overrides
from grpo_megatron.config.run import RunConfig
from grpo_megatron.config.toml_file import find_recipe, read_recipe_chain

DEMO = "demo/gspo-moe-cpu"

MINIMAL = """\
name = "small"
[model]
preset = "tiny-qwen3-moe"
[[domains]]
name = "addition"
source = "reasoning_gym"
dataset = "chain_sum"
rewards = [{ function = "grpo_megatron.rewards.functions:exact_match" }]
[rollout]
dtype = "float32"
[trainer]
precision = "float32"
"""

WriteRecipe = Callable[..., Path]


@pytest.fixture
def write_recipe(tmp_path: Path) -> WriteRecipe:
    """Write `text` (default: a minimal recipe) plus `extra` to `file` and return the path."""

    def write(extra: str = "", *, text: str = MINIMAL, file: str = "recipe.toml") -> Path:
        path = tmp_path / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + extra)
        return path

    return write


def unchecked_config(*overrides: str) -> RunConfig:
    """The demo recipe with overrides, typed but with no rule applied."""
    layers = ConfigOverlay()
    for file in read_recipe_chain(find_recipe(DEMO)):
        layers.merge(file.values, lambda path: Origin("recipe"))
    assert apply_overrides(layers, overrides) == []
    return RunConfig.model_validate(layers.tree)


def inline_toml(value: Any) -> str:
    """`value` as TOML, with line breaks and comments inside arrays."""
    if isinstance(value, dict):
        return (
            "{ "
            + ", ".join(
                f"{json.dumps(key, ensure_ascii=False)} = {inline_toml(item)}"
                for key, item in value.items()
            )
            + " }"
        )
    if isinstance(value, list):
        return "[" + ",\n".join(map(inline_toml, value)) + "]  # ] comment\n" if value else "[]"
    return json.dumps(value, ensure_ascii=False)
