"""The demo learns, and the same run with shuffled advantages does not. Minutes a run."""

from __future__ import annotations

import re
import subprocess

import pytest

from tests.e2e import runs

pytestmark = [pytest.mark.learning, pytest.mark.timeout(1300)]
DEMO = "demo/gspo-moe-cpu"
LAST_LINE = re.compile(r"held-out accuracy before (\d\.\d\d) after (\d\.\d\d) in \d+ s")


def accuracies(*arguments: str) -> tuple[float, float]:
    return accuracies_of(runs.command("train", DEMO, *arguments, timeout_s=1200))


def accuracies_of(done: subprocess.CompletedProcess) -> tuple[float, float]:
    """Before and after, as the run's last line says."""
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


def test_adapters_learn(tmp_path):
    done = runs.command("train", "demo/lora-moe-cpu", f"runs_dir={tmp_path}", timeout_s=1200)
    before, after = accuracies_of(done)
    assert before <= 0.45
    assert after >= 0.70
    assert (tmp_path / "demo-lora" / "adapter" / "adapter_model.safetensors").exists()


def test_ppo_learns_and_so_does_its_critic(tmp_path):
    done = runs.command("train", "demo/ppo-moe-cpu", f"runs_dir={tmp_path}", timeout_s=1200)
    before, after = accuracies_of(done)
    assert before <= 0.45
    assert after >= 0.70
    steps = runs.metrics(tmp_path / "demo-ppo")
    explained = [step["critic/explained_variance"] for step in steps]
    assert sum(explained[-40:]) / 40 > sum(explained[:40]) / 40 + 0.05
    assert sum(explained[-40:]) / 40 > 0.05


def test_ppo_learns_with_a_critic_on_the_policys_layers(tmp_path):
    recipe = "demo/ppo-shared-moe-cpu"
    done = runs.command("train", recipe, f"runs_dir={tmp_path}", timeout_s=1200)
    before, after = accuracies_of(done)
    assert before <= 0.45
    assert after >= 0.70
    steps = runs.metrics(tmp_path / "demo-ppo-shared")
    explained = [step["critic/explained_variance"] for step in steps]
    assert sum(explained[-40:]) / 40 > sum(explained[:40]) / 40 + 0.05


def test_shuffled_advantages_do_not_learn(tmp_path):
    before, after = accuracies(f"runs_dir={tmp_path}", "objective.shuffle_advantages=true")
    assert after <= before + 0.10
