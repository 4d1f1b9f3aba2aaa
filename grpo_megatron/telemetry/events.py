"""events.jsonl: starts, deaths, checkpoints and publishes, written by several processes."""

import contextlib
import json
import os
import time
from pathlib import Path
from typing import Any

SETTINGS_TAKEN = "settings_taken"
"""Event: a run goes on after the step `step` with its configuration, which its checkpoint fits."""


def append_event(path: Path, kind: str, /, *, time_s: float | None = None, **fields: Any) -> None:
    """Append `{"time_s", "kind", ...fields}` as one line, by one `O_APPEND` write: several
    processes may do so at once. What JSON does not know is written as text."""
    if time_s is None:
        time_s = time.time()
    event = {"time_s": round(time_s, 3), "kind": kind, **fields}
    line = json.dumps(event, default=str).encode() + b"\n"
    with path.open("ab+", buffering=0) as file:
        size = file.tell()
        if size and os.pread(file.fileno(), 1, size - 1) != b"\n":  # torn by a crash: do not join
            line = b"\n" + line
        file.write(line)


def read_events(path: Path) -> list[dict[str, Any]]:
    """Return every event in file order; lines torn by a crash, and what is no event, are left out;
    [] without a file."""
    return [event for event in _lines(path) if event is not None]


def num_damaged_events(path: Path) -> int:
    """Count the lines that `read_events` leaves out; 0 without a file."""
    return _lines(path).count(None)


def _lines(path: Path) -> list[dict[str, Any] | None]:
    """Return the event of every line, None for a damaged one."""
    if not path.exists():
        return []
    events: list[dict[str, Any] | None] = []
    for line in path.read_bytes().splitlines():
        event = None
        with contextlib.suppress(ValueError, RecursionError):
            event = json.loads(line)
        if not isinstance(event, dict) or "kind" not in event:
            event = None
        events.append(event)
    return events
