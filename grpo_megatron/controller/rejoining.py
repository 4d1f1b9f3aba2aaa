"""Rollout servers and workers that were started again join the run, while the others go on."""

import asyncio
import logging
import time
from typing import Protocol

from grpo_megatron.config.run import RunConfig
from grpo_megatron.controller.connecting import connect_engine, connect_worker, is_expected
from grpo_megatron.controller.display import show
from grpo_megatron.controller.publishing import Publisher
from grpo_megatron.errors import EngineError, GrpoMegatronError
from grpo_megatron.rollout.pool import ReplicaPool
from grpo_megatron.rollout.workers import WorkerPool
from grpo_megatron.rundir import RunDir
from grpo_megatron.telemetry.events import append_event

logger = logging.getLogger(__name__)

_LOOK_S = 0.5


class _Client(Protocol):
    async def close(self) -> None: ...


class Rejoining:
    """Use as `async with`: meanwhile each replica and worker that is not there is waited for.

    A replica gets the weights of the others (`Publisher.join`) before it is asked anything."""

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
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> "Rejoining":
        if self._config.engine_restarts > 0:
            for index in range(self._config.num_replicas):
                self._tasks.append(asyncio.create_task(self._see_to_engine(index)))
                self._tasks.append(asyncio.create_task(self._see_to_worker(index)))
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for client in self._clients:
            await client.close()

    async def _see_to_engine(self, index: int) -> None:
        name = f"rollout-{index}"
        while is_expected(self._run_dir, name):
            if self._engines.is_alive(index):
                await asyncio.sleep(_LOOK_S)
                continue
            try:
                await self._join_engine(index)
            except EngineError as error:  # it died once more, or takes too long
                logger.warning("%s did not join: %s", name, error)
                await asyncio.sleep(_LOOK_S)
            except GrpoMegatronError as error:
                self._engines.failure = error
                return
            except Exception as error:
                logger.exception("%s did not join", name)
                self._engines.failure = EngineError(f"{name} could not join: {error!r}")
                return

    async def _join_engine(self, index: int) -> None:
        name = f"rollout-{index}"
        client = await connect_engine(self._config, self._run_dir, index)
        self._clients.append(client)
        began = time.perf_counter()
        await self._publisher.join(index, client)
        seconds = round(time.perf_counter() - began, 3)
        version = self._publisher.version
        show("message", text=f"{name} has joined with weight version {version}")
        append_event(self._run_dir.events, "joined", role=name, version=version, seconds=seconds)

    async def _see_to_worker(self, index: int) -> None:
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
