"""Whole recipes at their real sizes, through the real command."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from grpo_megatron import assets
from grpo_megatron.plan.resolve import resolve

pytestmark = pytest.mark.trace


def different_recipes() -> list[str]:
    """Recipes that train, one of those with the same model, layout, lengths and kind."""
    found: dict[str, str] = {}
    for name in assets.names(assets.root() / "recipes"):
        if name.startswith("graphs/"):
            continue
        config = resolve(name).config
        if not config.trains:
            continue
        what = [
            config.kind,
            config.model.model_dump_json(),
            config.trainer.model_dump_json(),
            config.routing.model_dump_json(),
            config.rollout.max_model_len,
            config.placement.gpus_per_node > 0,
        ]
        found.setdefault(json.dumps(what), name)
    return list(found.values())


def traced(*arguments: str) -> tuple[int, dict[str, Any], str]:
    command = [sys.executable, "-m", "grpo_megatron.cli.main", "plan", *arguments]
    done = subprocess.run(
        [*command, "--trace", "--json"], capture_output=True, text=True, check=False
    )
    return done.returncode, json.loads(done.stdout), done.stderr


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", different_recipes())
def test_the_plan_of_a_recipe_is_what_its_trainer_does(name):
    code, found, error = traced(name)
    wrong = {}
    for rank in found["ranks"]:
        wrong[rank["rank"]] = [row for row in rank["compared"] if not row["agrees"]]
    assert not any(wrong.values()), wrong
    assert code == 0, error
    assert found["agrees"]
