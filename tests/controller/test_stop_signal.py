"""What ends a controller: a line or a signal of its supervisor, and the supervisor's death."""

from __future__ import annotations

import subprocess
import sys

import pytest

from grpo_megatron.errors import INTERRUPTED_EXIT_CODE
from tests.launch.test_processes import gone

# a loop that waits, as for an engine that only a supervisor can start again
LOOP = """
import asyncio, sys
from grpo_megatron.controller.main import StopSignal

async def wait_in_vain(stop):
    stopping = asyncio.Event()
    stop.listen_for(stopping)
    print("ready", flush=True)
    await stopping.wait()
    print("heard", flush=True)
    await asyncio.sleep(600)

asyncio.run(wait_in_vain(StopSignal(grace_s=1.0)))
"""

# starts the loop as the supervisor does, prints its pid once it is ready, and waits
SUPERVISOR = """
import sys, time
from pathlib import Path
from grpo_megatron.launch.processes import ChildProcess

child = ChildProcess("c", [sys.executable, "-c", sys.argv[1]], Path(sys.argv[2]), piped=True)
child.start()
child.started.stdout.readline()
print(child.started.pid, flush=True)
time.sleep(600)
"""


def started(stdin: int) -> subprocess.Popen:
    process = subprocess.Popen(
        [sys.executable, "-c", LOOP],
        stdin=stdin,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout.readline() == "ready\n"
    return process


@pytest.mark.parametrize("told_before", [False, True])
def test_a_controller_ends_soon_after_its_supervisor(told_before):
    process = started(subprocess.PIPE)
    if told_before:
        process.stdin.write("stop\n")
        process.stdin.flush()
        assert process.stdout.readline() == "heard\n"
    process.stdin.close()
    process.stdin = None  # `communicate` would write to it
    _, said = process.communicate(timeout=600)
    assert process.returncode == INTERRUPTED_EXIT_CODE
    assert "the supervisor has died" in said


def test_a_line_alone_does_not_end_it():
    process = started(subprocess.PIPE)
    process.stdin.write("stop\n")
    process.stdin.flush()
    assert process.stdout.readline() == "heard\n"
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(timeout=3.0)  # thrice the grace
    process.kill()
    process.communicate()


def test_one_that_never_had_a_supervisor_goes_on():
    process = started(subprocess.DEVNULL)
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(timeout=3.0)
    process.kill()
    process.communicate()


def test_a_supervisor_that_is_killed_leaves_no_controller(tmp_path):
    """The controller gets a signal as well, after which a loop that trains would end its step."""
    log = tmp_path / "log"
    command = [sys.executable, "-c", SUPERVISOR, LOOP, str(log)]
    supervisor = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    pid = int(supervisor.stdout.readline())
    supervisor.kill()
    supervisor.communicate()
    assert gone(pid)
    assert "the supervisor has died" in log.read_text()
