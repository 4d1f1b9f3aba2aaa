"""The parent's side of one reward process."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import pickle
import signal
import socket
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from grpo_megatron.errors import RewardError
from grpo_megatron.rewards.journal import Journal, Outcome
from grpo_megatron.rewards.worker import Call

_STARTUP_TIMEOUT_S = 120.0
_CLOSE_TIMEOUT_S = 2.0


class RewardProcess:
    """One worker: given a chunk at a time, killed when a call takes too long, replaced when gone.

    Args:
        functions: (reference, arguments) each; calls name them by index.
        log_path: What rewards print is appended here; None: the parent's standard error.
        timeout_s, concurrency: Hard limit per call; coroutines that run at a time.

    Attributes:
        num_starts: How often it was started.
    """

    def __init__(self, functions: Sequence[tuple[str, Mapping[str, Any]]], log_path: Path | None,
                 *, timeout_s: float, concurrency: int):
        self._task = functions, {"timeout_s": timeout_s, "concurrency": concurrency}
        self._log_path, self._timeout_s = log_path, timeout_s
        self._process: asyncio.subprocess.Process | None = None
        self.journal = Journal()
        self.num_starts = 0

    @property
    def pid(self) -> int | None:
        """Of the process, while there is one."""
        return self._process.pid if self._process else None

    async def start(self) -> None:
        """Start the process, if it does not run, and wait until it has imported the functions.

        Raises:
            RewardError: It cannot import a function, or does not start.
        """
        if self._process is not None and self._process.returncode is None:
            return
        self.num_starts += 1
        ours, theirs = socket.socketpair()
        with contextlib.ExitStack() as stack:
            stack.enter_context(theirs)
            log = stack.enter_context(self._log_path.open("ab")) if self._log_path else None
            # An own session: Ctrl-C in the terminal reaches the parent only, and killing the
            # group also kills what a reward started.
            fds = theirs.fileno(), self.journal.file_descriptor
            self._process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "grpo_megatron.rewards.worker", *map(str, fds),
                str(os.getpid()), stdin=asyncio.subprocess.DEVNULL, stdout=log or 2, stderr=log,
                pass_fds=fds, start_new_session=True, env=_environment())
        self._reader, self._writer = await asyncio.open_connection(sock=ours)
        try:
            await asyncio.wait_for(self._ask(self._task), _STARTUP_TIMEOUT_S)
        except BaseException as error:
            await self.kill()
            if isinstance(error, TimeoutError | ConnectionError):
                raise RewardError(f"a reward process did not start ({error or 'timed out'})",
                                  where=str(self._log_path) if self._log_path else None,
                                  remedy="its own messages say why") from error
            raise

    async def run(self, calls: Sequence[Call]) -> dict[int, Outcome]:
        """Run a chunk; returns outcomes by index.

        A call over the limit has timed out, a call that ended the process has died; the process is
        gone then, and the calls after it have no outcome. None has where the process ended before
        the first call: no call is to blame.
        """
        await self.start()
        self.journal.clear()
        failure = "died"
        try:
            if await self._watched(self._ask(calls)):
                return self.journal.outcomes()
            failure = "timed_out"
        except ConnectionError:
            pass
        except BaseException:  # cancelled: the worker is in the middle of something
            await self.kill()
            raise
        running, _ = self.journal.running()  # before the kill: a late worker may still move on
        await self.kill()
        blamed = {running: Outcome(failure)} if running >= 0 else {}
        return blamed | self.journal.outcomes()

    async def close(self) -> None:
        """End an idle worker by ending its input (idempotent)."""
        if self._process is not None:
            self._writer.close()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._process.wait(), _CLOSE_TIMEOUT_S)
            await self.kill()

    async def kill(self) -> None:
        """Kill the worker and all that its rewards started (idempotent)."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)
            await self._process.wait()
            self._writer.close()
            self._process = None

    async def _watched(self, answer: Any) -> bool:
        """Wait for the end of a chunk; False once a call is over the limit."""
        done = asyncio.ensure_future(answer)
        wait_s = timeout_s = self._timeout_s
        try:
            while not (await asyncio.wait({done}, timeout=wait_s))[0]:
                index, elapsed_s = self.journal.running()
                # Unpickling a chunk is no reward's time: be generous before the first call.
                limit_s = timeout_s if index >= 0 else timeout_s + _STARTUP_TIMEOUT_S
                if elapsed_s >= limit_s:
                    return False
                wait_s = max(min(limit_s - elapsed_s, timeout_s), 0.001)
            await done
            return True
        finally:
            done.cancel()

    async def _ask(self, message: Any) -> None:
        """Send a message and wait for the answer.

        Raises:
            ConnectionError: The process has ended.
            RewardError: What it answers.
        """
        self._writer.write(pickle.dumps(message))
        await self._writer.drain()
        answer = await self._reader.readline()
        if not answer:
            raise ConnectionError("it ended")
        if failure := json.loads(answer):
            raise RewardError(f"a reward process cannot start: {failure}")


def _environment() -> dict[str, str]:
    """The parent's, with its import path; one thread a worker, since there are many workers."""
    path = [entry or os.getcwd() for entry in sys.path]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path), "OMP_NUM_THREADS": "1"}
