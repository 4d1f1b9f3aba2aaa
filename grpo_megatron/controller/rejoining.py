"""Rollout servers and workers that were started again or added join the run, and those that are
removed leave it, while the others go on."""

import asyncio
import logging
import time
from collections.abc import Coroutine
from typing import Any, Protocol

from grpo_megatron.config.run import RunConfig
from grpo_megatron.controller.connecting import connect_engine, connect_worker, is_expected
from grpo_megatron.controller.display import show
from grpo_megatron.controller.publishing import Publisher
from grpo_megatron.errors import EngineError, GrpoMegatronError
from grpo_megatron.rollout.members import read_members, read_unjoined
from grpo_megatron.rollout.pool import ReplicaPool
from grpo_megatron.rollout.worker_client import WorkerPool
from grpo_megatron.rundir import RunDir, engine_name
from grpo_megatron.telemetry.events import append_event

logger = logging.getLogger(__name__)

_LOOK_S = 0.5


class _Client(Protocol):
    async def close(self) -> None: ...


class Rejoining:
    """Use as `async with`: meanwhile each replica and worker that is not there is waited for, and
    the run's members are followed (`rollout.members`).

    A replica gets the weights of the others (`Publisher.join`) before it is asked anything. One
    that is to leave gets no new requests, answers those that it has, and is let go between two
    publishes (`Publisher.remove`); then the supervisor is told `left` and ends it."""

    def __init__(
        self,
        config: RunConfig,
        run_dir: RunDir,
        engines: ReplicaPool,
        workers: WorkerPool,
        publisher: Publisher,
    ):
        self._config = config
        self._run_dir = run_dir
        self._engines = engines
        self._workers = workers
        self._publisher = publisher
        self._clients: list[_Client] = []
        self._tasks: dict[int, list[asyncio.Task[None]]] = {}  # that see to an engine, by number
        self._known: set[int] = set()  # members that are seen to, or need not be
        self._leaving: dict[int, asyncio.Task[None]] = {}
        self._joining: set[int] = set()  # that get weights
        self._following: asyncio.Task[None] | None = None

    async def __aenter__(self) -> "Rejoining":
        if self._config.num_replicas == 0:
            return self
        for index in read_members(self._run_dir, self._config):
            self._known.add(index)
            if self._config.engine_restarts > 0:
                self._see_to(index)
        self._record_connected()
        self._following = self._begin(self._follow(), "members of the run")
        return self

    async def __aexit__(self, *_: object) -> None:
        tasks = [*self._leaving.values()]
        if self._following is not None:
            tasks.append(self._following)
        for of_engine in self._tasks.values():
            tasks += of_engine
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for client in self._clients:
            await client.close()

    def _record_connected(self) -> None:
        """Record as joined the engines that were started after the controller and have been
        connected with the others; the first publish brings them their weights."""
        unjoined = read_unjoined(self._run_dir)
        for index in sorted(self._known):
            name = engine_name(index)
            if name in unjoined and self._engines.is_alive(index):
                append_event(self._run_dir.events, "joined", role=name)

    def _see_to(self, index: int) -> None:
        self._tasks[index] = [
            self._begin(self._see_to_engine(index), engine_name(index)),
            self._begin(self._see_to_worker(index), f"worker-{index}"),
        ]

    def _begin(self, coroutine: Coroutine[Any, Any, None], what: str) -> asyncio.Task[None]:
        """Run beside the others what sees to `what`; where it raises, the pool fails: nobody else
        would tell, and who waits for an engine would wait for ever."""
        task = asyncio.create_task(coroutine, name=what)
        task.add_done_callback(self._note_failure)
        return task

    def _note_failure(self, task: asyncio.Task[None]) -> None:
        if task.cancelled():
            return
        error = task.exception()
        if error is None:
            return
        if not isinstance(error, GrpoMegatronError):
            logger.error("cannot see to %s", task.get_name(), exc_info=error)
            error = EngineError(f"cannot see to {task.get_name()}: {error!r}")
        self._engines.failure = error

    # --- members that come and go

    async def _follow(self) -> None:
        """Do what has changed among the members, as long as the run lasts."""
        while True:
            # by a thread: a file system may stall
            members = await asyncio.to_thread(read_members, self._run_dir, self._config)
            self._known.intersection_update(members)
            for index, membership in members.items():
                if membership == "leaving" and index not in self._leaving:
                    leaving = self._begin(self._see_out(index), engine_name(index))
                    self._leaving[index] = leaving
                elif membership == "present" and self._is_new(index):
                    self._known.add(index)
                    self._see_to(index)
            for index in list(self._leaving):
                if index not in members:  # the supervisor has ended it
                    del self._leaving[index]
            await asyncio.sleep(_LOOK_S)

    def _is_new(self, index: int) -> bool:
        """Whether a member was added, and nothing waits for one of its number any more."""
        if index in self._known:
            return False
        return all(task.done() for task in self._tasks.get(index, []))

    async def _see_out(self, index: int) -> None:
        """Let an engine go once it has answered what it was asked."""
        while index in self._joining:  # the trainer would wait for it in vain
            await asyncio.sleep(_LOOK_S)
        for task in self._tasks.pop(index, []):
            task.cancel()
        replica = self._engines.find(index)
        if replica is not None:
            replica.is_leaving = True
            while replica.is_alive and (replica.in_flight or replica in self._engines.taking):
                await asyncio.sleep(_LOOK_S)
        await self._publisher.remove(index)
        self._workers.remove(index)
        show("left", engine=index)

    # --- those that are to be there

    async def _see_to_engine(self, index: int) -> None:
        name = engine_name(index)
        while is_expected(self._run_dir, name):
            if self._engines.is_alive(index):
                await asyncio.sleep(_LOOK_S)
                continue
            try:
                await self._join_engine(index)
            except EngineError as error:  # it died once more, or takes too long
                logger.warning("%s did not join: %s", name, error)
                await asyncio.sleep(_LOOK_S)

    async def _join_engine(self, index: int) -> None:
        name = engine_name(index)
        client = await connect_engine(self._config, self._run_dir, index)
        self._clients.append(client)
        began = time.perf_counter()
        self._joining.add(index)
        try:
            await self._publisher.join(index, client)
        finally:
            self._joining.discard(index)
        seconds = round(time.perf_counter() - began, 3)
        version = self._publisher.version
        show("message", text=f"{name} has joined with weight version {version}")
        append_event(self._run_dir.events, "joined", role=name, version=version, seconds=seconds)

    async def _see_to_worker(self, index: int) -> None:
        """Connect to a worker that was started again, as often as it is; ends when none is
        expected."""
        name = f"worker-{index}"
        while is_expected(self._run_dir, name):
            if self._workers.has(index):
                await asyncio.sleep(_LOOK_S)
                continue
            try:
                client = await connect_worker(self._config, self._run_dir, index)
            except EngineError as error:
                logger.warning("%s did not join: %s", name, error)
                await asyncio.sleep(_LOOK_S)
                continue
            if not await client.answers():
                await client.close()
                await asyncio.sleep(_LOOK_S)
                continue
            self._clients.append(client)
            self._workers.add(index, client)
            append_event(self._run_dir.events, "joined", role=name)
