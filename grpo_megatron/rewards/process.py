"""The parent's side of one reward process."""

import asyncio
import contextlib
import json
import pickle
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

from grpo_megatron.errors import RewardError
from grpo_megatron.rewards.calls import CallOutcome, Chunk
from grpo_megatron.rewards.places import Place

_STARTUP_TIMEOUT_S = 120.0
_CLOSE_TIMEOUT_S = 2.0
_GRACE_S = 0.05
_MAX_IDLE_DEATHS = 3


class RewardProcess:
    """One worker: given a chunk at a time, killed when a call takes too long, replaced when gone.
    Calls name `functions`, (reference, arguments) each, by index."""

    def __init__(
        self,
        functions: Sequence[tuple[str, Mapping[str, Any]]],
        limits: Mapping[str, float],
        place: Place,
    ):
        self._task = (functions, limits)
        self.place = place
        self.num_restarts = 0
        self._started = False

    async def start(self) -> None:
        """Start the process, if it does not run, and wait until it has imported the functions.

        Raises HostLost where its host has gone, RewardError where it does not start."""
        if self.place.is_running:
            return
        self.num_restarts += self._started
        self._started = True
        self._reader, self._writer = await self.place.open()
        async with self._killed_on_error():
            try:
                failure = await self._ask(self._task)
            except (TimeoutError, ConnectionError) as error:
                await self.place.check()
                why = f"a reward process did not start ({error or 'timed out'})"
                raise self._broken(why) from error
            if failure:
                raise RewardError(f"a reward process cannot start: {failure}")

    async def run(self, chunk: Chunk, timeout_s: float) -> tuple[dict[int, CallOutcome], str]:
        """Give the process `chunk`. Returns (outcomes by index in its calls, why the others have
        none): "" where all have one, "died" where the process ended, "timed_out" where no outcome
        came for `timeout_s` seconds, twice as many for coroutines, and it was killed.
        RewardError where no process takes calls, HostLost where the host has gone, with the process
        or before."""
        await self._hand_over(chunk)
        found: dict[int, CallOutcome] = {}
        is_any_awaited = chunk.is_async
        try:
            async with self._killed_on_error():
                while len(found) < len(chunk.calls):
                    limit_s = timeout_s
                    if is_any_awaited and not chunk.left_in_order(found):
                        limit_s *= 2  # the process itself cancels a coroutine at its limit
                    index, values = await self._line_within(limit_s)
                    outcome = CallOutcome(*values)
                    found[index] = outcome
                    is_any_awaited = is_any_awaited or outcome.is_awaited
            return found, ""
        except TimeoutError:
            failure = "timed_out"
        except ConnectionError:
            failure = "died"
        await self.place.check()  # a host that goes is no reward's fault
        return found, failure

    async def close(self) -> None:
        """End an idle worker by ending its input (idempotent)."""
        if self.place.is_running:
            self._writer.close()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self.place.wait(), _CLOSE_TIMEOUT_S)
        await self.kill()

    async def kill(self) -> None:
        """Kill the worker and all that its rewards started (idempotent)."""
        await self.place.kill()

    @contextlib.asynccontextmanager
    async def _killed_on_error(self) -> AsyncIterator[None]:
        """Also when cancelled: the worker is in the middle of something."""
        try:
            yield
        except BaseException:
            await self.kill()
            raise

    async def _hand_over(self, chunk: Chunk) -> None:
        """Hand the calls to a process, trying again until one has them: that a process ended while
        it was idle is no call's fault."""
        for _ in range(_MAX_IDLE_DEATHS):
            await self.start()
            with contextlib.suppress(TimeoutError, ConnectionError):
                async with self._killed_on_error():
                    await self._ask(chunk)
                    return
        raise self._broken("reward processes end before their first call")

    async def _ask(self, message: Any) -> Any:
        async with asyncio.timeout(_STARTUP_TIMEOUT_S):
            self._writer.write(pickle.dumps(message))
            await self._writer.drain()
            return await self._line()

    async def _line_within(self, limit_s: float) -> Any:
        """Wait for a line until the time is up. A busy parent notices that time is up before it
        notices a line that came in time, so it looks once more."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(limit_s):
                return await self._line()
        async with asyncio.timeout(_GRACE_S):
            return await self._line()

    async def _line(self) -> Any:
        try:
            line = await self._reader.readline()
        except ValueError as error:  # a line longer than the reader takes
            raise ConnectionError(f"it says too much at once ({error})") from error
        if not line.endswith(b"\n"):
            raise ConnectionError("it ended")
        return json.loads(line)

    def _broken(self, what: str) -> RewardError:
        return RewardError(
            what, where=str(self.place.log_path), remedy="see the messages there; is memory short?"
        )
