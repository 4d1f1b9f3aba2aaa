"""Rollout workers, as the controller's process asks them: what one is, its client over HTTP, and
those that are alive."""

import asyncio
import contextlib
from collections.abc import Callable, Mapping
from typing import Protocol

import aiohttp
import msgspec

from grpo_megatron import progress
from grpo_megatron.errors import EngineError, raise_described
from grpo_megatron.network import Endpoint
from grpo_megatron.rollout.chunks import Chunk, SampledChunk

_CONNECT_S = 10.0
_ANSWER = aiohttp.ClientTimeout(total=_CONNECT_S)
_LOOK_S = 5.0
_WAIT_S = 0.2


class WorkerLost(EngineError):
    """A rollout worker has gone: another one may take its chunk."""


class Worker(Protocol):
    """What samples chunks: a `WorkerClient`, or a `WorkerService` of this process."""

    async def sample(self, chunk: Chunk) -> SampledChunk:
        """See `WorkerService.sample`; WorkerLost where it has gone."""
        ...


class WorkerClient(contextlib.AbstractAsyncContextManager):
    """A rollout worker in a process of its own; `is_alive` says what the supervisor knows of it.
    Make and use it within one event loop, `close` it when done (or `async with`)."""

    def __init__(self, name: str, endpoint: Endpoint, is_alive: Callable[[], bool] = lambda: True):
        self.name = name
        self._url = f"http://{endpoint.host}:{endpoint.port}/sample"
        self._is_alive = is_alive
        # a chunk takes as long as its completions do
        limits = aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_S)
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0),
            timeout=limits,
            headers={"Authorization": f"Bearer {endpoint.token}"},
        )

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connections; the worker stops what it was asked."""
        await self._session.close()

    async def sample(self, chunk: Chunk) -> SampledChunk:
        """Have the worker sample a chunk. Raises what it reports; WorkerLost where it has gone."""
        answering = asyncio.ensure_future(self._post(chunk))
        try:
            while not answering.done():
                await asyncio.wait([answering], timeout=_LOOK_S)
                if not answering.done() and not self._is_alive():
                    raise WorkerLost(f"{self.name} ended", where=self._url)
            return await answering
        finally:
            answering.cancel()
            await asyncio.gather(answering, return_exceptions=True)

    async def answers(self) -> bool:
        """Whether the worker is there."""
        with contextlib.suppress(aiohttp.ClientError, OSError):
            async with self._session.get(self._url, timeout=_ANSWER) as response:
                return response.status < 500  # it has no such page, and says so
        return False

    async def _post(self, chunk: Chunk) -> SampledChunk:
        try:
            async with self._session.post(self._url, data=msgspec.json.encode(chunk)) as response:
                body = await response.read()
        except (aiohttp.ClientError, OSError) as error:
            raise WorkerLost(f"{self.name} has gone: {error}", where=self._url) from error
        if response.status == 500:
            raise_described(msgspec.json.decode(body), EngineError)
        if response.status != 200:
            raise EngineError(f"{self.name} answered with {response.status}", where=self._url)
        return msgspec.json.decode(body, type=SampledChunk)


class WorkerPool:
    """Workers by the replica that each is beside. `on_death` is called once with a lost one;
    `can_wait` says whether one that is not there may be started again."""

    def __init__(
        self,
        workers: Mapping[int, Worker],
        on_death: Callable[[int, EngineError], None] = lambda index, cause: None,
        can_wait: Callable[[], bool] = lambda: False,
    ):
        self._can_wait = can_wait
        self._workers = dict(workers)
        self._on_death = on_death

    def beside(self, replica: int) -> tuple[int, Worker]:
        """Return the worker of a replica, by its number; another one where that has gone.

        Raises EngineError: all have."""
        if not self._workers:
            raise EngineError(
                "no rollout worker is alive",
                remedy="look at the end of logs/latest/worker-*.log; the run can be resumed",
            )
        index = replica
        if index not in self._workers:
            alive = sorted(self._workers)
            index = alive[replica % len(alive)]
        return index, self._workers[index]

    def has(self, index: int) -> bool:
        """Whether a replica's own worker is there."""
        return index in self._workers

    async def wait_alive(self) -> None:
        """Wait until there is a worker, if one may come."""
        while not self._workers and self._can_wait():
            progress.advance()  # the wait is for a start, which is watched itself
            await asyncio.sleep(_WAIT_S)

    def add(self, index: int, worker: Worker) -> None:
        """Put a worker that was started again into the pool."""
        self._workers[index] = worker

    def remove(self, index: int) -> None:
        """Take the worker of a replica that leaves the run out of the pool."""
        self._workers.pop(index, None)

    def lose(self, index: int, worker: Worker, cause: EngineError) -> None:
        """Take a worker that has died out of the pool, and say so once; one that has taken its
        place since stays."""
        if self._workers.get(index) is worker:
            del self._workers[index]
            self._on_death(index, cause)
