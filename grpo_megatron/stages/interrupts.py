"""Interrupts of a graph that runs here: they belong to the stage that runs."""

import signal
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any

from grpo_megatron.errors import INTERRUPTED_EXIT_CODE

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class InterruptForwarder:
    """Passes this process's SIGINT and SIGTERM on to the stage as SIGINT, each of them once.

    A stage checkpoints at the first and stops at once at the second. Between two stages the first
    is noted (`pending`), the second is a KeyboardInterrupt as ever. Signals come between any two
    statements, also inside `Popen`: so nothing is raised while a stage starts."""

    def __init__(self) -> None:
        self.pending = False
        self._process: subprocess.Popen[bytes] | None = None

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Handle both signals inside the block, also where a shell started this process with
        SIGINT ignored, as it does with background jobs."""
        before = {}
        for number in _SIGNALS:
            before[number] = signal.signal(number, self._handle)
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def run(self, command: Sequence[str], **settings: Any) -> int:
        """Run a stage in a session of its own until it ends; return its exit code, that of an
        interrupted run also where the stage had no handler yet."""
        process = subprocess.Popen(command, start_new_session=True, **settings)
        self._process = process
        if self.pending:  # it came while the process started
            self.pending = False
            process.send_signal(signal.SIGINT)
        try:
            code = process.wait()
        finally:
            self._process = None
        if code == -signal.SIGINT:
            return INTERRUPTED_EXIT_CODE
        return code

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._process is not None:
            self._process.send_signal(signal.SIGINT)
        elif self.pending:
            raise KeyboardInterrupt
        else:
            self.pending = True
