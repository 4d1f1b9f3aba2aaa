"""What a process says of itself, and what that costs."""

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from grpo_megatron import progress
from grpo_megatron.progress import Progress, read_progress


class Clock:
    def __init__(self):
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_a_record_says_phase_step_and_seconds(tmp_path):
    clock = Clock()
    role = Progress(tmp_path / "trainer-1.json", "trainer-1", clock=clock)
    clock.now = 4.0
    role.enter("Train", "step_000012")
    clock.now = 6.5
    role.write()
    found = read_progress(tmp_path / "trainer-1.json")
    assert (found.role, found.pid, found.beat) == ("trainer-1", os.getpid(), 1)
    assert (found.phase, found.detail, found.is_waiting) == ("Train", "step_000012", False)
    assert found.idle_s == 2.5
    assert found.longest_s == {"starting": 4.0}


def test_a_shorter_record_hides_a_longer_one(tmp_path):
    role = Progress(tmp_path / "a.json", "a")
    role.enter("rollout", "x" * 150)
    role.write()
    role.enter("r")
    role.write()
    assert (read_progress(role.path).phase, read_progress(role.path).detail) == ("r", "")


def test_what_cannot_be_read_is_none(tmp_path):
    file = tmp_path / "a.json"
    assert read_progress(file) is None
    for text in ("", "{", "[]", "1", '{"role": "a"}'):
        file.write_text(text)
        assert read_progress(file) is None


def test_a_newer_version_may_say_more(tmp_path):
    role = Progress(tmp_path / "a.json", "a")
    role.write()
    text = role.path.read_text()
    role.path.write_text(text.replace('"role"', '"mood": "good", "role"'))
    assert read_progress(role.path).role == "a"


gaps = st.lists(st.tuples(st.sampled_from(["enter", "advance"]), st.floats(0, 1e4)), max_size=30)


@given(gaps)
def test_the_longest_wait_of_a_phase_counts_once_it_has_ended(events):
    """Every phase is called the same: the longest of all gaps, but for those since the last
    `enter`."""
    clock = Clock()
    role = Progress(Path("/nowhere/a.json"), "a", clock=clock)
    role.enter("train")
    ended, running = 0.0, 0.0
    for kind, seconds in events:
        clock.now += seconds
        running = max(running, seconds)
        if kind == "enter":
            role.enter("train")
            ended, running = max(ended, running), 0.0
        else:
            role.advance()
    found = role.record().longest_s.get("train", 0.0)
    assert abs(found - ended) <= 1e-3 + 1e-9 * clock.now


def test_waiting_is_no_phase_with_a_longest_wait(tmp_path):
    clock = Clock()
    role = Progress(tmp_path / "a.json", "a", clock=clock)
    role.enter("waiting", is_waiting=True)
    clock.now = 1000.0
    role.enter("train")
    assert "waiting" not in role.record().longest_s


def test_a_heartbeat_thread_writes_while_the_main_thread_works(tmp_path):
    role = progress.start_progress(tmp_path / "a.json", "a")
    try:
        with progress.within("train", "step 1"):
            wait_until(lambda: read_progress(role.path) is not None)
            wait_until(lambda: read_progress(role.path).phase == "train")
            first = read_progress(role.path).beat
            wait_until(lambda: read_progress(role.path).beat > first)
        wait_until(lambda: read_progress(role.path).is_waiting)
    finally:
        role.close()
        progress._current = None


def test_a_file_system_that_stalls_delays_no_work(tmp_path):
    """The heartbeat's write never returns; phases begin and end all the same."""
    os.mkfifo(tmp_path / "a.json")  # opening it to write waits for a reader
    role = progress.start_progress(tmp_path / "a.json", "a")
    try:
        for step in range(1000):
            with progress.within("train", f"step {step}"):
                progress.advance()
        assert role.record().beat <= 1
    finally:
        role.close()
        progress._current = None
        reader = os.open(tmp_path / "a.json", os.O_RDONLY | os.O_NONBLOCK)
        role._thread.join(10)
        os.close(reader)
    assert not role._thread.is_alive()


def test_a_step_costs_no_system_call_in_the_thread_that_works(tmp_path):
    """strace would count them; here every function that could make one is refused to the main
    thread, in a step of a hundred phases."""
    code = """
import os, sys, threading
from pathlib import Path
from grpo_megatron import progress

role = progress.start_progress(Path(sys.argv[1]), "a")
main = threading.main_thread()
calls = []
def audit(event, args):
    if threading.current_thread() is main:
        calls.append(event)
sys.addaudithook(audit)
for step in range(100):
    with progress.within("train", f"step {step}"):
        for _ in range(100):
            progress.advance()
found = [event for event in calls if event.startswith(("open", "os.", "socket", "subprocess"))]
print(len(found))
"""
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "a.json")],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.split() == ["0"]


def test_beats_are_seldom_and_small(tmp_path):
    """At most one write a second, of less than a kibibyte, whatever the number of phases: beside a
    step of a second that is less than a thousandth of what one sample of it writes."""
    writes = []

    class Counted(Progress):
        def write(self) -> None:
            super().write()
            writes.append((time.monotonic(), self.path.stat().st_size))

    role = Counted(tmp_path / "a.json", "rollout-0")
    role.start()
    began = time.monotonic()
    while time.monotonic() - began < 3.0:
        role.enter("sampling", "step 12 on rollout-0, from prompt addition-1234 on")
        time.sleep(0.001)
    role.close()
    passed_s = time.monotonic() - began
    assert 1 <= len(writes) <= passed_s + 1
    assert max(size for _, size in writes) < 1024


def test_a_forked_child_does_not_speak_for_its_parent(tmp_path):
    role = progress.start_progress(tmp_path / "a.json", "a")
    try:
        wait_until(lambda: read_progress(role.path) is not None)
        pid = os.fork()
        if pid == 0:  # libraries may start threads of their own in every child
            heartbeats = [one for one in threading.enumerate() if one.name == "heartbeat"]
            os._exit(len(heartbeats))
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    finally:
        role.close()
        progress._current = None


def wait_until(condition) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)
