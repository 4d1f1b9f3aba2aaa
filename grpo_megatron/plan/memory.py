"""A recipe's plan: memory of every stage's fullest rank, and what a step moves and writes."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

from grpo_megatron.config.presets import load_preset
from grpo_megatron.config.problems import Violation
from grpo_megatron.config.run import ModelConfig, RunConfig
from grpo_megatron.config.trainer import TrainerConfig
from grpo_megatron.plan.activations import (
    Workload,
    activation_bytes,
    communication_bytes,
    head_bytes,
    routing_bytes,
    step_bytes,
)
from grpo_megatron.plan.engine_memory import EngineMemory, engine_memory, utilisation
from grpo_megatron.plan.model_facts import configuration_of
from grpo_megatron.plan.static import ranks_of_stage, static_bytes
from grpo_megatron.plan.weights import Sizes, sizes_of, weights_of_chunk

_GIB = 2**30


@dataclass(frozen=True, slots=True)
class StageMemory:
    """Bytes of the fullest rank of a pipeline stage."""

    stage: int
    rank: int
    weights: int
    gradients: int
    optimizer: int
    buffers: int
    activations: int
    logits: int
    routing: int
    communication: int

    @property
    def total(self) -> int:
        parts = asdict(self)
        return sum(parts[name] for name in parts if name not in ("stage", "rank"))


@dataclass(frozen=True, slots=True)
class Plan:
    """What a recipe needs."""

    device: str
    device_bytes: int | None
    """Of a GPU; None on a CPU."""
    usable_bytes: int | None
    stages: tuple[StageMemory, ...]
    engine: EngineMemory
    num_parameters: int
    num_microbatches: int
    """Of a data-parallel rank and update, at full length."""
    bubble_fraction: float
    tokens_per_step: int
    """At full length."""
    publish_bytes: int
    checkpoint_bytes: int
    sample_store_bytes: int
    """Of a step at full length: ids, log-probs, routes."""
    reference_host_bytes: int
    """Reference weights that a rank keeps in host memory."""

    @property
    def worst(self) -> StageMemory:
        return max(self.stages, key=lambda stage: stage.total)


@cache
def device_table() -> Mapping[str, Any]:
    """`devices.toml`."""
    return tomllib.loads(Path(__file__).with_name("devices.toml").read_text(encoding="utf-8"))


def plan_of(config: RunConfig, device: str = "h100-80g") -> Plan:
    """The plan of a valid recipe.

    Args:
        device: Name in `devices.toml`, for recipes with `placement.gpus_per_node`.
    """
    return plan_sizes(config, sizes_for(config), device)


def sizes_for(config: RunConfig) -> Sizes:
    """Of the recipe's model and layout."""
    hf, _ = configuration_of(config.model)
    return sizes_of(hf, hf.get("vocab_size") or _made_vocabulary(config.model), config.trainer)


def _made_vocabulary(model: ModelConfig) -> int:
    """Tokens of a preset's own tokenizer: padding, end of text, characters, fillers."""
    table = load_preset(model.preset).tokenizer
    multiple = table.get("pad_to_multiple", 32)
    return -(-(2 + len(table["alphabet"])) // multiple) * multiple


def plan_sizes(config: RunConfig, sizes: Sizes, device: str) -> Plan:
    """The same for sizes that are known."""
    trainer, batch, table = config.trainer, config.batch, device_table()
    whole = Sizes(sizes.model, sizes.vocab_size, sizes.is_tied, TrainerConfig(), sizes.moe_layers)
    numel = sum(w.numel for w in weights_of_chunk(whole, 0, 0))
    on_gpu = config.placement.gpus_per_node > 0
    memory = int(table["memory"][device] * _GIB) if on_gpu else None
    usable = int((memory - table["context"] * _GIB) * (1 - table["gaps"])) if memory else None
    samples = batch.num_prompts * batch.num_samples_per_prompt
    length = config.rollout.max_model_len
    per_microbatch = max(trainer.max_tokens_per_microbatch // length, 1)
    shares = sizes.layout.data_parallel_size * per_microbatch * batch.updates_per_rollout
    count = -(-samples // shares)
    work = Workload(trainer.max_tokens_per_microbatch, length, count, on_gpu,
                    config.routing.replay != "none")
    engine = engine_memory(sizes, config.rollout, memory)
    stages = tuple(_stage(config, sizes, work, stage) for stage in range(sizes.pp))
    references = config.objective.kl != "none"
    route = len(sizes.moe_layers) * (sizes.model.get("moe_router_topk") or 0) * (
        1 if (sizes.model.get("num_moe_experts") or 0) <= 256 else 2)
    tokens = samples * length
    publish = numel * sizes.element_bytes
    return Plan(
        device if on_gpu else "cpu", memory, usable, stages, engine, numel, count,
        (sizes.pp - 1) / (count * sizes.num_chunks + sizes.pp - 1), tokens, publish,
        publish * (1 + references) + 12 * numel,
        tokens * (8 + (route if config.records_routes else 0)),
        max(stage.weights for stage in stages) if references else 0)


def _stage(config: RunConfig, s: Sizes, work: Workload, stage: int) -> StageMemory:
    frozen = config.routing.router_policy == "freeze_weights"
    ranks = ranks_of_stage(s)
    static = {rank: static_bytes(s, stage, rank, frozen_routers=frozen, overlaps=work.on_gpu)
              for rank in (ranks[0], ranks[-1])}
    rank = max(static, key=lambda rank: static[rank].total)
    found, logits = static[rank], head_bytes(s, work, stage)
    # Adam's temporaries come when activations have gone
    activations = max(activation_bytes(s, work, stage), step_bytes(s, stage) - logits)
    return StageMemory(
        stage, stage * len(ranks) + rank, found.weights, found.gradients, found.optimizer,
        found.buffers, activations, logits, routing_bytes(s, work),
        communication_bytes(s, work, found.largest_gradients))


def memory_problems(config: RunConfig, plan: Plan) -> list[Violation]:
    """What does not fit; nothing is known of a CPU's memory."""
    if plan.usable_bytes is None:
        return []
    found, worst, engine = [], plan.worst, plan.engine
    usable, shares = plan.usable_bytes, config.placement.mode == "colocated"
    if shares:
        usable -= int(utilisation(config.rollout) * plan.device_bytes)
    if worst.total > usable:
        beside = " beside the engine" if shares else ""
        found.append(Violation(
            "trainer_memory", "trainer.num_ranks", config.trainer.num_ranks,
            f"rank {worst.rank} of pipeline stage {worst.stage} needs {worst.total / _GIB:.1f} GiB"
            f", a {plan.device} has {max(usable, 0) / _GIB:.1f} GiB{beside}",
            remedy="use a layout that fits, or more trainer nodes"))
    if engine.kv_tokens < config.rollout.max_model_len:
        found.append(Violation(
            "engine_memory", "rollout.tensor_parallel_size", config.rollout.tensor_parallel_size,
            f"a GPU holds {engine.weights / _GIB:.1f} GiB of the engine's weights and leaves "
            f"{engine.kv_cache / _GIB:.1f} GiB for keys and values: {engine.kv_tokens} tokens, "
            f"and one sequence may have {config.rollout.max_model_len}",
            remedy="raise rollout.tensor_parallel_size or lower rollout.max_model_len"))
    return found
