"""Rollout servers are killed and come back: the run is the one without kills."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.e2e import runs
from tests.e2e.test_hangs import wait_for, wait_for_phase

pytestmark = [pytest.mark.engine, pytest.mark.chaos, pytest.mark.timeout(3600)]

ENDLESS = ("num_steps=100000", "checkpoint.interval=0")


def start(tmp_path: Path, name: str, *settings: str):
    command = ["train", runs.RECIPE, f"runs_dir={tmp_path}", f"name={name}", *ENDLESS]
    process = runs.start(*command, *settings)
    runs.wait_for_steps(tmp_path / name, 2, process)
    return tmp_path / name, process


def stop(process) -> str:
    process.send_signal(signal.SIGTERM)
    code, output = runs.finish(process)
    assert code == 130, output
    return output


def reference(tmp_path: Path, steps: int, *settings: str) -> list[dict]:
    """Metrics of a run without kills, of at least so many steps."""
    run, process = start(tmp_path, "whole", *settings)
    runs.wait_for_steps(run, steps, process)
    stop(process)
    return runs.timeless(runs.metrics(run))


def pid_of(run: Path, role: str) -> int:
    """Of the process that has the role now."""
    events = runs.events(run, "started") + runs.events(run, "restarted")
    return [event["pid"] for event in events if event["role"] == role][-1]


def kill_in(run: Path, phase: str, role: str) -> None:
    pid = pid_of(run, role)
    wait_for_phase(run, phase)
    runs.kill(pid)


def more_steps(run: Path, count: int, process) -> None:
    runs.wait_for_steps(run, len(runs.metrics(run)) + count, process)


def test_one_of_two_replicas_comes_back_whenever_it_is_killed(tmp_path):
    run, process = start(tmp_path, "killed", "rollout.num_replicas=2")
    kills = [("rollout-1", "rollout"), ("rollout-0", "train"), ("rollout-1", "publish")]
    for place, (role, phase) in enumerate(kills):
        steps = len(runs.metrics(run))
        kill_in(run, phase, role)
        number = [killed for killed, _ in kills[: place + 1]].count(role)
        joined = wait_for(run, "joined", role, number, process)
        assert joined["version"] > steps  # the other went on meanwhile
        more_steps(run, 3, process)
    runs.kill(pid_of(run, "worker-0"))
    wait_for(run, "joined", "worker-0", 1, process)
    more_steps(run, 3, process)
    output = stop(process)
    assert "rollout-1 has joined with weight version" in output
    assert runs.no_survivors(run), runs.survivors(run)
    assert [event["role"] for event in runs.events(run, "hung")] == []
    records = runs.timeless(runs.metrics(run))
    whole = reference(tmp_path, len(records), "rollout.num_replicas=2")
    assert records == whole[: len(records)]


def test_the_only_replica_comes_back_until_the_limit(tmp_path):
    run, process = start(tmp_path, "killed", "rollout.max_restarts=2")
    kill_in(run, "rollout", "rollout-0")
    wait_for(run, "joined", "rollout-0", 1, process)
    more_steps(run, 3, process)
    kill_in(run, "train", "rollout-0")
    wait_for(run, "restarted", "rollout-0", 2, process)
    runs.kill(pid_of(run, "rollout-0"))  # in its start
    code, output = runs.finish(process)
    assert code == 5, output
    assert "no rollout server is left, the run waits for it" in output
    assert output.count("error: ") == 1
    assert "the last rollout server died after 2 restarts (rollout.max_restarts)" in output
    assert runs.no_survivors(run), runs.survivors(run)
    records = runs.timeless(runs.metrics(run))
    whole = reference(tmp_path, len(records))
    assert records == whole[: len(records)]
