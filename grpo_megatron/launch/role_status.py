"""What `grpo-megatron status RUN` says of each role of a run, from their heartbeats."""

import socket
import time
from collections.abc import Iterator
from pathlib import Path

from grpo_megatron.launch.look import STOPPED_STATES, process_state
from grpo_megatron.progress import BEAT_S, ProgressRecord, read_progress
from grpo_megatron.rundir import RunDir

_LATE_S = 3 * BEAT_S


def role_lines(run_dir: RunDir) -> Iterator[str]:
    """Yield a line for each role of the newest attempt; none where nothing runs."""
    records = _records(run_dir.root / "progress")
    if not records:
        return
    now = time.time()
    yield f"  {'role':<16} {'state':<22} {'phase':<40} {'s since progress':>16}"
    for record in records:
        phase = f"{record.phase} {record.detail}".strip()
        since = record.idle_s + max(0.0, now - record.written_at)
        yield f"  {record.role:<16} {role_state(record, now):<22} {phase:<40} {since:>16.0f}"


def role_state(record: ProgressRecord, now: float) -> str:
    """In a word or two; of a process of this machine also whether it is there and stopped.

    now: `time.time()`."""
    if record.host == socket.gethostname():
        state = process_state(record.pid)
        if state in STOPPED_STATES:
            return "stopped"
        if state in ("", "Z"):
            return "ended"
    silent_s = now - record.written_at
    if silent_s > _LATE_S:
        return f"no heartbeat for {silent_s:.0f} s"
    if record.trouble:
        return record.trouble
    if record.is_waiting:
        return "waits"
    return "works"


def _records(folder: Path) -> list[ProgressRecord]:
    found = []
    for file in sorted(folder.glob("*/*.json")):
        record = read_progress(file)
        if record is not None:
            found.append(record)
    return found
