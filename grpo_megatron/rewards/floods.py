"""What a process of rewards or environments may print before it fills the disk."""

import asyncio
import contextlib
import os
from dataclasses import dataclass
from pathlib import Path

MOST_AT_ONCE = 1 << 26
"""Bytes that a process and what it has started may print at once."""
MOST_A_SECOND = 1 << 20
"""Bytes a second that they may print in the long run."""
_KEPT = 1 << 20
_LOOK_S = 0.5


@dataclass(frozen=True, slots=True)
class Flood:
    """What a process has printed when it was too much.

    Attributes:
        log_path: Where it went.
        num_bytes: What was printed, beyond `MOST_A_SECOND`, when it was noticed.
        size_before: Bytes of the log before it."""

    log_path: Path
    num_bytes: float
    size_before: int

    def cut(self, who: str) -> None:
        """Leave a MiB of it in the log, and say there who printed it. The process must have ended:
        it would go on behind a hole. OSError where the log cannot be written."""
        os.truncate(self.log_path, self.size_before + _KEPT)
        with self.log_path.open("a") as log:
            log.write(f"\n{who} printed without end and was killed; the rest is left out\n")


async def wait_for_flood(pid: int, log_path: Path) -> Flood:
    """Return when process `pid`, with what it has started, has printed more than `MOST_AT_ONCE`
    into the file `log_path`, into which others print, too. Never returns where it does not."""
    size_before = log_path.stat().st_size
    level = 0.0
    size = size_before
    written = _bytes_written(pid)
    while True:
        await asyncio.sleep(_LOOK_S)
        earlier_size = size
        earlier_written = written
        size = log_path.stat().st_size
        written = _bytes_written(pid)
        # others print into the log, and this process may write files: of both the smaller
        printed = min(size - earlier_size, written - earlier_written)
        level = max(0.0, level + printed - MOST_A_SECOND * _LOOK_S)
        if level == 0:
            size_before = size
        if level > MOST_AT_ONCE:
            return Flood(log_path, level, size_before)


def _bytes_written(pid: int) -> int:
    """Return what a process and what it has started have written in all, those that have ended
    included where they were waited for."""
    written = 0
    for process in _with_descendants(pid):
        with contextlib.suppress(OSError, ValueError, IndexError):  # it has gone
            words = Path(f"/proc/{process}/io").read_text().split("wchar:")[1]
            written += int(words.split()[0])
    return written


def _with_descendants(pid: int) -> list[int]:
    """Return a process and all that it has started, directly or not, and that still run."""
    found = [pid]
    for process in found:  # it grows
        for children in Path(f"/proc/{process}/task").glob("*/children"):
            with contextlib.suppress(OSError):
                found += map(int, children.read_text().split())
    return found
