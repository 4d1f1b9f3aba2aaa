"""Whole recipes at their real sizes, through the real command."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from grpo_megatron import assets
from grpo_megatron.plan.model_facts import configuration_of
from grpo_megatron.plan.resolve import resolve

pytestmark = pytest.mark.trace


def different_recipes(*, with_images: bool) -> list[str]:
    """Recipes that train a model that sees, or one that does not, one of those with the same model,
    layout, lengths and kind."""
    found: dict[str, str] = {}
    for name in assets.names(assets.root() / "recipes"):
        if name.startswith("graphs/"):
            continue
        config = resolve(name).config
        sees_images = "vision_config" in configuration_of(config.model)[0]
        if not config.trains or sees_images != with_images:
            continue
        what = [
            config.kind,
            config.model.model_dump_json(),
            config.trainer.model_dump_json(),
            config.routing.model_dump_json(),
            config.rollout.max_model_len,
            config.placement.gpus_per_node > 0,
            config.lora and config.lora.model_dump_json(),
        ]
        found.setdefault(json.dumps(what), name)
    return list(found.values())


def trace(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "grpo_megatron.cli.main", "plan", *arguments]
    return subprocess.run(
        [*command, "--trace", "--json"], capture_output=True, text=True, check=False
    )


def traced(*arguments: str) -> tuple[int, dict[str, Any], str]:
    done = trace(*arguments)
    return done.returncode, json.loads(done.stdout), done.stderr


@pytest.mark.parametrize("targets", ["o_proj", "gate_proj", "down_proj", "self_attn", "mlp"])
@pytest.mark.parametrize("name", ["demo/lora-moe-cpu", "single_gpu/qwen3-8b-lora"])
def test_only_layers_with_adapters_keep_their_inputs(name, targets):
    code, found, error = traced(name, f'lora.targets=["{targets}"]')
    wrong = []
    for rank in found["ranks"]:
        wrong += [row for row in rank["compared"] if not row["agrees"]]
    assert (code, wrong) == (0, []), error


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", different_recipes(with_images=False))
def test_the_plan_of_a_recipe_is_what_its_trainer_does(name):
    code, found, error = traced(name)
    wrong = {}
    for rank in found["ranks"]:
        wrong[rank["rank"]] = [row for row in rank["compared"] if not row["agrees"]]
    assert not any(wrong.values()), wrong
    assert code == 0, error
    assert found["agrees"]


@pytest.mark.parametrize("name", different_recipes(with_images=True))
def test_a_model_that_sees_is_refused(name):
    done = trace(name)
    assert (done.returncode, done.stdout) == (2, "")
    assert "a trace knows no images" in done.stderr
