"""Faults of a random kind, in a random process, at a random moment of a run."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import time
from collections import Counter
from pathlib import Path

import psutil

from tests.e2e import runs

NUM_KILLS = int(os.environ.get("CHAOS_KILLS", 50))
"""Of all tests with random moments together."""
SEED = int(os.environ.get("CHAOS_SEED", random.randrange(1000)))
LONGEST_PAUSE_S = 26.0
"""Between two faults, for one in a start, which takes about 15 s."""
LONGEST_SHORT_PAUSE_S = 4.0
"""Between two faults, for one close behind the other, and from a step to the fault that waited for
it; steps take less than a second."""
LONGEST_STOP_S = 5.0
"""Of a supervisor, which nobody watches: who stopped it lets it go on."""


def share_of_kills(share: float) -> int:
    """The part of all faults that one test has, at least one."""
    return max(1, round(share * NUM_KILLS))


def timeout_of(num_kills: int) -> float:
    """Seconds that a test with so many faults may take, on a machine that does other work too."""
    return 1800 + 120 * num_kills


class RandomFaults:
    """Kills and stops processes of runs, `left` times.

    Attributes:
        done: How often what was done, by signal and role."""

    def __init__(self, count: int):
        print(f"CHAOS_SEED={SEED}")  # shown when a test fails
        self.left = count
        self.done: Counter[str] = Counter()
        self._chance = random.Random(SEED)
        self._stopped: list[psutil.Process] = []

    def follow(self, run: Path, supervisor: subprocess.Popen) -> int:
        """Let faults happen to a run until it ends, or until none is left, then wait for its end,
        and let what is stopped go on: the kernel kills all roles of a supervisor that has died but
        the controller, which it tells to end.

        Returns its exit code."""
        code = self._follow(run, supervisor)
        for process in self._stopped:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.resume()
        self._stopped = []
        return code

    def _follow(self, run: Path, supervisor: subprocess.Popen) -> int:
        while self.left:
            moment = self._chance.choice(["any", "soon", "after a step"])
            longest_s = LONGEST_SHORT_PAUSE_S
            if moment == "any":
                longest_s = LONGEST_PAUSE_S
            if moment == "after a step":
                _wait_for_a_step(run, supervisor)
            try:
                return supervisor.wait(self._chance.uniform(0, longest_s))
            except subprocess.TimeoutExpired:
                self._do_something(run, supervisor)
        return supervisor.wait(runs.TIMEOUT_S)

    def _do_something(self, run: Path, supervisor: subprocess.Popen) -> None:
        pids = {"supervisor": supervisor.pid, **_roles_of(run, supervisor)}
        role = self._chance.choice(sorted(pids))
        number = self._chance.choice([signal.SIGKILL, signal.SIGSTOP])
        try:
            process = psutil.Process(pids[role])
            process.send_signal(number)
        except psutil.NoSuchProcess:  # it has just ended
            return
        self.left -= 1
        self.done[f"{number.name} {role}"] += 1
        if number == signal.SIGSTOP:
            self._stopped.append(process)
        if role == "supervisor" and number == signal.SIGSTOP:
            time.sleep(self._chance.uniform(0, LONGEST_STOP_S))
            process.resume()


def _wait_for_a_step(run: Path, supervisor: subprocess.Popen) -> None:
    """Until a step more is trained than before, or the run has ended."""
    deadline = time.monotonic() + runs.TIMEOUT_S
    num_steps = len(runs.metrics(run))
    while supervisor.poll() is None:
        before, num_steps = num_steps, len(runs.metrics(run))
        if num_steps > before:  # there are fewer where training begins again at a checkpoint
            return
        assert time.monotonic() < deadline, f"no step, and no end, of {run}"
        time.sleep(0.05)


def _roles_of(run: Path, supervisor: subprocess.Popen) -> dict[str, int]:
    """Process of each role that the supervisor has now, and of engine cores below servers."""
    children = {child.pid: child for child in psutil.Process(supervisor.pid).children()}
    pids = {}
    for event in runs.events(run, "started") + runs.events(run, "restarted"):
        role, pid = event["role"], event["pid"]
        if pid not in children:
            continue
        pids[role] = pid
        if role.startswith("rollout-"):
            pids |= _engine_core_of(role, children[pid])
    return pids


def _engine_core_of(role: str, server: psutil.Process) -> dict[str, int]:
    """None, where it has not started or its server has just ended."""
    with contextlib.suppress(psutil.NoSuchProcess):
        for child in server.children():
            if child.name().startswith("VLLM::EngineCor"):
                return {f"core of {role}": child.pid}
    return {}
