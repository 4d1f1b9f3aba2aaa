"""events.jsonl: starts, deaths, checkpoints and publishes, written by several processes."""

import contextlib
import json
import os
import time
from pathlib import Path
from typing import Any


def append_event(path: Path, kind: str, /, *, time_s: float | None = None,
                 **fields: Any) -> None:
    """Append `{"time_s", "kind", ...fields}` as one line.

    Safe from several processes at once: one `O_APPEND` write a line. Fields that JSON does not
    know are written as text.

    Args:
        path: `RunDir.events`.
        kind: For example "started", "died", "checkpoint", "published".
        time_s: Unix time; now by default.
        fields: What happened.
    """
    event = {"time_s": round(time.time() if time_s is None else time_s, 3), "kind": kind, **fields}
    line = json.dumps(event, default=str).encode() + b"\n"
    file = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        if _torn(file):  # by a machine that went down: do not join its line
            line = b"\n" + line
        os.write(file, line)
    finally:
        os.close(file)


def read_events(path: Path) -> list[dict[str, Any]]:
    """Every event in file order; lines torn by a crash are left out; [] without a file."""
    events = []
    for line in path.read_bytes().splitlines() if path.exists() else ():
        with contextlib.suppress(ValueError):
            events.append(json.loads(line))
    return events


def _torn(file: int) -> bool:
    size = os.fstat(file).st_size
    return size > 0 and os.pread(file, 1, size - 1) != b"\n"
