"""Trainers that publish to the servers that all tests of engines share."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from grpo_megatron.config.run import RunConfig
from grpo_megatron.controller.publishing import Publisher
from grpo_megatron.rollout.pool import ReplicaPool
from grpo_megatron.rundir import RunDir
from grpo_megatron.trainer.protocol import raise_reply
from grpo_megatron.trainer.requests import Answer, Request, read_answer, to_json_values
from tests.rollout.engines import Server, make_config
from tests.trainer.worker_group import WorkerGroup

TOLERANCE = 1e-4


class GroupLink:
    """The controller's `TrainerLink`, with a worker group in place of the trainer's processes."""

    def __init__(self, group: WorkerGroup):
        self._group, self._lock = group, asyncio.Lock()

    async def call(self, request: Request[Answer]) -> Answer:
        reply = await self.run("reply", values=to_json_values(request))
        return read_answer(request, raise_reply(reply))

    async def run(self, case: str, **arguments: Any) -> Any:
        async with self._lock:
            return await asyncio.to_thread(
                self._group.run, f"tests.integration.trainer_side:{case}", **arguments
            )


@asynccontextmanager
async def publishing(
    group: WorkerGroup,
    checkpoint: Path,
    servers: list[Server],
    run_dir: Path,
    *,
    layout: dict[str, Any] | None = None,
    publish: dict[str, Any] | None = None,
    temperature: float = 1.0,
    lora: dict[str, Any] | None = None,
    cold_start: dict[str, Any] | None = None,
    domains: Sequence[str] = ("d",),
):
    """A trainer that holds `checkpoint`, and the controller's publisher to `servers`."""
    config = trainer_config(
        group.world_size, layout or {}, publish or {}, temperature, lora, cold_start, domains
    )
    link = GroupLink(group)
    await link.run("start", config=config, model=str(checkpoint))
    clients = [server.client() for server in servers]
    try:
        yield Publisher(config, RunDir(run_dir), link, ReplicaPool(clients)), link, clients
    finally:
        for client in clients:
            await client.close()


def trainer_config(
    num_ranks: int,
    layout: dict[str, Any],
    publish: dict[str, Any],
    temperature: float,
    lora: dict[str, Any] | None = None,
    cold_start: dict[str, Any] | None = None,
    domains: Sequence[str] = ("d",),
) -> RunConfig:
    values = make_config(domains, temperature=temperature).model_dump(exclude_unset=True)
    return RunConfig.model_validate(
        values
        | {
            "trainer": {
                "num_ranks": num_ranks,
                "precision": "float32",
                "num_threads": 1,
                "max_tokens_per_microbatch": 256,
            }
            | layout,
            "optimizer": {"lr": 1e-2},
            "objective": {"preset": "grpo"},
            "lora": lora,
            "cold_start": cold_start,
            "publish": {"canary_tolerance": TOLERANCE} | publish,
        }
    )
