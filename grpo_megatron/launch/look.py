"""A look at a process that says nothing: `python -m grpo_megatron.launch.look PID [LOG PROBE]`.

Its state and threads from /proc; its stack from py-spy where that is installed, else from the
process itself, which STACK_SIGNAL has write it to its log. In a job this runs on the node of the
process."""

import contextlib
import json
import os
import shutil
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from grpo_megatron.progress import STACK_SIGNAL

PY_SPY_S = 10.0
_DUMP_S = 3.0
_LONGEST_STACK = 20000
_SLOW_WRITE_S = 10.0
STOPPED_STATES = ("T", "t")
"""Stopped by a signal; by a debugger."""


@dataclass(frozen=True, slots=True)
class Look:
    """What can be seen of a process from outside."""

    state: str = ""
    """Of its main thread, as /proc has it: R, S, D, T, Z; empty: there is no such process."""
    num_in_device: int = 0
    """Threads that wait for a device or a file system (D)."""
    stack: str = ""
    """Of its threads, the main thread first, as py-spy or Python write it; empty: not known."""
    write_s: float = 0.0
    """Seconds that writing a file beside its own took."""

    @property
    def is_stopped(self) -> bool:
        """Whether a signal or a debugger has stopped it."""
        return self.state in STOPPED_STATES

    @property
    def is_held_by_files(self) -> bool:
        """Whether it seems to wait for the file system: its heartbeat is inside of a write, a
        thread waits for a device, or others write slowly too."""
        if self.is_stopped:
            return False
        is_writing = (
            ("progress.py" in self.stack and "in write" in self.stack)  # as Python writes it
            or "write (grpo_megatron/progress.py" in self.stack  # as py-spy does
        )
        return is_writing or self.num_in_device > 0 or self.write_s > _SLOW_WRITE_S


def process_state(pid: int) -> str:
    """Return the state of a process as /proc has it; empty: there is none."""
    return _state_in(Path(f"/proc/{pid}/stat"))


def _state_in(file: Path) -> str:
    try:
        return file.read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return ""


def look_at(
    pid: int, *, log: Path | None = None, dumps_stacks: bool = False, probe: Path | None = None
) -> Look:
    """Look at a process of this machine; takes up to about fifteen seconds.

    log: where it writes its stack, if `dumps_stacks`. probe: a file to write beside its own."""
    state = process_state(pid)
    in_device = 0
    for file in Path(f"/proc/{pid}/task").glob("*/stat"):
        if _state_in(file) == "D":
            in_device += 1
    stack = ""
    if state and state != "Z":
        stack = _stack_by_py_spy(pid, is_stopped=state in STOPPED_STATES)
        if not stack and dumps_stacks and log is not None and state not in STOPPED_STATES:
            stack = _stack_by_signal(pid, log)
    write_s = 0.0
    if probe is not None:
        began = time.monotonic()
        with contextlib.suppress(OSError):
            probe.write_text("a write takes how long?\n")
            probe.unlink()
        write_s = time.monotonic() - began
    return Look(state, in_device, stack[-_LONGEST_STACK:], write_s)


def _stack_by_py_spy(pid: int, *, is_stopped: bool) -> str:
    """Empty without py-spy, or where it may not look at the process."""
    program = shutil.which("py-spy")
    if program is None:
        return ""
    argv = [program, "dump", "--pid", str(pid)]
    if is_stopped:  # it cannot be paused once more
        argv.append("--nonblocking")
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        done = subprocess.run(argv, capture_output=True, text=True, timeout=PY_SPY_S, check=False)
        if done.returncode == 0:  # without the command line, which may be long
            return done.stdout[max(done.stdout.find("\nThread "), 0) :].strip()
    return ""


def catches_signal(pid: int, number: int) -> bool:
    """Whether a process has a handler for a signal: without one it may be killed by it. What a
    process said of itself is not enough, since `exec` takes its handlers away."""
    with contextlib.suppress(OSError, ValueError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("SigCgt:"):
                return bool(int(line.split()[1], 16) >> (number - 1) & 1)
    return False


def _stack_by_signal(pid: int, log: Path) -> str:
    """Have the process write its stacks to its log, and read them there; empty: it did not."""
    if not catches_signal(pid, STACK_SIGNAL):
        return ""
    try:
        size = log.stat().st_size
        os.kill(pid, STACK_SIGNAL)
    except OSError:
        return ""
    deadline = time.monotonic() + _DUMP_S
    written = b""
    while time.monotonic() < deadline:
        time.sleep(0.2)
        with contextlib.suppress(OSError), log.open("rb") as file:
            file.seek(size)
            before = written
            written = file.read()
            if written and written == before:
                break
    text = written.decode(errors="replace")
    start = text.find("hread 0x")  # "Thread 0x…" or "Current thread 0x…"
    if start < 0:
        return ""
    threads = text[text.rfind("\n", 0, start) + 1 :].strip().split("\n\n")
    return "\n\n".join(reversed(threads))


def main(pid: str, log: str = "", probe: str = "") -> None:
    """Print what is seen of process `pid`, as JSON in one line."""
    found = look_at(
        int(pid),
        log=Path(log) if log else None,
        dumps_stacks=bool(log),
        probe=Path(probe) if probe else None,
    )
    print(json.dumps(asdict(found)), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
