"""What docs/tutorial.md tells a reader to write works as it says."""

from __future__ import annotations

import json
import re
import shutil
import sys
from pathlib import Path

import pytest

from grpo_megatron.cli.main import main
from grpo_megatron.launch.bindings import (
    refuse_unbound_objective,
    refuse_unbound_rewards,
    refuse_unreadable_problems,
)
from grpo_megatron.plan.resolve import resolve

ROOT = Path(__file__).parents[2]
BLOCKS = re.findall(r"```(\w+)\n(.*?)```", (ROOT / "docs/tutorial.md").read_text(), re.DOTALL)


def blocks(language: str) -> list[str]:
    return [text for kind, text in BLOCKS if kind == language]


@pytest.fixture
def mine(tmp_path, monkeypatch):
    """The directory that the tutorial makes, at its end."""
    directory = tmp_path / "mine"
    directory.mkdir()
    (tmp_path / "recipes").symlink_to(ROOT / "recipes")
    rewards, objective = blocks("python")
    (directory / "my_rewards.py").write_text(rewards)
    (directory / "my_objective.py").write_text(objective)
    recipe, objective_table, domain = blocks("toml")
    (directory / "mine.toml").write_text("\n".join([recipe, domain, objective_table]))
    [rows] = blocks("json")
    (directory / "rows.jsonl").write_text(rows)
    shutil.copy(ROOT / "examples/case.json", directory)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.chdir(directory)
    return directory


def test_the_recipe_at_the_end_has_everything_of_ones_own(mine):
    config = resolve("mine.toml").config
    assert [domain.name for domain in config.domains] == ["addition", "rows"]
    assert config.objective.clip == "my_objective:soft_clip"
    refuse_unbound_objective(config)
    refuse_unbound_rewards(config)
    refuse_unreadable_problems(config)


def test_the_objective_is_computed_on_a_case(mine, capsys):
    setting = "objective.clip=my_objective:soft_clip"
    assert main(["objective", "eval", "--objective", "dr_grpo", setting, "case.json"]) == 0
    assert json.loads(capsys.readouterr().out)["loss"] != 0


def test_a_misspelt_argument_of_the_reward_is_told(mine, capsys):
    recipe = (mine / "mine.toml").read_text()
    (mine / "mine.toml").write_text(recipe.replace("limit = 6", "limti = 6"))
    assert main(["train", "mine.toml"]) == 10
    assert "did you mean 'limit'" in capsys.readouterr().err
