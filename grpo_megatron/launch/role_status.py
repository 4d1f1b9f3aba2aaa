"""What `grpo-megatron status RUN` says of each role of a run, from their heartbeats.

How old a heartbeat of this node is, is told by the time since the node started, which nobody sets.
The clock of another node may differ from this one's, or jump: a heartbeat that seems late is looked
at again, and a role that has written another one meanwhile is not late."""

import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from grpo_megatron.launch.look import STOPPED_STATES, process_state
from grpo_megatron.progress import BEAT_S, ProgressRecord, read_progress, this_boot, up_seconds
from grpo_megatron.rundir import RunDir

_LATE_S = 3 * BEAT_S
_NEXT_BEAT_S = BEAT_S + 1.0


def role_lines(run_dir: RunDir, pause: Callable[[float], None] = time.sleep) -> Iterator[str]:
    """Yield a line for each role of the newest attempt; none where nothing runs.

    pause: waits for the next heartbeats of other nodes, where that is needed."""
    folder = run_dir.root / "progress"
    records = _records(folder)
    if not records:
        return
    ages_s = {record.role: _age_s(record) for record in records}
    doubtful = [record for record in records if _is_doubtful(record, ages_s[record.role])]
    if doubtful:
        pause(_NEXT_BEAT_S)
        records = _records(folder)
        ages_s |= _ages_seen(doubtful, records)
    yield f"  {'role':<16} {'state':<22} {'phase':<40} {'s since progress':>16}"
    for record in records:
        age_s = ages_s.get(record.role, 0.0)
        phase = f"{record.phase} {record.detail}".strip()
        since = record.idle_s + age_s
        yield f"  {record.role:<16} {role_state(record, age_s):<22} {phase:<40} {since:>16.0f}"


def role_state(record: ProgressRecord, age_s: float) -> str:
    """Say in a word or two how a role is; for a process of this machine also whether it is there
    and stopped.

    age_s: seconds since the record was written."""
    if record.host == socket.gethostname():
        state = process_state(record.pid)
        if state in STOPPED_STATES:
            return "stopped"
        if state in ("", "Z"):
            return "ended"
    if age_s > _LATE_S:
        return f"no heartbeat for {age_s:.0f} s"
    if record.trouble:
        return record.trouble
    if record.is_waiting:
        return "waits"
    return "works"


def _is_of_this_boot(record: ProgressRecord) -> bool:
    return record.boot != "" and record.boot == this_boot()


def _age_s(record: ProgressRecord) -> float:
    """Return seconds since a record was written; below 0: the clock of its node is ahead of this
    one's."""
    if _is_of_this_boot(record):
        return up_seconds() - record.up_s
    return time.time() - record.written_at


def _is_doubtful(record: ProgressRecord, age_s: float) -> bool:
    """Whether the age may be that of a clock."""
    return not _is_of_this_boot(record) and not 0.0 <= age_s <= _LATE_S


def _ages_seen(before: list[ProgressRecord], now: list[ProgressRecord]) -> dict[str, float]:
    """Ages by role, after a pause, of roles that have written meanwhile; of the others what their
    clocks say, and no less than the pause."""
    beats = {record.role: (record.host, record.pid, record.beat) for record in before}
    ages_s = {}
    for record in now:
        if record.role not in beats:
            continue
        ages_s[record.role] = 0.0
        if beats[record.role] == (record.host, record.pid, record.beat):
            ages_s[record.role] = max(_age_s(record), _NEXT_BEAT_S)
    return ages_s


def _records(folder: Path) -> list[ProgressRecord]:
    found = []
    for file in sorted(folder.glob("*/*.json")):
        record = read_progress(file)
        if record is not None:
            found.append(record)
    return found
