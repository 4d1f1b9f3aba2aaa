"""The trainer of a run that trains nothing: a frozen policy, with a training run's weights."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from grpo_megatron.trainer.requests import ExportModel, LoadCheckpoint, SaveCheckpoint, Train
from tests.integration.conftest import GroupLink, trainer_config
from tests.trainer.models import write_samples

pytestmark = pytest.mark.engine

LAYOUTS = {"world1": {}, "world2": {"expert_parallel_size": 2}}


@pytest.mark.parametrize("world", LAYOUTS)
@pytest.mark.parametrize("kind", ["eval", "rejection_sample"])
def test_it_goes_on_from_a_checkpoint_with_an_optimizer(
    request, checkpoints, tmp_path, world, kind
):
    group = request.getfixturevalue(world)
    model = str(checkpoints.moe)
    samples = write_samples(tmp_path / "store" / "step_000001", vocab_size=256)
    checkpoint = tmp_path / "checkpoints" / "step_000001"
    checkpoint.parent.mkdir()
    link = GroupLink(group)

    async def train_then_load() -> dict:
        config = trainer_config(group.world_size, LAYOUTS[world], {}, 1.0)
        await link.run("start", config=config, model=model)
        await link.call(Train(directory=Path(samples), first_update=0, num_updates=1, state={}))
        await link.call(SaveCheckpoint(directory=checkpoint, state={"step": 1}))
        await link.call(ExportModel(tmp_path / "trained"))
        frozen = config.model_copy(update={"kind": kind})
        await link.run("start", config=frozen, model=model)
        state = await link.call(LoadCheckpoint(checkpoint))
        await link.call(ExportModel(tmp_path / "loaded"))
        return state

    state = asyncio.run(train_then_load())
    assert state["step"] == 1
    before = load_file(checkpoints.moe / "model.safetensors")
    trained = load_file(tmp_path / "trained" / "model.safetensors")
    loaded = load_file(tmp_path / "loaded" / "model.safetensors")
    assert any(not torch.equal(before[name], trained[name]) for name in before)
    assert trained.keys() == loaded.keys()
    for name, tensor in trained.items():
        assert torch.equal(loaded[name], tensor), name
