"""How many tokens of prompts an engine did not compute, because it had their keys and values."""

from collections import Counter
from collections.abc import Mapping

from grpo_megatron.rollout.generate import GenerateAnswer, GenerateRequest

_PROMPT = "prefix_cache/prompt_tokens"
_CACHED = "prefix_cache/cached_tokens"
_CONTINUED_PROMPT = "prefix_cache/continued_prompt_tokens"
_CONTINUED_CACHED = "prefix_cache/continued_cached_tokens"


class PrefixCacheCounts:
    """Counts the tokens of prompts, and the cached ones of them, over answers that tell."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()

    def add(self, request: GenerateRequest, answer: GenerateAnswer) -> None:
        """Count the prompt of a request once for each of its completions, as an engine reads it."""
        if answer.cached_tokens is None:
            return
        num_tokens = request.n * len(request.prompt_token_ids)
        self._counts[_PROMPT] += num_tokens
        self._counts[_CACHED] += answer.cached_tokens
        if request.is_continuation:
            self._counts[_CONTINUED_PROMPT] += num_tokens
            self._counts[_CONTINUED_CACHED] += answer.cached_tokens

    def take(self) -> dict[str, float]:
        """Return the counts since the last call, which may be added up over engines and workers."""
        counts = {name: float(count) for name, count in self._counts.items()}
        self._counts.clear()
        return counts


def prefix_cache_metrics(counts: Mapping[str, float]) -> dict[str, float]:
    """Return the metrics of counts that were added up: tokens of prompts, the share of them that
    was cached, and this share of later turns and segments; without what was not counted."""
    metrics = {}
    if counts.get(_PROMPT):
        metrics[_PROMPT] = counts[_PROMPT]
        metrics["prefix_cache/hit_fraction"] = counts[_CACHED] / counts[_PROMPT]
    if counts.get(_CONTINUED_PROMPT):
        share = counts[_CONTINUED_CACHED] / counts[_CONTINUED_PROMPT]
        metrics["prefix_cache/continued_hit_fraction"] = share
    return metrics
