"""The shipped recipe learns a preference that a file shows, and a resumed run is the same run."""

from __future__ import annotations

import json

import pytest

from tests.e2e.runs import command, metrics, timeless

pytestmark = [pytest.mark.engine, pytest.mark.learning]


def train(folder, *overrides: str) -> dict:
    done = command("train", "stages/tiny-preferences", f"runs_dir={folder}", *overrides)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads((folder / "tiny-preferences" / "result.json").read_text())


@pytest.mark.parametrize("loss", ["dpo", "ipo", "kto", "simpo", "orpo"])
def test_held_out_pairs(tmp_path, loss):
    result = train(tmp_path, f"preferences.loss={loss}", "gates=['eval.all.accuracy >= 0.9']")
    assert result["before"] <= 0.7


def test_a_reward_model(tmp_path):
    done = command("train", "stages/tiny-reward-model", f"runs_dir={tmp_path}")
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads((tmp_path / "tiny-reward-model" / "result.json").read_text())
    assert result["eval"]["all"]["accuracy"] >= 0.9


def test_a_resumed_run_is_the_same(tmp_path):
    whole = tmp_path / "whole"
    train(whole, "num_steps=6")
    cut = tmp_path / "cut"
    train(cut, "num_steps=6", "checkpoint.interval=3")
    run = cut / "tiny-preferences"
    for path in (run / "checkpoints").glob("step_000006"):
        path.rename(run / "lost")
    (run / "result.json").unlink()
    done = command("resume", str(run))
    assert done.returncode == 0, done.stdout + done.stderr
    expected = timeless(metrics(whole / "tiny-preferences"))
    found = timeless(metrics(run))
    assert [{**one, "seconds": 0} for one in found] == [{**one, "seconds": 0} for one in expected]
