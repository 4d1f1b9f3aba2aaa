"""Layouts that Megatron-Core refuses, hangs on, or computes wrong without saying so."""

from __future__ import annotations

from collections.abc import Iterator

from grpo_megatron.config.problems import Violation
from grpo_megatron.plan.case import Case

_RANKS = "trainer.num_ranks"
_TP = "trainer.tensor_parallel_size"
_PP = "trainer.pipeline_parallel_size"
_FIRST = "trainer.first_stage_layers"
_LAST = "trainer.last_stage_layers"
_VPP = "trainer.virtual_pipeline_parallel_size"
_CP = "trainer.context_parallel_size"
_EP = "trainer.expert_parallel_size"
_ETP = "trainer.expert_tensor_parallel_size"
_SP = "trainer.sequence_parallel"


def attention_world(case: Case) -> Iterator[Violation]:
    t = case.trainer
    size = t.tensor_parallel_size * t.pipeline_parallel_size * t.context_parallel_size
    if t.num_ranks % size:
        above = -(-t.num_ranks // size) * size
        below = t.num_ranks // size * size
        yield case.violation(
            "attention_world", _RANKS,
            f"num_ranks must be a multiple of TP x PP x CP = {t.tensor_parallel_size} x "
            f"{t.pipeline_parallel_size} x {t.context_parallel_size} = {size}", _TP, _PP, _CP,
            nearest=tuple(value for value in (below, above) if value))


def expert_world(case: Case) -> Iterator[Violation]:
    t = case.trainer
    size = case.etp * t.expert_parallel_size * t.pipeline_parallel_size
    if (t.expert_parallel_size == 1 and t.expert_tensor_parallel_size is None) or (
            t.num_ranks % size == 0):
        return  # without EP and ETP this is the rule of attention_world
    remedy = f"change {_EP} or {_RANKS}"
    if t.num_ranks % (t.expert_parallel_size * t.pipeline_parallel_size) == 0:
        remedy = f"set {_ETP}=1, so that experts are not split by TP as well; or {remedy}"
    key = _ETP if t.expert_parallel_size == 1 else _EP
    yield case.violation(
        "expert_world", key,
        f"ETP x EP x PP = {case.etp} x {t.expert_parallel_size} x {t.pipeline_parallel_size} = "
        f"{size} must divide num_ranks = {t.num_ranks}", _RANKS, _ETP, _TP, _PP, remedy=remedy)


def experts_divide(case: Case) -> Iterator[Violation]:
    size, experts = case.trainer.expert_parallel_size, case.facts.num_experts
    if size > 1 and not experts:
        yield case.violation("experts_needed", _EP,
                             f"the model ({case.facts.model_type}) has no experts to split",
                             nearest=(1,))
    elif experts and experts % size:
        yield case.violation("experts_divide", _EP,
                             f"the model's {experts} experts must be divisible by EP = {size}")


def expert_tensor(case: Case) -> Iterator[Violation]:
    size, facts = case.trainer.expert_tensor_parallel_size, case.facts
    if size is not None and size > 1 and not facts.is_moe:
        yield case.violation("experts_needed", _ETP,
                             f"the model ({facts.model_type}) has no experts to split",
                             nearest=(1,))
    elif facts.is_moe and facts.moe_intermediate_size % case.etp:
        yield case.violation("expert_width", _TP if size is None else _ETP,
                             f"the experts' width {facts.moe_intermediate_size} must be divisible "
                             f"by ETP = {case.etp}", *([_ETP] if size is None else []))


def heads_divide(case: Case) -> Iterator[Violation]:
    size, facts = case.trainer.tensor_parallel_size, case.facts
    kv_heads = facts.num_heads if facts.is_mla else facts.num_kv_heads
    if facts.num_heads % size or kv_heads % size:
        yield case.violation("heads_divide", _TP,
                             f"the model's {facts.num_heads} attention heads and {kv_heads} "
                             f"key-value heads must both be divisible by TP = {size}")


def widths_divide(case: Case) -> Iterator[Violation]:
    size, facts = case.trainer.tensor_parallel_size, case.facts
    if facts.has_dense_layers and facts.intermediate_size % size:
        yield case.violation("mlp_width", _TP,
                             f"the MLP width {facts.intermediate_size} must be divisible by "
                             f"TP = {size}")
    if facts.shared_expert_intermediate_size % size:
        yield case.violation("shared_expert_width", _TP,
                             f"the shared experts' width {facts.shared_expert_intermediate_size} "
                             f"must be divisible by TP = {size}")


def layers_divide(case: Case) -> Iterator[Violation]:
    t, layers = case.trainer, case.facts.num_layers
    pp, vpp = t.pipeline_parallel_size, t.virtual_pipeline_parallel_size or 1
    if vpp > 1 and pp == 1:
        yield case.violation("virtual_pipeline", _VPP,
                             "virtual pipeline stages need pipeline_parallel_size > 1", _PP,
                             remedy=f"remove {_VPP} (or set it to null), or raise {_PP}")
    elif t.first_stage_layers is not None or t.last_stage_layers is not None:
        yield from _uneven_stages(case)
    elif layers % pp:
        yield case.violation("layers_divide", _PP,
                             f"the model's {layers} layers must be divisible by PP = {pp}",
                             _FIRST, _LAST)
    elif layers % (pp * vpp):
        yield case.violation("layers_divide", _VPP,
                             f"the model's {layers} layers must be divisible by PP x VPP = "
                             f"{pp} x {vpp} = {pp * vpp}", _PP)


def _uneven_stages(case: Case) -> Iterator[Violation]:
    t, layers = case.trainer, case.facts.num_layers
    pp, vpp = t.pipeline_parallel_size, t.virtual_pipeline_parallel_size or 1
    ends = [n for n in (t.first_stage_layers, t.last_stage_layers) if n is not None]
    key = _FIRST if t.first_stage_layers is not None else _LAST
    left, stages = layers - sum(ends), pp - len(ends)
    if pp < 2 or left < stages or (left % stages if stages else left):
        yield case.violation("layers_divide", key,
                             f"of the model's {layers} layers, {left} are left for {stages} other "
                             f"pipeline stages and must be divisible by them", _PP,
                             remedy=f"remove {key}" if pp < 2 else "")
    elif any(n % vpp for n in (*ends, left // stages if stages else 0)):
        yield case.violation("layers_divide", _VPP,
                             f"every stage's layers must be divisible by VPP = {vpp}", key)


def sequence_parallel(case: Case) -> Iterator[Violation]:
    size, chosen = case.trainer.tensor_parallel_size, case.trainer.sequence_parallel
    if chosen and size == 1:
        yield case.violation("sequence_parallel", _SP,
                             "sequence parallelism splits along TP and needs "
                             "tensor_parallel_size > 1", _TP, nearest=(False,))
    if size > 1 and not case.sequence_parallel and (case.facts.is_moe or case.facts.is_mla):
        kind = "MoE layers" if case.facts.is_moe else "latent attention (MLA)"
        yield case.violation("sequence_parallel", _SP,
                             f"{kind} with TP = {size} need sequence parallelism", _TP,
                             nearest=(True,))


def context_parallel(case: Case) -> Iterator[Violation]:
    size = case.trainer.context_parallel_size
    if size > 1 and not case.engines.transformer_engine:
        yield case.violation("context_parallel", _CP,
                             "context parallelism needs Transformer Engine, which is not "
                             "installed", nearest=(1,), remedy=f"set {_CP}=1")
    elif size > 1:  # it would train every sample `size` times, silently
        yield case.violation("context_parallel", _CP,
                             "packed samples are not split over context-parallel ranks yet",
                             nearest=(1,), remedy=f"set {_CP}=1")


RULES = (attention_world, expert_world, experts_divide, expert_tensor, heads_divide,
         widths_divide, layers_divide, sequence_parallel, context_parallel)
