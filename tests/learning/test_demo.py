"""The demo learns, and the same run with shuffled advantages does not. Minutes a run."""

from __future__ import annotations

import re

import pytest

from tests.e2e import runs

pytestmark = pytest.mark.learning
DEMO = "demo/gspo-moe-cpu"
LAST_LINE = re.compile(r"held-out accuracy before (\d\.\d\d) after (\d\.\d\d) in \d+ s")


def accuracies(*arguments: str) -> tuple[float, float]:
    done = runs.command("train", DEMO, *arguments, timeout_s=1200)
    assert done.returncode == 0, done.stdout + done.stderr
    match = LAST_LINE.fullmatch(done.stdout.splitlines()[-1])
    assert match, done.stdout
    return float(match[1]), float(match[2])


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_demo_learns(tmp_path, seed):
    before, after = accuracies(f"runs_dir={tmp_path}", f"seed={seed}")
    assert before <= 0.45
    assert after >= 0.75
    assert after - before >= 0.35


def test_shuffled_advantages_do_not_learn(tmp_path):
    before, after = accuracies(f"runs_dir={tmp_path}", "objective.shuffle_advantages=true")
    assert after <= before + 0.10
