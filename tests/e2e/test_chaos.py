"""Processes killed at random moments, then `resume`: the run is the one without kills."""

import contextlib
import os
import random
import subprocess
import time
from pathlib import Path

import pytest

from tests.e2e import runs

pytestmark = [pytest.mark.engine, pytest.mark.chaos, pytest.mark.timeout(3600)]

NUM_KILLS = int(os.environ.get("CHAOS_KILLS", 20))
SEED = int(os.environ.get("CHAOS_SEED", random.randrange(1000)))
ROLES = ("trainer-0", "trainer-1", "controller", "rollout-0", "worker-0")
STEPS = (
    "num_steps=60",
    "checkpoint.interval=5",
    "rollout.max_restarts=0",
    "trainer.max_restarts=0",
)


def last_checkpoint(run: Path) -> int:
    names = [
        p.parent.name
        for p in (run / "checkpoints").glob("step_*/complete.json")
        if p.parent.name[5:].isdigit()
    ]
    return max((int(name[5:]) for name in names), default=0)


def test_kill_9_at_random_moments(tmp_path):
    print(f"CHAOS_SEED={SEED}")  # shown when it fails
    chance = random.Random(SEED)
    whole = runs.command("train", runs.RECIPE, f"runs_dir={tmp_path}", "name=whole", *STEPS)
    assert whole.returncode == 0, whole.stdout + whole.stderr
    kills = num_runs = 0
    while kills < NUM_KILLS:  # a run may finish between two of them: then there is another run
        num_runs += 1
        kills += killed_run(
            tmp_path / f"killed-{num_runs}", chance, NUM_KILLS - kills, tmp_path / "whole"
        )
    print(f"{kills} kills in {num_runs} runs")


def wait_for_roles(run: Path, before: int, process: subprocess.Popen) -> None:
    """Until every role of this attempt has been started; so many were before it."""
    deadline = time.monotonic() + runs.TIMEOUT_S
    while len(runs.events(run, "started")) < before + len(ROLES):
        assert process.poll() is None, process.stdout.read()
        assert time.monotonic() < deadline, f"no processes of {run}"
        time.sleep(0.05)


def killed_run(run: Path, chance: random.Random, most: int, whole: Path) -> int:
    """A run that is killed and resumed until it finishes, at most `most` times; the kills."""
    command = ["train", runs.RECIPE, f"runs_dir={run.parent}", f"name={run.name}", *STEPS]
    kills = 0
    while kills < most:
        before = len(runs.events(run, "started"))
        process = runs.start(*command)
        command = ["resume", str(run)]
        wait_for_roles(run, before, process)
        try:  # before it is ready, or while steps run
            process.wait(chance.uniform(0, 26))
            break  # it finished
        except subprocess.TimeoutExpired:
            pass
        steps, saved = runs.metrics(run), last_checkpoint(run)
        role = chance.choice([*ROLES, "supervisor"])
        with contextlib.suppress(ProcessLookupError):  # it has just ended
            runs.kill(process.pid if role == "supervisor" else runs.role_pid(run, role))
        code, output = runs.finish(process)
        assert runs.no_survivors(run), runs.survivors(run)
        if (run / "result.json").exists():
            break  # it had finished
        assert code != 0, output
        assert last_checkpoint(run) >= saved
        assert runs.metrics(run)[: len(steps)] == steps
        kills += 1
    done = runs.command("resume", str(run))
    assert done.returncode == 0, done.stdout + done.stderr
    records = runs.metrics(run)
    assert [r["step"] for r in records] == list(range(60))
    assert runs.timeless(records) == runs.timeless(runs.metrics(whole))
    return kills
