"""Layouts that vLLM refuses or dies of, some of them only in its CPU build."""

from __future__ import annotations

from collections.abc import Iterator

from grpo_megatron.config.problems import Violation
from grpo_megatron.plan.case import Case

_TP = "rollout.tensor_parallel_size"
_ALL_LOGPROBS = 1024
"""Largest vocabulary of which all log-probs may be asked for with every token."""
_CPU_MULTIPLE = 32
"""vLLM's CPU kernels block matrices by this many columns."""


def heads_divide(case: Case) -> Iterator[Violation]:
    size, facts = case.rollout.tensor_parallel_size, case.facts
    heads, kv_heads = facts.num_heads, facts.num_kv_heads
    # vLLM splits key-value heads over ranks, or repeats each on an equal number of ranks
    kv_fits = facts.is_mla or kv_heads % size == 0 or size % kv_heads == 0
    if heads % size or not kv_fits:
        yield case.violation("rollout_heads", _TP,
                             f"the model's {heads} attention heads must be divisible by TP = "
                             f"{size}, and its {kv_heads} key-value heads by TP or TP by them")


def widths_divide(case: Case) -> Iterator[Violation]:
    size = case.rollout.tensor_parallel_size
    for what, width in _widths(case).items():
        if width % size:
            yield case.violation("rollout_width", _TP,
                                 f"the {what} {width} must be divisible by TP = {size}")


def cpu_multiples(case: Case) -> Iterator[Violation]:
    if not case.engines.cpu:
        return
    size, multiple = case.rollout.tensor_parallel_size, _CPU_MULTIPLE
    for what, width in {"hidden size": case.facts.hidden_size, **_widths(case)}.items():
        if width % multiple:
            yield case.violation("cpu_multiples", _TP,
                                 f"vLLM's CPU build needs a {what} that is a multiple of "
                                 f"{multiple}; the model's is {width}",
                                 remedy="use another model, or a GPU")
        elif width % size == 0 and width // size % multiple:
            yield case.violation("cpu_multiples", _TP,
                                 f"vLLM's CPU build needs a {what} that is a multiple of "
                                 f"{multiple} on every rank; {width} / TP = {width // size}")


def _widths(case: Case) -> dict[str, int]:
    facts = case.facts
    widths = {"MLP width": facts.intermediate_size if facts.has_dense_layers else 0,
              "expert width": facts.moe_intermediate_size,
              "shared expert width": facts.shared_expert_intermediate_size}
    return {what: width for what, width in widths.items() if width}


def routes(case: Case) -> Iterator[Violation]:
    if case.rollout.record_routes and not case.facts.is_moe:
        yield case.violation("record_routes", "rollout.record_routes",
                             f"the model ({case.facts.model_type}) has no experts, so there are "
                             "no routes", nearest=(False,))


def context_length(case: Case) -> Iterator[Violation]:
    longest = case.facts.max_position_embeddings
    if longest is not None and case.rollout.max_model_len > longest:
        yield case.violation("context_length", "rollout.max_model_len",
                             f"the model has positions for {longest} tokens", nearest=(longest,))


def truncation_bound(case: Case) -> Iterator[Violation]:
    """Which ids were kept is read from log-probs, so their number must be bounded."""
    truncation, vocabulary = case.rollout.truncation, case.facts.vocab_size
    reported = truncation.get("logprobs", 0)
    if vocabulary is None:
        return
    if reported > vocabulary:
        largest = max((vocabulary - 8) * 4 // 5, 1)
        yield case.violation("truncation_bound", "rollout.top_k",
                             f"with a vocabulary of {vocabulary} at most {largest} can be bounded",
                             nearest=(largest,), remedy="lower or remove rollout.top_k")
    if reported < 0 and vocabulary > _ALL_LOGPROBS:
        key = "rollout.top_p" if "top_p" in truncation else "rollout.min_p"
        yield case.violation("truncation_bound", key,
                             "the trainer needs the ids that were kept; without top_k there may be "
                             f"as many as the vocabulary has ({vocabulary}, allowed is "
                             f"{_ALL_LOGPROBS})", "rollout.top_k",
                             remedy="set rollout.top_k too, for example 100, or sample untruncated")


RULES = (heads_divide, widths_divide, cpu_multiples, routes, context_length, truncation_bound)
