"""The parent's side of one reward process."""

from __future__ import annotations

import asyncio
import contextlib
import os
import pickle
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from grpo_megatron.errors import RewardError
from grpo_megatron.rewards.board import DIED, PENDING, TIMED_OUT, Board
from grpo_megatron.rewards.worker import HEADER, Call, encode

_STARTUP_TIMEOUT_S = 120.0
_CLOSE_TIMEOUT_S = 2.0


class RewardProcess:
    """One worker: started, given a chunk at a time, killed when a call takes too long.

    Attributes:
        alive: Whether it can take another chunk.
        tracebacks: First traceback of each function that raised, by function index.
        steps: Step rewards of the last chunk, by call: (end in the text, reward) each.
    """

    def __init__(self, process: asyncio.subprocess.Process, board: Board, timeout_s: float):
        self._process, self._board, self._timeout_s = process, board, timeout_s
        self.alive = True
        self.tracebacks: dict[int, str] = {}
        self.steps: dict[int, list[tuple[int, float]]] = {}

    @classmethod
    async def start(cls, functions: Sequence[tuple[str, Mapping[str, Any]]],
                    log_path: Path | None, *, timeout_s: float, concurrency: int) -> RewardProcess:
        """Start a worker and wait until it has imported `functions`.

        Args:
            functions: (reference, arguments) each; calls name them by index.
            log_path: What rewards print is appended here; None: the parent's standard error.
            timeout_s, concurrency: Hard limit per call; coroutines that run at a time.

        Raises:
            RewardError: The worker cannot import a function, or does not start.
        """
        board, board_fd = Board.create()
        log = log_path.open("ab") if log_path else None
        try:
            # An own session: Ctrl-C in the terminal reaches the parent only, and killing the
            # group also kills what a reward started.
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "grpo_megatron.rewards.worker", str(board_fd),
                str(os.getpid()), stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
                stderr=log, pass_fds=(board_fd,), start_new_session=True, env=_environment())
        finally:
            os.close(board_fd)
            if log:
                log.close()
        worker = cls(process, board, timeout_s)
        specifications = [(reference, dict(arguments)) for reference, arguments in functions]
        try:
            await worker._send((specifications, {"timeout_s": timeout_s,
                                                 "concurrency": concurrency}))
            await asyncio.wait_for(worker._until("ready"), _STARTUP_TIMEOUT_S)
        except BaseException as error:
            await worker.kill()
            if isinstance(error, EOFError | TimeoutError | ConnectionError):
                raise RewardError(f"a reward process did not start ({error or 'timed out'})",
                                  where=str(log_path) if log_path else None,
                                  remedy="its own messages say why") from error
            raise
        return worker

    async def run(self, calls: Sequence[Call]) -> tuple[list[int], list[float]]:
        """Run a chunk; returns status and value per call.

        A call over the limit is TIMED_OUT, a call that ended the process is DIED; the process is
        gone then, and the calls after it are PENDING. All are PENDING where the process ended
        before the first call: no call is to blame.
        """
        self._board.reset()
        self.steps = {}
        on_time = True
        try:
            await self._send(calls)
            on_time = await self._watch()
        except (EOFError, ConnectionError):
            self.alive = False
        except BaseException:  # cancelled: the worker is in the middle of something
            await self.kill()
            raise
        if on_time and self.alive:
            return self._results(len(calls))
        running = self._board.running()[0]  # before the kill: a late worker may still move on
        await self.kill()
        statuses, values = self._results(len(calls))
        if running >= 0 and statuses[running] == PENDING:
            statuses[running] = DIED if on_time else TIMED_OUT
        return statuses, values

    async def close(self) -> None:
        """End an idle worker by ending its input."""
        if self._process.stdin:
            self._process.stdin.close()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._process.wait(), _CLOSE_TIMEOUT_S)
        await self.kill()

    async def kill(self) -> None:
        """Kill the worker and all that its rewards started (idempotent)."""
        self.alive = False
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        await self._process.wait()
        if self._process.stdin:
            self._process.stdin.close()

    def _results(self, num_calls: int) -> tuple[list[int], list[float]]:
        return list(self._board.statuses[:num_calls]), list(self._board.values[:num_calls])

    async def _watch(self) -> bool:
        """Wait for the end of the chunk; False once a call is over the limit."""
        done = asyncio.ensure_future(self._until("done"))
        wait_s = timeout_s = self._timeout_s
        try:
            while not (await asyncio.wait({done}, timeout=wait_s))[0]:
                index, elapsed_s = self._board.running()
                # Unpickling a chunk is no reward's time: be generous before the first call.
                limit_s = timeout_s if index >= 0 else timeout_s + _STARTUP_TIMEOUT_S
                if elapsed_s >= limit_s:
                    return False
                wait_s = max(min(limit_s - elapsed_s, timeout_s), 0.001)
            await done
            return True
        finally:
            done.cancel()

    async def _send(self, message: Any) -> None:
        stdin = self._process.stdin
        assert stdin is not None
        stdin.write(encode(message))
        await stdin.drain()

    async def _until(self, kind: str) -> None:
        """Read messages until one of `kind`; tracebacks are kept on the way."""
        stdout = self._process.stdout
        assert stdout is not None
        while True:
            size = HEADER.unpack(await stdout.readexactly(HEADER.size))[0]
            message = pickle.loads(await stdout.readexactly(size))
            if message[0] == "error":
                self.tracebacks.setdefault(message[1], message[2])
            elif message[0] == "steps":
                self.steps[message[1]] = message[2]
            elif message[0] == "failed":
                raise RewardError(f"a reward process cannot start: {message[1]}")
            elif message[0] == kind:
                return


def _environment() -> dict[str, str]:
    """The parent's, with its import path; one thread a worker, since there are many workers."""
    path = [entry or os.getcwd() for entry in sys.path]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path), "OMP_NUM_THREADS": "1"}
