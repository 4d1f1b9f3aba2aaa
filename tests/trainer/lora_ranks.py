"""What the worker groups execute of LoRA."""

from __future__ import annotations

import zlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from grpo_megatron.batching.store import SampleTable
from grpo_megatron.config.lora import LoraConfig
from grpo_megatron.config.run import RoutingConfig, RunConfig
from grpo_megatron.errors import CheckpointError
from grpo_megatron.trainer.megatron import platform  # noqa: F401  (before anything of Megatron)

# isort: split
from grpo_megatron.trainer.lora.peft_format import (
    adapter_model,
    export_adapters,
    import_adapters,
)
from grpo_megatron.trainer.requests import (
    ExportModel,
    LoadCheckpoint,
    ResetOptimizer,
    SaveCheckpoint,
    SnapshotReference,
    Train,
    TrainColdStart,
    TrainReport,
)
from grpo_megatron.trainer.steps.optimizer_step import logprob_pass
from grpo_megatron.trainer.steps.references import References
from grpo_megatron.trainer.steps.rl_update import Training
from grpo_megatron.weights.gather import Shard, ShardedModel
from tests.integration import trainer_side
from tests.trainer.trainer_ranks import OPTIMIZER, Setup


def draw_adapters(setup: Setup) -> None:
    """Give every B, and every magnitude, numbers that depend on its name alone, as if it had been
    trained."""
    setup.policy.begin_magnitudes()
    for shard in adapter_model(setup.policy).shards:
        if ".lora_A." in shard.name:
            continue
        generator = torch.Generator().manual_seed(zlib.crc32(shard.name.encode()))
        whole = 0.1 * torch.randn(shard.full_shape, generator=generator)
        part = whole
        if shard.dim is not None:
            part = whole.chunk(shard.size, shard.dim)[shard.rank]
        if ".lora_B." in shard.name:
            shard.tensor.data.copy_(part)
        else:
            shard.tensor.data.mul_(1 + part)
    setup.policy.optimizer.reload_model_params()


def gathered(setup: Setup, shards: list[Shard]) -> dict[str, np.ndarray]:
    """Whole adapters, by PEFT's names, on rank 0."""
    model = ShardedModel(adapter_model(setup.policy).map, shards)
    found = {}
    for name, tensor in model.stream(model.entries, [0] * len(model.entries)):
        found[name] = tensor.float().cpu().numpy().copy()
    return found


def train_adapters(
    model: str,
    samples: str,
    layout: dict[str, Any],
    lora: dict[str, Any],
    *,
    gradients: bool = False,
    replay: str = "none",
) -> dict[str, Any]:
    """All updates of recorded rollouts: losses, norms and adapters after them; or, `gradients`,
    those of the last update before clipping."""
    if gradients:
        layout = {**layout, "distributed_optimizer": False}
    setup = Setup(model, layout, lora=LoraConfig(**lora))
    draw_adapters(setup)
    base = [shard.tensor.detach().clone() for shard in setup.shards]
    config = setup.config(preset="grpo")
    config = config.model_copy(update={"routing": RoutingConfig(replay=replay)})
    table = SampleTable(Path(samples))
    report = Training(config, setup.policy, References(config), table, {}).run(0, 3)
    for shard, before in zip(setup.shards, base, strict=True):
        assert torch.equal(shard.tensor, before), f"{shard.name} is part of the base"
    shards = adapter_model(setup.policy).shards
    if gradients:
        scale = max(report.grad_norms[-1] / OPTIMIZER.clip_grad, 1.0)
        shards = [replace(s, tensor=s.tensor.main_grad * scale) for s in shards]
    return {
        "losses": report.losses,
        "norms": report.grad_norms,
        "tensors": gathered(setup, shards),
    }


def merged_logprobs(
    model: str, samples: str, layout: dict[str, Any], lora: dict[str, Any]
) -> dict[str, Any]:
    """Log-probs with adapters, without, and with weights into which they were merged."""
    setup = Setup(model, layout, lora=LoraConfig(**lora))
    batch = setup.batch(samples)

    def logprobs() -> list[np.ndarray]:
        return [output[0].numpy().copy() for output in logprob_pass(setup.policy, batch)]

    setup.policy.begin_magnitudes()
    fresh = logprobs()
    draw_adapters(setup)
    adapted = logprobs()
    with setup.policy.without_adapters():
        off = logprobs()
    setup.policy.sharded.prepare()
    merged = [shard.value().clone() for shard in setup.shards]
    for shard, value in zip(setup.shards, merged, strict=True):
        shard.tensor.data.copy_(value)
    with setup.policy.without_adapters():
        of_merged = logprobs()
    dist.barrier()
    return {"fresh": fresh, "adapted": adapted, "off": off, "merged": of_merged}


def merged_weights(
    model: str, layout: dict[str, Any], lora: dict[str, Any]
) -> dict[str, dict[str, np.ndarray]]:
    """Whole weights without adapters, the adapters, and weights with them; on rank 0."""
    setup = Setup(model, layout, lora=LoraConfig(**lora))
    draw_adapters(setup)
    return {
        "base": gathered_weights(setup.policy.base),
        "adapters": gathered(setup, adapter_model(setup.policy).shards),
        "merged": gathered_weights(setup.policy.sharded),
    }


def gathered_weights(model: ShardedModel) -> dict[str, np.ndarray]:
    found = {}
    for name, tensor in model.stream(model.entries, [0] * len(model.entries)):
        found[name] = tensor.float().cpu().numpy().copy()
    return found


def service_run(
    model: str,
    samples: str,
    layout: dict[str, Any],
    root: str,
    *,
    lora: dict[str, Any],
    cold_start: bool = False,
    reference_interval: int = 0,
) -> dict[str, Any]:
    """What a run does: cold start or not, train, save, export; and a resumed one after it."""
    config = service_config(layout, lora, cold_start, reference_interval)
    training = Train(directory=Path(samples), first_update=0, num_updates=9, state={})
    checkpoint = Path(root) / "step_000001"
    trainer_side.start(config, model)
    if cold_start:
        trainer_side.execute(ResetOptimizer(cold_start=True))
        trainer_side.execute(TrainColdStart(directory=Path(samples), first_update=0))
        trainer_side.execute(ResetOptimizer(cold_start=False))
    trainer_side.execute(SnapshotReference())
    first = _timeless(trainer_side.execute(training))
    trainer_side.execute(SaveCheckpoint(directory=checkpoint, state={"step": 1}))
    trainer_side.execute(ExportModel(Path(root) / "export"))
    second = trainer_side.execute(training)
    expected = _timeless(second)
    trainer_side.start(config, model)
    state = trainer_side.execute(LoadCheckpoint(checkpoint))
    found = _timeless(trainer_side.execute(training))
    return {
        "first": first,
        "expected": expected,
        "found": found,
        "state": state,
        "losses": second.losses,
        "norms": second.grad_norms,
    }


def resumed(
    model: str, samples: str, layout: dict[str, Any], lora: dict[str, Any], checkpoint: str
) -> dict[str, list[float]]:
    """Train on from a checkpoint of any layout."""
    trainer_side.start(service_config(layout, lora), model)
    trainer_side.execute(LoadCheckpoint(Path(checkpoint)))
    training = Train(directory=Path(samples), first_update=0, num_updates=9, state={})
    report = trainer_side.execute(training)
    return {"losses": report.losses, "norms": report.grad_norms}


def _timeless(report: TrainReport) -> dict[str, float]:
    metrics = dict(report.metrics)
    metrics.pop("trainer/peak_memory_gib")
    return metrics


def service_config(
    layout: dict[str, Any],
    lora: dict[str, Any],
    cold_start: bool = False,
    reference_interval: int = 0,
) -> RunConfig:
    """A recipe with adapters and a KL to the reference."""
    domains = []
    for name in ("even", "odd"):
        rewards = [{"function": "a:b"}]
        domains.append({"name": name, "source": "file", "path": "x", "rewards": rewards})
    return RunConfig.model_validate(
        {
            "name": "case",
            "model": {"preset": "tiny-qwen3-moe"},
            "optimizer": {"lr": 1e-2},
            "trainer": {"precision": "float32", "num_threads": 1, **layout},
            "objective": {
                "preset": "grpo",
                "kl": "k3",
                "kl_beta": 0.1,
                "reference_interval": reference_interval,
            },
            "cold_start": {"target_accuracy": 0.5, "max_steps": 5} if cold_start else None,
            "lora": lora,
            "domains": domains,
        }
    )


def import_again(
    model: str, samples: str, layout: dict[str, Any], lora: dict[str, Any], adapter: str
) -> dict[str, Any]:
    """Read an adapter in PEFT's format at a layout; write it again, or say why it is refused."""
    settings = {**lora, "path": adapter}
    try:
        trainer_side.start(service_config(layout, settings), model)
    except CheckpointError as error:
        return {"error": str(error)}
    report = trainer_side.execute(
        Train(directory=Path(samples), first_update=0, num_updates=9, state={})
    )
    return {"metrics": _timeless(report)}


def write_again(
    model: str, layout: dict[str, Any], lora: dict[str, Any], adapter: str, target: str
) -> None:
    """Read an adapter in PEFT's format at a layout and write it."""
    setup = Setup(model, layout, lora=LoraConfig(**lora))
    import_adapters(setup.policy, Path(adapter))
    export_adapters(setup.policy, Path(target), "base")
