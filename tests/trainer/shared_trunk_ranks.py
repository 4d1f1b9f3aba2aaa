"""What ranks do with a critic that shares the policy's layers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from grpo_megatron.batching.store import SampleTable
from grpo_megatron.config.critic import CriticConfig
from grpo_megatron.config.lora import LoraConfig
from grpo_megatron.config.run import RunConfig
from grpo_megatron.config.trainer import LAYOUT_KEYS
from grpo_megatron.errors import CheckpointError
from grpo_megatron.trainer.megatron import platform  # noqa: F401  (before anything of Megatron)

# isort: split
from grpo_megatron.trainer.conversion_worker import ConversionJob
from grpo_megatron.trainer.conversion_worker import run as convert
from grpo_megatron.trainer.lora.peft_format import adapter_model
from grpo_megatron.trainer.megatron.process_groups import RankInfo
from grpo_megatron.trainer.requests import (
    ExportModel,
    LoadCheckpoint,
    ResetOptimizer,
    SaveCheckpoint,
    SnapshotReference,
    Train,
)
from grpo_megatron.trainer.steps import optimizer_step
from grpo_megatron.trainer.steps.recorded_batch import sample_batch
from grpo_megatron.trainer.steps.references import References
from grpo_megatron.trainer.steps.rl_update import Training
from grpo_megatron.weights.gather import Shard
from tests.integration import trainer_side
from tests.trainer.critic_ranks import without_times
from tests.trainer.lora_ranks import draw_adapters, gathered
from tests.trainer.trainer_ranks import OPTIMIZER, Setup
from tests.trainer.worker_group import fresh_store

HEAD = "value_head.weight"


def _head_of(setup: Setup) -> torch.nn.Parameter | None:
    """The head, on ranks of the last pipeline stage."""
    for model in setup.policy.models:
        if model.has_value_head:
            return model.value_head.weight
    return None


def _on_rank_0(found: np.ndarray | None) -> np.ndarray:
    """What a rank of the last stage has, all of which have the same."""
    of_ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(of_ranks, found)
    there = [one for one in of_ranks if one is not None]
    for other in there[1:]:
        np.testing.assert_array_equal(other, there[0])
    return there[0]


def train_both(
    model: str,
    samples: str,
    layout: dict[str, Any],
    *,
    gradients: bool = False,
    lora: dict[str, Any] | None = None,
    loss_weight: float = 0.5,
    preset: str = "ppo",
) -> dict[str, Any]:
    """All updates of a step: values, metrics and weights after them; or, with `gradients`, the
    averaged gradients of the last update before clipping."""
    if gradients:
        layout = {**layout, "distributed_optimizer": False}
    adapters = LoraConfig(**lora) if lora else None
    setup = Setup(model, layout, lora=adapters, has_value_head=True)
    if lora:
        draw_adapters(setup)
    critic = CriticConfig(trunk="policy", loss_weight=loss_weight)
    slow = OPTIMIZER.model_copy(update={"lr": 1e-4})  # Adam amplifies rounding
    config = setup.config(preset=preset)
    config = config.model_copy(update={"critic": critic, "lora": adapters, "optimizer": slow})
    training = Training(config, setup.policy, References(config), SampleTable(Path(samples)), {})
    report = training.run(0, 3)

    shards: list[Shard] = setup.shards
    if lora:
        shards = list(adapter_model(setup.policy).shards)
    head = _head_of(setup)
    of_head = None
    if head is not None:
        of_head = head.detach().float().numpy().copy()
    if gradients:
        scale = max(report.grad_norms[-1] / OPTIMIZER.clip_grad, 1.0)
        shards = [replace(one, tensor=one.tensor.main_grad * scale) for one in shards]
        if head is not None:
            of_head = (head.main_grad * scale).float().numpy().copy()
    tensors = gathered(setup, shards) if lora else setup.gather(shards)
    of_head = _on_rank_0(of_head)
    if dist.get_rank() == 0:
        tensors[HEAD] = of_head
    return {
        "losses": report.losses,
        "norms": report.grad_norms,
        "metrics": without_times(report),
        "values": training.batch.tokens["values"].numpy(),
        "returns": training.value_targets.returns.numpy(),
        "tensors": tensors,
    }


def states_and_head(model: str, samples: str) -> dict[str, np.ndarray]:
    """Of all policy tokens, what the output layer gets, [n, H], the head's first weights, and the
    values; of one rank."""
    setup = Setup(model, {"share_prefixes": False}, has_value_head=True)
    batch = setup.batch(samples)
    [chunk] = setup.policy.models
    everything = sample_batch(setup.config(preset="ppo"), SampleTable(Path(samples)))
    found = optimizer_step.logprob_pass(setup.policy, batch, values=True)
    plain = optimizer_step.logprob_pass(setup.policy, batch, squared_probs=True)
    both = optimizer_step.logprob_pass(setup.policy, batch, squared_probs=True, values=True)
    for output, without, all_rows in zip(found, plain, both, strict=True):
        assert len(output) == 3 and len(without) == 3 and len(all_rows) == 4
        assert torch.equal(output[:2], without[:2])
        assert torch.equal(all_rows[:3], without)
        assert torch.equal(all_rows[3], output[2])
    values = optimizer_step.gather_tokens(everything, [batch], [[one[-1] for one in found]])
    chunk.answers_states = True
    states = optimizer_step.logprob_pass(setup.policy, batch)
    chunk.answers_states = False
    columns = []
    for place in range(states[0].shape[1]):
        of_place = [[one[:, place] for one in states]]
        columns.append(optimizer_step.gather_tokens(everything, [batch], of_place))
    return {
        "states": torch.stack(columns, dim=1).numpy(),
        "head": chunk.value_head.weight.detach().numpy(),
        "values": values.numpy(),
    }


def _config(layout: dict[str, Any], **settings: Any) -> RunConfig:
    return RunConfig.model_validate(
        {
            "name": "case",
            "model": {"preset": "tiny-qwen3-moe"},
            "optimizer": {"lr": 1e-3},
            "trainer": {"precision": "float32", "num_threads": 1, **layout},
            "objective": {"preset": "ppo"},
            "critic": {"trunk": "policy"},
            "domains": [
                {"name": name, "source": "file", "path": "x", "rewards": [{"function": "a:b"}]}
                for name in ("even", "odd")
            ],
            **settings,
        }
    )


def _all_tensors() -> list[torch.Tensor]:
    tensors = []
    for model in trainer_side._service.policy.models:
        tensors += [parameter.detach().clone() for parameter in model.parameters()]
    return tensors


def resume(
    model: str,
    samples: str,
    layout: dict[str, Any],
    root: str,
    settings: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Train, save, train on; then load in a fresh trainer, and train on; then export."""
    config = _config(layout, **(settings or {}))
    training = Train(directory=Path(samples), first_update=0, num_updates=9, state={})
    directory = Path(root) / "step_000002"
    trainer_side.start(config, model)
    trainer_side.execute(ResetOptimizer(cold_start=False))
    trainer_side.execute(SnapshotReference())
    for _ in range(2):
        trainer_side.execute(training)
    trainer_side.execute(SaveCheckpoint(directory=directory, state={"step": 2}))
    expected = without_times(trainer_side.execute(training))
    expected_tensors = _all_tensors()
    trainer_side.start(config, model)
    loaded = trainer_side.execute(LoadCheckpoint(directory))
    found = without_times(trainer_side.execute(training))
    pairs = zip(_all_tensors(), expected_tensors, strict=True)
    is_equal = all(torch.equal(one, other) for one, other in pairs)
    export = Path(root) / "export"
    trainer_side.execute(ExportModel(export))
    converted = Path(root) / "converted"
    of_ranks = {key: value for key, value in layout.items() if key in LAYOUT_KEYS}
    job = ConversionJob(str(directory), str(converted), to="hf", layout=of_ranks, probe=False)
    convert(job, RankInfo.from_environment(), fresh_store())
    return {
        "loaded": loaded,
        "found": found,
        "expected": expected,
        "is_equal": is_equal,
        "folders": sorted(path.name for path in directory.iterdir() if path.is_dir()),
        "export": str(export),
        "converted": str(converted),
    }


def load_others(model: str, root: str) -> list[str]:
    """What a trainer says of checkpoints with a value head where it has none, the other way round,
    and, of the latter, in one that samples only and in one that begins with it."""
    with_head = _config({})
    without = _config({}, critic=None, objective={"preset": "grpo"})
    directories = [Path(root) / "with" / "step_000001", Path(root) / "without" / "step_000001"]
    for config, directory in zip((with_head, without), directories, strict=True):
        trainer_side.start(config, model)
        trainer_side.execute(SaveCheckpoint(directory=directory, state={"step": 1}))
    samples_only = without.model_copy(update={"kind": "eval"})
    said = []
    for config, directory in (
        (without, directories[0]),
        (with_head, directories[1]),
        (samples_only, directories[0]),
    ):
        trainer_side.start(config, model)
        try:
            trainer_side.execute(LoadCheckpoint(directory))
            said.append("")
        except CheckpointError as error:
            said.append(str(error))
    for config, directory in ((without, directories[0]), (with_head, directories[1])):
        trainer_side.start(config, str(directory))  # the language model alone is read
    return said
