"""Connections to rollout servers and rollout workers, the first ones and those that start again."""

import asyncio
import contextlib
import logging
import os
import time
from functools import partial
from pathlib import Path

from grpo_megatron.config.run import RunConfig
from grpo_megatron.errors import EngineError
from grpo_megatron.network import Endpoint
from grpo_megatron.rollout.client import EngineClient
from grpo_megatron.rollout.worker_client import WorkerClient
from grpo_megatron.rundir import RunDir, engine_name

logger = logging.getLogger(__name__)

_LOOK_S = 0.1


def is_expected(run_dir: RunDir, name: str) -> bool:
    """Whether the supervisor has not reported a process as dead for good; it has not where a file
    system fails for a moment."""
    try:
        return not (run_dir.endpoints / f"{name}.dead").exists()
    except OSError as error:
        logger.warning("cannot look whether %s is dead: %s", name, error)
        return True


async def connect_engine(config: RunConfig, run_dir: RunDir, index: int) -> EngineClient:
    """Connect to replica `index` once it is healthy; of one that is started again meanwhile, to the
    new one. The caller closes the connection.

    Raises EngineError: it has ended for good, or `rollout.startup_timeout_s` is over."""
    name = engine_name(index)
    while True:
        endpoint = await _published(config, run_dir, name)
        client = EngineClient(
            f"http://{endpoint.host}:{endpoint.port}",
            name,
            config.rollout.request_timeout_s,
            token=endpoint.token,
        )
        try:
            is_ready = await client.wait_ready(
                config.rollout.startup_timeout_s,
                partial(is_expected, run_dir, name),
                partial(_is_current, run_dir.endpoints / f"{name}.json", endpoint),
            )
            if is_ready:
                return client
        except BaseException:
            await client.close()
            raise
        await client.close()


async def connect_worker(config: RunConfig, run_dir: RunDir, index: int) -> WorkerClient:
    """Connect to the rollout worker beside replica `index`. The caller closes the connection.

    Raises EngineError: it has ended for good, or has not published its address in time."""
    name = f"worker-{index}"
    endpoint = await _published(config, run_dir, name)
    path = run_dir.endpoints / f"{name}.json"
    return WorkerClient(name, endpoint, partial(_is_current, path, endpoint))


async def _published(config: RunConfig, run_dir: RunDir, name: str) -> Endpoint:
    """Wait for a process to publish its address."""
    path = run_dir.endpoints / f"{name}.json"
    limit_s = config.rollout.startup_timeout_s
    deadline = time.monotonic() + limit_s
    while True:
        # a short look by a thread each time: one that waits would keep the process from ending
        with contextlib.suppress(OSError, ValueError):  # removed between the look and the reading
            if path.name in await asyncio.to_thread(os.listdir, path.parent):
                return Endpoint.read(path)
        if not is_expected(run_dir, name):
            raise EngineError(f"{name} ended before it was ready", where=str(path))
        if time.monotonic() > deadline:
            raise EngineError(
                f"nobody published {path.name} within {limit_s:.0f} s",
                where=str(path),
                remedy="look at the other processes' logs",
            )
        await asyncio.sleep(_LOOK_S)


def _is_current(path: Path, endpoint: Endpoint) -> bool:
    """Whether a process is still the one that published `endpoint`: the supervisor removes the file
    when it has ended."""
    try:
        return Endpoint.read(path) == endpoint
    except (OSError, ValueError):
        return False
