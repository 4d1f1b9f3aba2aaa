"""A file in which a worker notes every result, so that a killed worker loses none.

A message per result would wake the parent each time; a message per chunk would lose the results
before a call that hangs. Here the parent reads only when a chunk is done or late.
"""

from __future__ import annotations

import json
import math
import os
import struct
import time
from collections.abc import Sequence
from tempfile import TemporaryFile
from typing import NamedTuple

NOT_STARTED, FINISHED = -1, -2
"""Instead of the index of the running call."""

_RUNNING = struct.Struct("<qd")  # first in the file: index of the running call, when it began


class Outcome(NamedTuple):
    """How one call ended."""

    failure: str = ""  # "raised", "timed_out" or "died"; the parent writes the last
    value: float = math.nan
    steps: Sequence[tuple[int, float]] = ()  # step rewards: (end in the text, reward) each
    trace: str = ""  # of what it raised


class Journal:
    """The running call, and the outcomes of a chunk as JSON lines behind it.

    Args:
        inherited: Descriptor of the parent's journal; None: a new file without a name.
    """

    def __init__(self, inherited: int | None = None):
        self._file = os.fdopen(inherited, "r+b") if inherited else TemporaryFile()  # noqa: SIM115
        self.file_descriptor = self._file.fileno()
        if inherited is None:
            self.clear()

    def clear(self) -> None:
        """Before a chunk is sent."""
        os.ftruncate(self.file_descriptor, 0)
        os.lseek(self.file_descriptor, _RUNNING.size, os.SEEK_SET)
        self.begin(NOT_STARTED)

    def begin(self, index: int) -> None:
        """Call `index` starts now."""
        os.pwrite(self.file_descriptor, _RUNNING.pack(index, time.monotonic()), 0)

    def running(self) -> tuple[int, float]:
        """Index of the running call (or NOT_STARTED, FINISHED) and seconds since it began."""
        index, began = _RUNNING.unpack(os.pread(self.file_descriptor, _RUNNING.size, 0))
        return index, time.monotonic() - began

    def touch(self) -> None:
        """Whatever runs gets its whole time from now on."""
        self.begin(self.running()[0])

    def note(self, index: int, outcome: Outcome) -> None:
        """Call `index` ended."""
        os.write(self.file_descriptor, json.dumps((index, outcome)).encode() + b"\n")

    def outcomes(self) -> dict[int, Outcome]:
        """By index; of a call that was noted twice, the first."""
        size = os.fstat(self.file_descriptor).st_size - _RUNNING.size
        lines = os.pread(self.file_descriptor, size, _RUNNING.size).splitlines()
        return {index: Outcome(*outcome) for index, outcome in map(json.loads, reversed(lines))}
