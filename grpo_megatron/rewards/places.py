"""Where a reward process runs: beside its parent, or on another node by a reward host."""

import asyncio
import contextlib
import os
import signal
from pathlib import Path
from typing import NamedTuple, Protocol

from grpo_megatron.errors import RewardError
from grpo_megatron.network import Endpoint
from grpo_megatron.orphans import start_worker
from grpo_megatron.rewards.printing import Printing, open_log

_WORKER = "grpo_megatron.rewards.reward_worker"
_LONGEST_LINE = 1 << 26
_CONNECT_S = 10.0
WELCOME = b"ready\n"
"""What a host says to whoever has its token."""


class HostLost(RewardError):
    """A reward host has gone: other processes may take its calls."""


class Opened(NamedTuple):
    """The streams of a new reward process."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter


class Place(Protocol):
    """Holds one reward process at a time."""

    log_path: Path
    """Where what it prints is found."""

    async def open(self) -> Opened:
        """Start the process; HostLost where its host has gone."""
        ...

    @property
    def is_running(self) -> bool:
        """Whether the process that was opened last still runs."""
        ...

    async def wait(self) -> None:
        """Return when it has ended."""
        ...

    async def kill(self) -> None:
        """End it and all that its rewards started (idempotent)."""
        ...

    async def check(self) -> None:
        """Raise HostLost where the host has gone."""
        ...


class LocalPlace:
    """A process of this machine. One that prints more than 64 MiB at once, and more than a MiB a
    second in the long run, is killed before it fills the disk."""

    def __init__(self, log_path: Path):
        self.log_path = log_path
        self.process: asyncio.subprocess.Process | None = None
        self._opened: Opened | None = None
        self._printing: Printing | None = None

    async def open(self) -> Opened:
        """Start the process; the one before has ended, and what it left is ended here."""
        await self.kill()
        log = open_log(self.log_path)
        worker = await start_worker(_WORKER)
        self.process = worker.process
        self._printing = Printing(worker.output, log, "a reward", self._end_flood)
        reader, writer = await asyncio.open_connection(sock=worker.link, limit=_LONGEST_LINE)
        self._opened = Opened(reader, writer)
        return self._opened

    @property
    def is_running(self) -> bool:
        """Whether the process that was opened last still runs."""
        return self.process is not None and self.process.returncode is None

    async def wait(self) -> None:
        """Return when it has ended."""
        if self.process is not None:
            await self.process.wait()

    async def kill(self) -> None:
        """Kill it and all that its rewards started (idempotent)."""
        if self.process is None:
            return
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        await self.process.wait()
        self.process = None
        if self._printing is not None:
            await self._printing.end()
            self._printing = None
        if self._opened is not None:
            self._opened.writer.close()

    async def check(self) -> None:
        """Nothing: this machine is here."""

    async def _end_flood(self, printed: str) -> None:
        """Kill the process, which prints too much; its call is that of one that died."""
        if self.process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)


class HostedPlace:
    """A process that a reward host starts for a connection, and ends with it."""

    def __init__(self, endpoint: Endpoint, log_path: Path):
        self.log_path = log_path
        self._endpoint = endpoint
        self._opened: Opened | None = None

    async def open(self) -> Opened:
        """Connect, whereupon the host starts a process; HostLost where it does not answer."""
        self._opened = await self._connect()
        return self._opened

    @property
    def is_running(self) -> bool:
        """Whether the host has not closed the connection."""
        return self._opened is not None and not self._opened.reader.at_eof()

    async def wait(self) -> None:
        """Return at once: the host sees to the process."""

    async def kill(self) -> None:
        """Close the connection, whereupon the host kills the process (idempotent)."""
        if self._opened is not None:
            self._opened.writer.close()
            self._opened = None

    async def check(self) -> None:
        """Raise HostLost where the host does not answer."""
        opened = await self._connect()
        opened.writer.close()

    async def _connect(self) -> Opened:
        host = self._endpoint.host
        try:
            async with asyncio.timeout(_CONNECT_S):
                reader, writer = await asyncio.open_connection(
                    host, self._endpoint.port, limit=_LONGEST_LINE
                )
                writer.write(self._endpoint.token.encode() + b"\n")
                await writer.drain()
                # a host that is being killed may still be connected to
                welcome = await reader.readline()
                if welcome != WELCOME:
                    writer.close()
                    raise ConnectionError("it closes the connection")
        except (OSError, TimeoutError) as error:
            raise HostLost(
                f"a reward host has gone: {error or 'it does not answer'}",
                where=f"{host}:{self._endpoint.port}",
                remedy="look at the end of logs/latest/reward-host-*.log",
            ) from error
        return Opened(reader, writer)
