"""A whole run by the command, whose trainer ranks have GPUs that only pretend; real engines."""

from __future__ import annotations

from pathlib import Path

import pytest

from grpo_megatron import pretended_cuda
from tests.e2e import runs

pytestmark = [pytest.mark.device, pytest.mark.timeout(900)]


def test_a_run_on_pretended_gpus_trains_as_the_plain_one(tmp_path):
    """EP2, two steps, publishing, a checkpoint, the export that is read back."""
    steps = {}
    for name, environment in (("pretended", pretended_cuda.environment()), ("plain", {})):
        directory = tmp_path / name
        done = runs.command(
            "train",
            runs.RECIPE,
            "num_steps=2",
            f"name={name}",
            f"runs_dir={tmp_path}",
            environment=dict(environment),
            timeout_s=400,
        )
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
        steps[name] = [step for step in runs.metrics(directory) if "grad/norm" in step]
        log = (directory / "logs" / "latest" / "trainer-0.log").read_text()
        assert ("PRETENDED CUDA" in log) == (name == "pretended")
    assert len(steps["plain"]) == 2
    for found, expected in zip(steps["pretended"], steps["plain"], strict=True):
        assert found["reward/mean"] == expected["reward/mean"]  # the same answers
        assert found["grad/norm"] == pytest.approx(expected["grad/norm"], rel=1e-4)
        assert found["loss/abs_terms"] == pytest.approx(expected["loss/abs_terms"], rel=1e-4)
        assert abs(found["mismatch/abs_max"]) < 1e-4


def test_the_variable_reaches_only_who_trains(tmp_path: Path):
    """The front end does not import torch, and so nothing is installed there."""
    done = runs.command(
        "config", "show", runs.RECIPE, environment=dict(pretended_cuda.environment())
    )
    assert done.returncode == 0, done.stderr
    assert "PRETENDED CUDA" not in done.stdout + done.stderr
