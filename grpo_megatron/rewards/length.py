"""Rewards of the number of tokens n and of repeated tokens."""

import math
from collections.abc import Mapping
from typing import Any

from grpo_megatron.rewards.registry import BoundReward, bind, needs, to_float

_EXACT_MATCH = "grpo_megatron.rewards.functions:exact_match"


def _bound(accuracy: str = _EXACT_MATCH, accuracy_arguments: Mapping[str, Any] | None = None,
           **_: object) -> BoundReward:
    return bind(accuracy, accuracy_arguments or {})


@needs(check=_bound)
def cosine_length(completion: str, answer: str, *, prompt: str, metadata: Mapping[str, Any],
                  num_tokens: int, max_tokens: int, correct: tuple[float, float] = (1.0, 0.5),
                  wrong: tuple[float, float] = (-1.0, -0.5), accuracy: str = _EXACT_MATCH,
                  accuracy_arguments: Mapping[str, Any] | None = None) -> float:
    """b + (a − b)/2 · (1 + cos(π n/L)), from a at no token to b at L and beyond
    (arXiv:2502.03373): short right answers score most, short wrong ones least. L is `max_tokens`;
    (a, b) are `correct` for answers that the reward `accuracy` (`module:function`, with
    `accuracy_arguments`) scores above 0.5, else `wrong`; NaN stays NaN."""
    score = to_float(_bound(accuracy, accuracy_arguments)(
        completion, answer, {"prompt": prompt, "metadata": metadata}))
    start, end = correct if score > 0.5 else wrong
    progress = min(num_tokens / max_tokens, 1.0)
    value = end + (start - end) / 2 * (1 + math.cos(math.pi * progress))
    return math.nan if math.isnan(score) else value


def soft_overlong(completion: str, answer: str, *, num_tokens: int, max_tokens: int,
                  buffer: int) -> float:
    """0 to L − B (max_tokens, buffer), ((L − B) − n)/B to L, then −1 (DAPO, arXiv:2503.14476)."""
    return max(-1.0, min(0.0, (max_tokens - buffer - num_tokens) / buffer))


def length_penalty(completion: str, answer: str, *, num_tokens: int, max_tokens: int) -> float:
    """−min(1, n/max_tokens). Of right answers: `cosine_length`, correct (0, −1), wrong (0, 0)."""
    return -min(1.0, num_tokens / max_tokens)


def repetition(completion: str, answer: str, *, token_ids: tuple[int, ...], n: int = 3,
               penalty: float = -1.0) -> float:
    """p · (1 − different n-grams / n-grams) of the tokens (arXiv:2502.03373); 0 below n tokens.
    p is `penalty`."""
    ngrams = list(zip(*(token_ids[i:] for i in range(n)), strict=False))
    return penalty * (1 - len(set(ngrams)) / len(ngrams)) if ngrams else 0.0
