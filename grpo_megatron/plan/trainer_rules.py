"""Layouts that Megatron-Core refuses, hangs on, or computes wrong without saying so. What is said
about each: `config/rules.toml`."""

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
    size = t.etp * t.expert_parallel_size * t.pipeline_parallel_size
    if (t.expert_parallel_size == 1 and t.expert_tensor_parallel_size is None) or (
            t.num_ranks % size == 0):
        return None  # without EP and ETP this is the rule of attention_world
    fits_alone = t.num_ranks % (t.expert_parallel_size * t.pipeline_parallel_size) == 0
    return {"size": size, "hint": "set trainer.expert_tensor_parallel_size=1, so that experts are "
            "not split by TP as well; or " if fits_alone else "",
            "field": "expert_tensor_parallel_size" if t.expert_parallel_size == 1 else
            "expert_parallel_size"}


def _splits_experts_unevenly(c: Case) -> bool:
    return c.facts.is_moe and c.facts.moe_intermediate_size % c.trainer.etp != 0


def _heads_divide(c: Case) -> _Found:
    size, f = c.trainer.tensor_parallel_size, c.facts
    kv_heads = f.num_heads if f.is_mla else f.num_kv_heads
    return {"kv_heads": kv_heads} if f.num_heads % size or kv_heads % size else None


def _given_stages(c: Case) -> dict[str, int]:
    """Layers of the first and the last pipeline stage where they are given."""
    values = {field: getattr(c.trainer, field)
              for field in ("first_stage_layers", "last_stage_layers")}
    return {field: layers for field, layers in values.items() if layers is not None}


def _stages_divide(c: Case) -> bool:
    return (not _given_stages(c) and not _alone(c)
            and c.facts.num_layers % c.trainer.pipeline_parallel_size != 0)


def _chunks_divide(c: Case) -> _Found:
    pp, vpp = c.trainer.pipeline_parallel_size, c.trainer.virtual_pipeline_parallel_size or 1
    fits = pp == 1 or c.facts.num_layers % pp or c.facts.num_layers % (pp * vpp) == 0
    return None if fits or _given_stages(c) else {"size": pp * vpp}


def _ends_leave(c: Case) -> _Found:
    """Where layers of end stages are given: what they leave does not fit the other stages."""
    given, pp = _given_stages(c), c.trainer.pipeline_parallel_size
    left, stages = c.facts.num_layers - sum(given.values()), pp - len(given)
    misfit = pp < 2 or left < stages or (left % stages if stages else left)
    if not given or _alone(c) or not misfit:
        return None
    field = next(iter(given))
    return {"field": field, "left": left, "stages": stages,
            "fix": f"remove trainer.{field}" if pp < 2 else ""}


def _uneven_chunks(c: Case) -> _Found:
    given, vpp = _given_stages(c), c.trainer.virtual_pipeline_parallel_size or 1
    if not given or _alone(c) or _ends_leave(c):
        return None
    stages = c.trainer.pipeline_parallel_size - len(given)
    inner = (c.facts.num_layers - sum(given.values())) // stages if stages else 0
    return {"field": next(iter(given))} if any(n % vpp for n in (*given.values(), inner)) else None


def _alone(c: Case) -> bool:
    """Virtual stages without pipeline stages: told by a rule of its own."""
    return (c.trainer.virtual_pipeline_parallel_size or 1) > 1 and (
        c.trainer.pipeline_parallel_size == 1)


def _needs_sequence_parallel(c: Case) -> _Found:
    if c.trainer.tensor_parallel_size == 1 or c.trainer.sp:
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
    "virtual_pipeline": _alone,
    "layers_divide.pp": _stages_divide,
    "layers_divide.vpp": _chunks_divide,
    "layers_divide.ends": _ends_leave,
    "layers_divide.chunks": _uneven_chunks,
    "sequence_parallel.alone": lambda c: (
        c.trainer.sequence_parallel and c.trainer.tensor_parallel_size == 1),
    "sequence_parallel.needed": _needs_sequence_parallel,
    "context_parallel.engine": lambda c: (
        c.trainer.context_parallel_size > 1 and not c.engines.transformer_engine),
    # it would train every sample several times, silently
    "context_parallel.packed": lambda c: (
        c.trainer.context_parallel_size > 1 and c.engines.transformer_engine),
}
