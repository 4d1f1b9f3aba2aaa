"""Verifiable rewards. A reward is a plain function:

    def my_reward(completion: str, answer: str, *, prompt: str, metadata: Mapping[str, Any],
                  **arguments) -> float | None

`prompt` and `metadata` may be left out of the signature; further keyword arguments come from the
recipe. NaN or None means "cannot be scored" (a bad reference answer), which is not the same as 0.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from decimal import Decimal, InvalidOperation
from fractions import Fraction
from functools import lru_cache
from typing import Any, TypeVar

from grpo_megatron.errors import DataError

_Function = TypeVar("_Function", bound=Callable[..., Any])
# A sign counts only where no operand stands before it: "42-17" ends with 17, "x = -17" with -17.
_NUMBER = re.compile(r"(?:(?<![\d)])[-+])?(?:\d+(?:,\d{3})+|\d+|(?=\.\d))"
                     r"(?:\.\d+)?(?:[eE][-+]?\d{1,3})?(?:/\d+)?(?!\d)")
_MATH_TIMEOUT_S = 2  # math-verify's own, in whole seconds, beneath the pool's hard limit


def imports(*modules: str) -> Callable[[_Function], _Function]:
    """Modules that workers import before the first call, so that no call's time pays for it."""

    def mark(function: _Function) -> _Function:
        function.imports = modules  # type: ignore[attr-defined]
        return function

    return mark


def exact_match(completion: str, answer: str, *, answer_tag: str | None = None) -> float:
    """1 where the completion is the answer, but for surrounding white space; else 0.

    Args:
        answer_tag: Compare what stands in the last `<answer_tag>…</answer_tag>` only.
    """
    if not answer.strip():
        return math.nan
    given = extract(completion, answer_tag)
    return float(given is not None and given.strip() == answer.strip())


def numeric_match(completion: str, answer: str, *, tolerance: float = 0.0,
                  answer_tag: str | None = None) -> float:
    """1 where the last number of the completion equals the answer, else 0; NaN where the answer
    is not a number.

    Numbers may have a sign, thousands separators, decimals, or be fractions; they are compared
    exactly (`0.5` equals `1/2`).

    Args:
        tolerance: Largest absolute difference that still counts as equal.
        answer_tag: Look into the last `<answer_tag>…</answer_tag>` only.
    """
    expected = _number(answer.strip().lstrip("$"))
    if expected is None:
        return math.nan
    given = extract(completion, answer_tag)
    found = _NUMBER.findall(given) if given is not None else []
    value = _number(found[-1]) if found else None
    return float(value is not None and abs(value - expected) <= Fraction(tolerance))


@imports("math_verify")
def math_verify(completion: str, answer: str, *, answer_tag: str | None = None) -> float:
    """1 where math-verify finds completion and answer equivalent; 0 where it does not or cannot
    read the completion; NaN where it cannot read the answer.

    Args:
        answer_tag: Look into the last `<answer_tag>…</answer_tag>` only.
    """
    from math_verify import parse, verify

    gold = _parsed_gold(answer)
    if not gold:
        return math.nan
    given = extract(completion, answer_tag)
    if given is None:
        return 0.0
    parsed = parse(given, parsing_timeout=_MATH_TIMEOUT_S)
    return float(bool(parsed) and verify(gold, parsed, timeout_seconds=_MATH_TIMEOUT_S))


@imports("reasoning_gym")
def reasoning_gym_score(completion: str, answer: str, *, metadata: Mapping[str, Any],
                        answer_tag: str | None = None) -> float:
    """The score in [0, 1] that reasoning-gym's own data set gives, by `source_dataset`.

    Args:
        answer_tag: Score what stands in the last `<answer_tag>…</answer_tag>` only.

    Raises:
        DataError: The prompt does not come from reasoning-gym.
    """
    if "source_dataset" not in metadata:
        raise DataError("the prompt's metadata has no `source_dataset`",
                        remedy="use reasoning_gym_score with source = \"reasoning_gym\" only")
    given = extract(completion, answer_tag)
    entry = {"question": metadata.get("question", ""), "answer": answer, "metadata": metadata}
    score = _reasoning_gym_scorer(metadata["source_dataset"])
    return float(score(answer=None if given is None else given.strip(), entry=entry))


def format_tags(completion: str, answer: str, *, think_tag: str = "think",
                answer_tag: str = "answer", opened: bool = False) -> float:
    """1 for exactly one think block, then exactly one answer block, neither empty; else 0.

    Nothing but white space may stand outside of the blocks (DeepSeek-R1, arXiv:2501.12948).

    Args:
        think_tag, answer_tag: Names of the blocks.
        opened: The prompt already ends with the opening think tag.
    """
    text = f"<{think_tag}>{completion}" if opened else completion
    for tag in (think_tag, answer_tag):
        if text.count(f"<{tag}>") != 1 or text.count(f"</{tag}>") != 1:
            return 0.0
    start, think, middle, final, end = (part.strip() for part in re.split(
        "|".join(re.escape(mark) for tag in (think_tag, answer_tag)
                 for mark in (f"<{tag}>", f"</{tag}>")), text))
    in_order = (text.index(f"<{think_tag}>") < text.index(f"</{think_tag}>")
                < text.index(f"<{answer_tag}>") < text.index(f"</{answer_tag}>"))
    return float(in_order and bool(think) and bool(final) and not (start or middle or end))


def extract(completion: str, tag: str | None) -> str | None:
    """The last closed `<tag>…</tag>`'s content; None where there is none; all without a tag."""
    if tag is None:
        return completion
    head, closed, _ = completion.rpartition(f"</{tag}>")
    _, opened, content = head.rpartition(f"<{tag}>")
    return content if closed and opened else None


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
