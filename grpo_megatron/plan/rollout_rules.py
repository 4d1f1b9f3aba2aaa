"""Layouts that vLLM refuses or dies of, some of them only in its CPU build. What is said about
each: `config/rules.toml`."""

from typing import Any

from grpo_megatron.config.rules import Conditions
from grpo_megatron.plan.case import Case

_ALL_LOGPROBS = 1024
"""Largest vocabulary of which all log-probs may be asked for with every token."""
_CPU_MULTIPLE = 32
"""vLLM's CPU kernels block matrices by this many columns."""


def _heads_do_not_fit(c: Case) -> bool:
    size, f = c.rollout.tensor_parallel_size, c.facts
    # vLLM splits key-value heads over ranks, or repeats each on an equal number of ranks
    kv_fits = f.is_mla or f.num_kv_heads % size == 0 or size % f.num_kv_heads == 0
    return f.num_heads % size != 0 or not kv_fits


def _widths(c: Case) -> list[dict[str, Any]]:
    f = c.facts
    widths = {"MLP width": f.intermediate_size if f.has_dense_layers else 0,
              "expert width": f.moe_intermediate_size,
              "shared expert width": f.shared_expert_intermediate_size}
    return [{"what": what, "width": width, "part": width // c.rollout.tensor_parallel_size,
             "multiple": _CPU_MULTIPLE} for what, width in widths.items() if width]


def _cpu_widths(c: Case) -> list[dict[str, Any]]:
    width = c.facts.hidden_size
    hidden = {"what": "hidden size", "width": width, "multiple": _CPU_MULTIPLE,
              "part": width // c.rollout.tensor_parallel_size}
    return [hidden, *_widths(c)] if c.engines.cpu else []


def _context_length(c: Case) -> dict[str, Any] | None:
    longest = c.facts.max_position_embeddings
    too_long = longest is not None and c.rollout.max_model_len > longest
    return {"nearest": [longest]} if too_long else None


def _truncation_too_wide(c: Case) -> dict[str, Any] | None:
    vocabulary = c.facts.vocab_size
    if vocabulary is None or c.rollout.truncation.get("logprobs", 0) <= vocabulary:
        return None
    return {"nearest": [max((vocabulary - 8) * 4 // 5, 1)]}


def _truncation_unbounded(c: Case) -> dict[str, Any] | None:
    """Which ids were kept is read from log-probs, so their number must be bounded."""
    truncation, vocabulary = c.rollout.truncation, c.facts.vocab_size
    if vocabulary is None or truncation.get("logprobs", 0) >= 0 or vocabulary <= _ALL_LOGPROBS:
        return None
    return {"field": "top_p" if "top_p" in truncation else "min_p", "limit": _ALL_LOGPROBS}


RULES: Conditions = {
    "rollout_heads": _heads_do_not_fit,
    "rollout_width": lambda c: [
        w for w in _widths(c) if w["width"] % c.rollout.tensor_parallel_size],
    "cpu_multiples.model": lambda c: [w for w in _cpu_widths(c) if w["width"] % _CPU_MULTIPLE],
    "cpu_multiples.rank": lambda c: [
        w for w in _cpu_widths(c) if w["width"] % _CPU_MULTIPLE == 0
        and w["width"] % c.rollout.tensor_parallel_size == 0 and w["part"] % _CPU_MULTIPLE],
    "record_routes": lambda c: c.rollout.record_routes and not c.facts.is_moe,
    "context_length": _context_length,
    "truncation_bound.vocabulary": _truncation_too_wide,
    "truncation_bound.open": _truncation_unbounded,
}
