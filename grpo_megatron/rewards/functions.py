"""Verifiable rewards, by the names that recipes use. A reward is a plain function:

    def my_reward(completion: str, answer: str, *, prompt: str, metadata: Mapping[str, Any],
                  num_tokens: int, truncated: bool, token_ids: tuple[int, ...],
                  **arguments) -> float | None

It takes those of these keyword arguments that its signature names; others come from the recipe.
NaN or None means "cannot be scored" (a bad reference answer), which is not the same as 0. An
`async def` runs beside others of its kind: for rewards that wait for a server. A process reward
returns a list, `(end, reward)` for every step, `end` being the place in the completion where the
step ends; its value is their sum, and `objective.advantage = "process"` credits each step's tokens.

With `answer_tag`, a reward looks into the last `<answer_tag>…</answer_tag>` only."""

import math
import re
from collections.abc import Callable, Mapping
from decimal import Decimal, InvalidOperation
from fractions import Fraction
from functools import lru_cache
from typing import Any

from grpo_megatron.errors import DataError
from grpo_megatron.rewards.code_tests import code_tests
from grpo_megatron.rewards.length import cosine_length, length_penalty, repetition, soft_overlong
from grpo_megatron.rewards.registry import needs
from grpo_megatron.rewards.style import extract, format_tags, language_consistency

__all__ = ["code_tests", "cosine_length", "exact_match", "format_tags", "language_consistency",
           "length_penalty", "math_verify", "numeric_match", "reasoning_gym_score", "repetition",
           "soft_overlong"]

# A sign counts only where no operand stands before it: "42-17" ends with 17, "x = -17" with -17.
_NUMBER = re.compile(r"(?:(?<![\d)])[-+])?(?:\d+(?:,\d{3})+|\d+|(?=\.\d))"
                     r"(?:\.\d+)?(?:[eE][-+]?\d{1,3})?(?:/\d+)?(?!\d)")
_MATH_TIMEOUT_S = 2  # math-verify's own, in whole seconds, beneath the pool's hard limit


def exact_match(completion: str, answer: str, *, answer_tag: str | None = None) -> float:
    """1 where the completion is the answer, but for surrounding white space; else 0."""
    if not answer.strip():
        return math.nan
    given = extract(completion, answer_tag)
    return float(given is not None and given.strip() == answer.strip())


def numeric_match(completion: str, answer: str, *, tolerance: float = 0.0,
                  answer_tag: str | None = None) -> float:
    """1 where the last number of the completion equals the answer, else 0; NaN where the answer
    is not a number. Numbers may have a sign, thousands separators, decimals, or be fractions; they
    are compared exactly (`0.5` equals `1/2`), up to an absolute difference of `tolerance`."""
    expected = _number(answer.strip().lstrip("$"))
    if expected is None:
        return math.nan
    found = _NUMBER.findall(extract(completion, answer_tag) or "")
    value = _number(found[-1]) if found else None
    return float(value is not None and abs(value - expected) <= Fraction(tolerance))


@needs("math_verify")
def math_verify(completion: str, answer: str, *, answer_tag: str | None = None) -> float:
    """1 where math-verify finds completion and answer equivalent; 0 where it does not or cannot
    read the completion; NaN where it cannot read the answer."""
    from math_verify import parse, verify

    gold = _parsed_gold(answer)
    if not gold:
        return math.nan
    given = extract(completion, answer_tag)
    if given is None:
        return 0.0
    parsed = parse(given, parsing_timeout=_MATH_TIMEOUT_S)
    return float(bool(parsed) and verify(gold, parsed, timeout_seconds=_MATH_TIMEOUT_S))


@needs("reasoning_gym")
def reasoning_gym_score(completion: str, answer: str, *, metadata: Mapping[str, Any],
                        answer_tag: str | None = None) -> float:
    """The score in [0, 1] that reasoning-gym's own data set gives, by `source_dataset`."""
    if "source_dataset" not in metadata:
        raise DataError("the prompt's metadata has no `source_dataset`",
                        remedy="use reasoning_gym_score with source = \"reasoning_gym\" only")
    given = extract(completion, answer_tag)
    entry = {"question": metadata.get("question", ""), "answer": answer, "metadata": metadata}
    score = _reasoning_gym_scorer(metadata["source_dataset"])
    return float(score(answer=None if given is None else given.strip(), entry=entry))


def _number(text: str) -> Fraction | None:
    top, slash, bottom = text.strip().replace(",", "").partition("/")
    try:
        value = Fraction(Decimal(top))
        return value / Fraction(Decimal(bottom)) if slash else value
    except (InvalidOperation, OverflowError, ValueError, ZeroDivisionError):
        return None


@lru_cache(maxsize=4096)
def _parsed_gold(answer: str) -> list[Any]:
    from math_verify import parse

    # Without its environment "\frac{1}{2}" would be read as the number 1, and "(1, 2)" not at all.
    bare_latex = "\\" in answer or answer.strip().startswith(("(", "[", "{"))
    if bare_latex and "$" not in answer and "\\boxed" not in answer:
        answer = f"${answer}$"
    return parse(answer, parsing_timeout=_MATH_TIMEOUT_S)


@lru_cache(maxsize=128)
def _reasoning_gym_scorer(dataset: str) -> Callable[..., float]:
    from reasoning_gym.factory import get_score_answer_fn

    return get_score_answer_fn(dataset)
