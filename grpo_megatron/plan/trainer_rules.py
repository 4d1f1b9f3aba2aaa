"""Layouts that Megatron-Core refuses, hangs on, or computes wrong without saying so. What is said
about each: `config/rules.toml`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from grpo_megatron.config.rules import Conditions
from grpo_megatron.plan.case import Case

_Found = Mapping[str, Any] | None


def _attention_world(c: Case) -> _Found:
    t = c.trainer
    size = t.tensor_parallel_size * t.pipeline_parallel_size * t.context_parallel_size
    if t.num_ranks % size == 0:
        return None
    below = t.num_ranks // size * size
    return {"size": size, "nearest": [value for value in (below, below + size) if value]}


def _expert_world(c: Case) -> _Found:
    t = c.trainer
    size = c.etp * t.expert_parallel_size * t.pipeline_parallel_size
    if (t.expert_parallel_size == 1 and t.expert_tensor_parallel_size is None) or (
            t.num_ranks % size == 0):
        return None  # without EP and ETP this is the rule of attention_world
    fits_alone = t.num_ranks % (t.expert_parallel_size * t.pipeline_parallel_size) == 0
    return {"size": size, "hint": "set trainer.expert_tensor_parallel_size=1, so that experts are "
            "not split by TP as well; or " if fits_alone else "",
            "field": "expert_tensor_parallel_size" if t.expert_parallel_size == 1 else
            "expert_parallel_size"}


def _splits_experts_unevenly(c: Case) -> bool:
    return c.facts.is_moe and c.facts.moe_intermediate_size % c.etp != 0


def _heads_divide(c: Case) -> _Found:
    size, f = c.trainer.tensor_parallel_size, c.facts
    kv_heads = f.num_heads if f.is_mla else f.num_kv_heads
    return {"kv_heads": kv_heads} if f.num_heads % size or kv_heads % size else None


def _chunks_divide(c: Case) -> _Found:
    pp, vpp = c.trainer.pipeline_parallel_size, c.trainer.virtual_pipeline_parallel_size or 1
    fits = pp == 1 or c.facts.num_layers % pp or c.facts.num_layers % (pp * vpp) == 0
    return None if fits else {"size": pp * vpp}


def _needs_sequence_parallel(c: Case) -> _Found:
    if c.trainer.tensor_parallel_size == 1 or c.sequence_parallel:
        return None
    layers = "MoE layers" if c.facts.is_moe else "latent attention (MLA)"
    return {"layers": layers} if c.facts.is_moe or c.facts.is_mla else None


RULES: Conditions = {
    "attention_world": _attention_world,
    "expert_world": _expert_world,
    "experts_needed.ep": lambda c: c.trainer.expert_parallel_size > 1 and not c.facts.num_experts,
    "experts_divide": lambda c: (
        c.facts.num_experts and c.facts.num_experts % c.trainer.expert_parallel_size),
    "experts_needed.etp": lambda c: (
        (c.trainer.expert_tensor_parallel_size or 1) > 1 and not c.facts.is_moe),
    "expert_width.etp": lambda c: (
        c.trainer.expert_tensor_parallel_size is not None and _splits_experts_unevenly(c)),
    "expert_width.tp": lambda c: (
        c.trainer.expert_tensor_parallel_size is None and _splits_experts_unevenly(c)),
    "heads_divide": _heads_divide,
    "mlp_width": lambda c: (
        c.facts.has_dense_layers and c.facts.intermediate_size % c.trainer.tensor_parallel_size),
    "shared_expert_width": lambda c: (
        c.facts.shared_expert_intermediate_size % c.trainer.tensor_parallel_size),
    "virtual_pipeline": lambda c: (
        c.trainer.virtual_pipeline_parallel_size and c.trainer.pipeline_parallel_size == 1),
    "layers_divide.pp": lambda c: c.facts.num_layers % c.trainer.pipeline_parallel_size,
    "layers_divide.vpp": _chunks_divide,
    "sequence_parallel.alone": lambda c: (
        c.trainer.sequence_parallel and c.trainer.tensor_parallel_size == 1),
    "sequence_parallel.needed": _needs_sequence_parallel,
    "context_parallel.engine": lambda c: (
        c.trainer.context_parallel_size > 1 and not c.engines.transformer_engine),
    # it would train every sample several times, silently
    "context_parallel.packed": lambda c: (
        c.trainer.context_parallel_size > 1 and c.engines.transformer_engine),
}
