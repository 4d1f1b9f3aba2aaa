"""A cold start that is longer than a job: stopped, killed and resumed, it ends as if it had not."""

from __future__ import annotations

import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests.e2e import runs

pytestmark = [pytest.mark.engine, pytest.mark.chaos]

SETTINGS = (
    "num_steps=2",
    "domains.0.accuracy=exact_match",
    "data.num_validation=24",
    "cold_start.target_accuracy=0.1",
    "cold_start.batch_size=48",
    "cold_start.steps_per_evaluation=20",
    "cold_start.checkpoint_interval=20",
)


def wait_for_checkpoints(run: Path, count: int, process: subprocess.Popen) -> None:
    deadline = time.monotonic() + runs.TIMEOUT_S
    while len(runs.events(run, "cold_start_checkpoint")) < count:
        assert process.poll() is None, process.stdout.read()
        assert time.monotonic() < deadline, f"no {count} checkpoints of the cold start in {run}"
        time.sleep(0.05)


def test_an_interrupted_cold_start_equals_an_uninterrupted_one(tmp_path):
    command = ("train", runs.RECIPE, f"runs_dir={tmp_path}", *SETTINGS)
    done = runs.command(*command, "name=whole")
    assert done.returncode == 0, done.stdout + done.stderr
    whole = tmp_path / "whole"
    assert len(runs.events(whole, "cold_start_checkpoint")) >= 3
    assert not (whole / "checkpoints/cold_start").exists()

    run = tmp_path / "interrupted"
    process = runs.start(*command, "name=interrupted")
    wait_for_checkpoints(run, 1, process)
    process.send_signal(signal.SIGINT)
    code, output = runs.finish(process)
    assert code == 130, output
    assert "stopped in the cold start" in output
    before = len(runs.events(run, "cold_start_checkpoint"))

    process = runs.start("resume", str(run))
    wait_for_checkpoints(run, before + 1, process)
    runs.kill(runs.role_pid(run, "controller"))
    code, output = runs.finish(process)
    assert code not in (0, 130), output
    assert "resumed in the cold start, after step" in output

    done = runs.command("resume", str(run))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "resumed in the cold start, after step" in done.stdout
    [ended] = runs.events(run, "cold_start_done")
    [wanted] = runs.events(whole, "cold_start_done")
    assert (ended["steps"], ended["accuracy"]) == (wanted["steps"], wanted["accuracy"])
    assert runs.timeless(runs.metrics(run)) == runs.timeless(runs.metrics(whole))
    assert not (run / "checkpoints/cold_start").exists()
