"""vLLM loads what the trainer exports, and computes what the trainer computes."""

from __future__ import annotations

import asyncio

import pytest

from grpo_megatron.rollout.pool import ReplicaPool
from grpo_megatron.trainer.requests import ExportModel, SaveCheckpoint
from tests.integration.conftest import publishing
from tests.integration.test_publish import assert_agree, train_request
from tests.rollout.engines import Server
from tests.trainer.models import write_samples

pytestmark = [pytest.mark.engine, pytest.mark.matrix]

LAYOUT = {
    "tensor_parallel_size": 2,
    "pipeline_parallel_size": 2,
    "expert_parallel_size": 2,
    "expert_tensor_parallel_size": 1,
}


def test_vllm_loads_the_export_of_a_trained_model(
    spare_servers, checkpoints, world1, world4, tmp_path
):
    """And a trainer that starts from the run's checkpoint, at another layout, agrees with it."""
    exported, saved = tmp_path / "export", tmp_path / "step_000001"
    samples = write_samples(tmp_path / "store" / "step_000001", vocab_size=256)

    async def trained() -> None:
        async with publishing(
            world4,
            checkpoints.moe,
            [],
            tmp_path,
            layout=LAYOUT,
        ) as (publisher, trainer, _):
            await trainer.call(train_request(samples))
            assert await trainer.call(ExportModel(exported)) > 0
            await trainer.call(SaveCheckpoint(directory=saved, state={}))
            server = Server.start("exported", exported, tmp_path)
            await asyncio.to_thread(server.wait)
            spare_servers.append(server)
            await agrees(publisher)

    async def resumed_elsewhere() -> None:
        async with publishing(world1, saved, [], tmp_path) as (publisher, _, _):
            await agrees(publisher)

    async def agrees(publisher) -> None:
        async with spare_servers[-1].client() as client:
            publisher.engines = ReplicaPool([client])
            await assert_agree(publisher)

    asyncio.run(trained())
    asyncio.run(resumed_elsewhere())
