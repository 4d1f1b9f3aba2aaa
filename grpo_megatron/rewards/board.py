"""Shared memory in which a worker notes every result, so that a killed worker loses none.

A message per result would wake the parent each time; a message per chunk would lose the results
before a call that hangs. Here the parent looks only when a chunk is done or late.
"""

from __future__ import annotations

import mmap
import os
import tempfile
import time

CAPACITY = 256
"""Most calls of one chunk."""

PENDING, SCORED, RAISED, TIMED_OUT, DIED = range(5)
"""Status of a call. The parent writes the last, and the one before for whom it had to kill."""

NOT_STARTED, FINISHED = -1, -2
"""Instead of the index of the running call."""

_SIZE = 16 + 9 * CAPACITY


class Board:
    """Index and start time of the running call; value and status of every call of a chunk.

    Attributes:
        values: float64 [CAPACITY]
        statuses: uint8 [CAPACITY]
    """

    values: memoryview[float]
    statuses: memoryview[int]

    def __init__(self, file_descriptor: int):
        view = memoryview(mmap.mmap(file_descriptor, _SIZE))
        self._index, self._started = view[0:8].cast("q"), view[8:16].cast("d")
        self.values = view[16:16 + 8 * CAPACITY].cast("d")
        self.statuses = view[16 + 8 * CAPACITY:]

    @classmethod
    def create(cls) -> tuple[Board, int]:
        """A new board and the file descriptor to hand to the worker (close it afterwards)."""
        with tempfile.TemporaryFile() as file:
            file.truncate(_SIZE)
            file_descriptor = os.dup(file.fileno())
        return cls(file_descriptor), file_descriptor

    def reset(self) -> None:
        """Before a chunk is sent."""
        self.statuses[:] = bytes(CAPACITY)
        self.begin(NOT_STARTED)

    def begin(self, index: int) -> None:
        """Call `index` starts now. The time is written first: a reader must never see the new
        index with the old call's time."""
        self._started[0] = time.monotonic()
        self._index[0] = index

    def touch(self) -> None:
        """Whatever runs gets its whole time from now on."""
        self._started[0] = time.monotonic()

    def record(self, index: int, status: int, value: float) -> None:
        """Call `index` ended."""
        self.values[index] = value
        self.statuses[index] = status

    def running(self) -> tuple[int, float]:
        """Index of the running call (or NOT_STARTED, FINISHED) and seconds since it began."""
        index = self._index[0]
        return index, time.monotonic() - self._started[0]
