"""What processes of rewards and environments print, on its way into a log.

It comes through a pipe, which is read only so far: a process that prints without end waits, and is
killed, before it has filled the disk, however busy the machine is."""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from io import FileIO
from pathlib import Path
from typing import BinaryIO

MOST_AT_ONCE = 1 << 26
"""Bytes that a process and what it has started may print at once."""
MOST_A_SECOND = 1 << 20
"""Bytes a second that they may print in the long run."""
_KEPT_AT_ONCE = 1 << 21
_BLOCK = 1 << 16
_REST_S = 1.0


def open_log(path: Path) -> FileIO:
    """Open a log for what a process will print, before it is started: where that fails, there is no
    process yet that somebody would have to end. OSError where it fails."""
    return path.open("ab", buffering=0)


class Printing:
    """Appends what one process prints to a log, which others append to as well, until its output
    closes.

    Of what it prints at once, the first 2 MiB are kept; the log says how much is left out. When it
    is more than `MOST_AT_ONCE`, `flooded` is called, once, with what it printed in words.

    log: from `open_log`, and closed here; who: the process, as the log names it."""

    def __init__(
        self, output: BinaryIO, log: FileIO, who: str, flooded: Callable[[str], Awaitable[None]]
    ):
        self._output = output
        self._log = log
        self._who = who
        self._flooded = flooded
        self._num_left_out = 0
        self._task = asyncio.create_task(self._pass_on())

    async def end(self) -> None:
        """Take what an ended process has left in the pipe. What it started may live and hold the
        pipe, whom this does not wait for. Does nothing where `flooded` calls it."""
        if self._task is asyncio.current_task():
            return
        await asyncio.wait({self._task}, timeout=_REST_S)
        self._task.cancel()
        await asyncio.wait({self._task})

    async def _pass_on(self) -> None:
        loop = asyncio.get_running_loop()
        reader = asyncio.StreamReader(_BLOCK)
        transport, _ = await loop.connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), self._output
        )
        level = 0.0
        earlier = loop.time()
        with contextlib.closing(transport), self._log:
            try:
                while block := await reader.read(_BLOCK):
                    now = loop.time()
                    level = max(0.0, level - (now - earlier) * MOST_A_SECOND) + len(block)
                    earlier = now
                    if level > MOST_AT_ONCE:
                        break
                    if level > _KEPT_AT_ONCE:
                        self._num_left_out += len(block)
                    else:
                        self._append(block)
            finally:
                self._say_what_is_left_out()
            if level > MOST_AT_ONCE:
                self._append(f"{self._who} printed without end and is killed\n".encode())
                await self._flooded(
                    f"printed more than it may: {MOST_AT_ONCE >> 20} MiB at once, "
                    f"{MOST_A_SECOND >> 20} MiB a second in the long run"
                )

    def _append(self, text: bytes) -> None:
        """Append to the log; where its disk is full, count what is lost."""
        self._say_what_is_left_out()
        try:
            self._log.write(text)
        except OSError:
            self._num_left_out += len(text)

    def _say_what_is_left_out(self) -> None:
        if self._num_left_out == 0:
            return
        said = f"\n{self._who}: {self._num_left_out / 2**20:.1f} MiB of what it printed left out\n"
        with contextlib.suppress(OSError):
            self._log.write(said.encode())
            self._num_left_out = 0
