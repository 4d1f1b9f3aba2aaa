"""The agent of the demo learns to call its calculator, also by objectives that compare turns in the
same state; with shuffled advantages it does not."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.e2e import runs
from tests.learning.test_demo import accuracies_of

pytestmark = [pytest.mark.learning, pytest.mark.timeout(1300)]
DEMO = "demo/agent-calculator-cpu"
GAME = str(Path(__file__).with_name("guess.toml"))


def accuracies(*arguments: str) -> tuple[float, float]:
    return accuracies_of(runs.command("train", DEMO, *arguments, timeout_s=1200))


@pytest.mark.parametrize("seed", [0, 1])
def test_the_agent_learns(tmp_path, seed):
    before, after = accuracies(f"runs_dir={tmp_path}", f"seed={seed}")
    assert before <= 0.4
    assert after >= 0.75


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("preset", ["gigpo", "gagpo"])
def test_objectives_of_turns_learn_a_game_from_nothing(tmp_path, preset, seed):
    """Who guesses at all is right in a third of the games, with two different guesses in two."""
    games = [json.dumps({"question": f"Game {n}.", "answer": ""}) for n in range(4000)]
    (tmp_path / "games.jsonl").write_text("\n".join(games))
    settings = (f"domains.0.path={tmp_path / 'games.jsonl'}", f"objective.preset={preset}")
    done = runs.command(
        "train", GAME, f"runs_dir={tmp_path}", f"seed={seed}", *settings, timeout_s=1200
    )
    before, after = accuracies_of(done)
    assert before <= 0.05
    assert after >= 0.25


def test_groups_of_episodes_and_turns_teach_the_agent(tmp_path):
    settings = ("objective.preset=gigpo", "num_steps=60")
    before, after = accuracies(f"runs_dir={tmp_path}", *settings)
    assert before <= 0.4
    assert after >= 0.6


def test_shuffled_advantages_do_not_learn(tmp_path):
    before, after = accuracies(f"runs_dir={tmp_path}", "objective.shuffle_advantages=true")
    assert after <= before + 0.10
