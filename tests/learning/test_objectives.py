"""Objectives of the family learn the demo's task, in fewer steps than the demo has; shuffled
advantages do not. All go on from one cold start."""

from __future__ import annotations

import shutil

import pytest

from tests.e2e import runs
from tests.learning.test_demo import DEMO, accuracies_of

pytestmark = [pytest.mark.learning, pytest.mark.timeout(1800)]
SHORT = ("num_steps=130",)


@pytest.fixture(scope="module")
def cold_started(tmp_path_factory):
    root = tmp_path_factory.mktemp("cold")
    done = runs.command("train", DEMO, f"runs_dir={root}", "num_steps=0", timeout_s=1200)
    assert done.returncode == 0, done.stdout + done.stderr
    return root / "demo"


def resumed(cold_started, tmp_path, *arguments: str) -> tuple[float, float]:
    run = shutil.copytree(cold_started, tmp_path / "demo", symlinks=True)
    return accuracies_of(runs.command("resume", str(run), *SHORT, *arguments, timeout_s=1700))


@pytest.mark.parametrize("preset", ["grpo", "dapo", "gspo", "rloo", "cispo", "deepseek_v3_2"])
def test_objectives_learn(cold_started, tmp_path, preset):
    dynamic = ["sampling.dynamic=true"] if preset == "dapo" else []
    before, after = resumed(cold_started, tmp_path, f"objective.preset={preset}", *dynamic)
    assert after - before >= 0.2


def test_shuffled_advantages_do_not_learn(cold_started, tmp_path):
    before, after = resumed(cold_started, tmp_path, "objective.shuffle_advantages=true")
    assert after <= before + 0.1
