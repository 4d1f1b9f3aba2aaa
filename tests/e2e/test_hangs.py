"""Processes of a tiny run are stopped in its phases: who hangs is named, and what follows.

Two runs share their engines' starts over all roles: one in which everything goes on again, and one
that loses a server, a worker and a reward host and is ended by a trainer rank."""

import os
import signal
import time
from pathlib import Path

import pytest

from tests.e2e import runs

pytestmark = [pytest.mark.engine, pytest.mark.chaos, pytest.mark.timeout(3600)]

ROLES = ("watch.silent_s=15", "rollout.num_replicas=2", "data.reward_hosts=2")
PATIENT = ("watch.replace_after_s=0", "watch.kill_after_s=0")
STRICT = (
    "watch.replace_after_s=1",
    "watch.kill_after_s=1",
    "rollout.max_restarts=0",
    "trainer.max_restarts=0",
)


def start(tmp_path: Path, name: str, *settings: str):
    """A run that has done two steps."""
    command = ["train", runs.RECIPE, f"runs_dir={tmp_path}", f"name={name}", "num_steps=100000"]
    process = runs.start(*command, "checkpoint.interval=0", *ROLES, *settings)
    run = tmp_path / name
    runs.wait_for_steps(run, 2, process)
    return run, process


def wait_for(run: Path, kind: str, role: str, count: int, process) -> dict:
    """The event number `count` of a kind and role, from 1."""
    began = time.monotonic()
    while True:
        found = [event for event in runs.events(run, kind) if event["role"] == role]
        if len(found) >= count:
            return found[count - 1]
        assert process.poll() is None, process.stdout.read()
        assert time.monotonic() - began < runs.TIMEOUT_S, f"no {kind} of {role}"
        time.sleep(0.1)


def wait_for_phase(run: Path, phase: str) -> None:
    """The controller's, by its last heartbeat: a phase of a step this short may be over by now."""
    from grpo_megatron.progress import read_progress

    file = run / "progress" / "1" / "controller.json"
    deadline = time.monotonic() + runs.TIMEOUT_S
    while time.monotonic() < deadline:
        record = read_progress(file)
        if record is not None and record.phase == phase:
            return
        time.sleep(0.01)
    raise AssertionError(f"never in phase {phase}")


def engine_core(pid: int) -> int:
    """The process below a server that computes."""
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in task.read_text().split():
            if "EngineCor" in Path(f"/proc/{child}/comm").read_text():
                return int(child)
    raise AssertionError(f"no engine core below {pid}")


def test_every_role_is_named_in_any_phase_and_goes_on(tmp_path):
    run, process = start(tmp_path, "patient", *PATIENT)
    try:
        cases = [
            ("trainer-1", "rollout"),
            ("trainer-0", "train"),
            ("controller", "publish"),
            ("rollout-0", "rollout"),
            ("rollout-1", "publish"),
            ("worker-0", "train"),
            ("reward-host-1", "reward"),
        ]
        for role, phase in cases:
            pid = runs.role_pid(run, role)
            wait_for_phase(run, phase)
            os.kill(pid, signal.SIGSTOP)
            hung = wait_for(run, "hung", role, 1, process)
            assert hung["cause"] == "stopped", hung
            assert hung["seconds"] < 60
            status = runs.command("status", str(run)).stdout
            [line] = [line for line in status.splitlines() if line.startswith(f"  {role} ")]
            assert "stopped" in line
            os.kill(pid, signal.SIGCONT)
            wait_for(run, "recovered", role, 1, process)
            runs.wait_for_steps(run, len(runs.metrics(run)) + 2, process)
        core = engine_core(runs.role_pid(run, "rollout-1"))
        os.kill(core, signal.SIGSTOP)
        hung = wait_for(run, "hung", "rollout-1", 2, process)
        assert hung["cause"] == "trouble"
        os.kill(core, signal.SIGCONT)
        wait_for(run, "recovered", "rollout-1", 2, process)
        runs.wait_for_steps(run, len(runs.metrics(run)) + 2, process)
        # nobody else was named for having to wait
        named = [event["role"] for event in runs.events(run, "hung")]
        assert named == [role for role, _ in cases] + ["rollout-1"]
        assert runs.events(run, "died") == []
    finally:
        process.send_signal(signal.SIGTERM)
        code, output = runs.finish(process)
    assert code == 130, output
    assert f"{core}) is stopped" in output
    assert runs.no_survivors(run), runs.survivors(run)
    assert not (run / "progress" / "1").exists()


def test_what_hangs_is_replaced_by_others_and_a_trainer_rank_ends_the_run(tmp_path):
    run, process = start(tmp_path, "strict", *STRICT)
    for role in ("rollout-0", "worker-1", "reward-host-0"):
        os.kill(runs.role_pid(run, role), signal.SIGSTOP)
        assert wait_for(run, "hung", role, 1, process)["cause"] == "stopped"
        assert wait_for(run, "died", role, 1, process)["exit_code"] == 137
        runs.wait_for_steps(run, len(runs.metrics(run)) + 2, process)
    wait_for_phase(run, "train")
    os.kill(runs.role_pid(run, "trainer-1"), signal.SIGSTOP)
    code, output = runs.finish(process)
    assert code == 6, output
    assert "trainer-1, in " in output and "it is stopped" in output and "resume" in output
    assert [event["role"] for event in runs.events(run, "hung")][-1] == "trainer-1"
    assert runs.no_survivors(run), runs.survivors(run)
    # it can be resumed, here with a controller that hangs before there are steps
    again = runs.start("resume", str(run))
    count = len(runs.metrics(run))
    runs.wait_for_steps(run, count + 1, again)
    os.kill(runs.role_pid(run, "controller"), signal.SIGSTOP)
    code, output = runs.finish(again)
    assert code == 1, output
    assert "controller, in " in output and "it is stopped" in output
    assert runs.no_survivors(run), runs.survivors(run)
