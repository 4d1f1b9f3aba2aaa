"""The algorithm in one file takes the steps of the real loop."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e import runs

pytestmark = [pytest.mark.engine, pytest.mark.recipes]

EXAMPLES = Path(__file__).parents[2] / "examples"


def run_in_examples(*command: str) -> str:
    return run_in(EXAMPLES, *command)


def run_in(folder: Path, *command: str) -> str:
    done = subprocess.run(
        [sys.executable, *command],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=runs.TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("seed", [0, 7])
def test_its_three_steps_are_those_of_the_real_loop(tmp_path, seed):
    settings = (f"runs_dir={tmp_path}", f"seed={seed}")
    printed = run_in_examples("rl_loop.py", "rl_loop.toml", *settings, "name=one-file")
    steps = [json.loads(line) for line in printed.splitlines()]
    command = ("-m", "grpo_megatron.cli.main", "train", "rl_loop.toml", *settings, "name=real")
    run_in_examples(*command)
    real = runs.metrics(tmp_path / "real")
    assert len(steps) == len(real) == 3
    for step, record in zip(steps, real, strict=True):
        assert step["grad/norm"] > 0
        for name, value in step.items():
            assert value == pytest.approx(record[name], rel=1e-6, abs=1e-9), name


def test_it_runs_without_arguments_from_anywhere(tmp_path):
    examples = tmp_path / "examples"
    shutil.copytree(EXAMPLES, examples, ignore=shutil.ignore_patterns("runs"))
    printed = run_in(tmp_path, str(examples / "rl_loop.py"))
    assert len(printed.splitlines()) == 3
    assert (examples / "runs").is_dir()


def test_the_file_is_short():
    assert len((EXAMPLES / "rl_loop.py").read_text().splitlines()) <= 250


def test_a_run_with_a_reward_and_an_objective_of_ones_own(tmp_path):
    """Trained, resumed and replayed, by the names in the recipe alone."""
    settings = (
        f"runs_dir={tmp_path}",
        "cold_start=null",
        "num_steps=3",
        "checkpoint.interval=1",
        "batch.num_prompts=8",
        "data.num_validation=8",
        "data.num_heldout=8",
        "domains.0.rewards.0.function=custom_reward:digits",
        "domains.0.rewards.0.arguments={}",
    )
    cli = ("-m", "grpo_megatron.cli.main")
    run_in_examples(*cli, "train", "custom.toml", *settings)
    assert all(record["grad/norm"] > 0 for record in runs.metrics(tmp_path / "custom"))
    printed = run_in_examples(*cli, "replay", f"{tmp_path / 'custom'}@1")
    assert "the step is reproduced" in printed
