"""The parent's side of one reward process."""

import asyncio
import contextlib
import json
import os
import pickle
import signal
import socket
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from grpo_megatron.errors import RewardError
from grpo_megatron.rewards.reward_worker import Call, Outcome

_STARTUP_TIMEOUT_S = 120.0
_CLOSE_TIMEOUT_S = 2.0
_GRACE_S = 0.05
_MAX_IDLE_DEATHS = 3
_LONGEST_LINE = 1 << 26


class RewardProcess:
    """One worker: given a chunk at a time, killed when a call takes too long, replaced when gone.
    Calls name `functions`, (reference, arguments) each, by index."""

    def __init__(
        self,
        functions: Sequence[tuple[str, Mapping[str, Any]]],
        limits: Mapping[str, float],
        log_path: Path,
    ):
        self._task = (functions, limits)
        self._log_path = log_path
        self.process: asyncio.subprocess.Process | None = None
        self.num_restarts = 0
        self._started = False

    async def start(self) -> None:
        """Start the process, if it does not run, and wait until it has imported the functions."""
        if self.process is not None and self.process.returncode is None:
            return
        self.num_restarts += self._started
        self._started = True
        ours, theirs = socket.socketpair()
        python_path = [entry or os.getcwd() for entry in sys.path]
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": "1",  # there are many workers
            "PYTHONPATH": os.pathsep.join(python_path),
        }
        with theirs, self._log_path.open("ab") as log:
            # An own session: Ctrl-C reaches the parent only, a kill also what a reward started.
            self.process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "grpo_megatron.rewards.reward_worker",
                str(theirs.fileno()),
                str(os.getpid()),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
                env=environment,
            )
        self._reader, self._writer = await asyncio.open_connection(sock=ours, limit=_LONGEST_LINE)
        async with self._killed_on_error():
            try:
                failure = await self._ask(self._task)
            except (TimeoutError, ConnectionError) as error:
                why = f"a reward process did not start ({error or 'timed out'})"
                raise self._broken(why) from error
            if failure:
                raise RewardError(f"a reward process cannot start: {failure}")

    async def run(self, calls: Sequence[Call], limit_s: float) -> tuple[dict[int, Outcome], str]:
        """Give the process `calls`. Returns (outcomes by index in `calls`, why the others have
        none): "" where all have one, "died" where the process ended, "timed_out" where no outcome
        came for `limit_s` seconds and it was killed. RewardError where no process takes calls."""
        await self._give(calls)
        found: dict[int, Outcome] = {}
        try:
            async with self._killed_on_error():
                while len(found) < len(calls):
                    index, outcome = await self._line_within(limit_s)
                    found[index] = Outcome(*outcome)
            return found, ""
        except TimeoutError:
            return found, "timed_out"
        except ConnectionError:
            return found, "died"

    async def close(self) -> None:
        """End an idle worker by ending its input (idempotent)."""
        if self.process is not None:
            self._writer.close()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self.process.wait(), _CLOSE_TIMEOUT_S)
            await self.kill()

    async def kill(self) -> None:
        """Kill the worker and all that its rewards started (idempotent)."""
        if self.process is not None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.process.pid, signal.SIGKILL)
            await self.process.wait()
            self._writer.close()
            self.process = None

    @contextlib.asynccontextmanager
    async def _killed_on_error(self) -> AsyncIterator[None]:
        """Also when cancelled: the worker is in the middle of something."""
        try:
            yield
        except BaseException:
            await self.kill()
            raise

    async def _give(self, calls: Sequence[Call]) -> None:
        """Until a process has the calls: one that ended while it was idle is nobody's fault."""
        for _ in range(_MAX_IDLE_DEATHS):
            await self.start()
            with contextlib.suppress(TimeoutError, ConnectionError):
                async with self._killed_on_error():
                    await self._ask(calls)
                    return
        raise self._broken("reward processes end before their first call")

    async def _ask(self, message: Any) -> Any:
        async with asyncio.timeout(_STARTUP_TIMEOUT_S):
            self._writer.write(pickle.dumps(message))
            await self._writer.drain()
            return await self._line()

    async def _line_within(self, limit_s: float) -> Any:
        """A busy parent notices that time is up before it notices the line that came in time."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(limit_s):
                return await self._line()
        async with asyncio.timeout(_GRACE_S):
            return await self._line()

    async def _line(self) -> Any:
        line = await self._reader.readline()
        if not line.endswith(b"\n"):
            raise ConnectionError("it ended")
        return json.loads(line)

    def _broken(self, what: str) -> RewardError:
        return RewardError(
            what, where=str(self._log_path), remedy="see the messages there; is memory short?"
        )
