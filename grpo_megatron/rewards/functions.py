"""Verifiable rewards, by the names that recipes use; what a reward is: docs/rewards.md."""

import math
import re
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from decimal import Decimal
from fractions import Fraction
from functools import cache, lru_cache
from typing import Any

from grpo_megatron.errors import DataError, RewardError
from grpo_megatron.rewards.argument_checks import check_number, check_tags, check_whole_number
from grpo_megatron.rewards.code_tests import code_tests as code_tests
from grpo_megatron.rewards.code_tests import extract
from grpo_megatron.rewards.math_answers import (
    TIMEOUT_S,
    parsed_completion,
    parsed_reference,
    plain_numbers,
)
from grpo_megatron.rewards.registry import BoundReward, bind, needs, to_float

_EXACT_MATCH = "grpo_megatron.rewards.functions:exact_match"
_CURRENCY = r"(?:\\?\$|[€£¥])"
# A sign counts only where no operand stands before it: "42-17" ends with 17, "x = -17" with -17.
_NUMBER = re.compile(
    rf"(?:(?<![\d)])[-+](?:{_CURRENCY} ?)?)?(?:\d+ (?=\d+/\d))?"
    r"(?:\d+(?:,\d{3})+|\d+|(?=\.\d))"
    r"(?:\.\d+)?(?:[eE][-+]?\d{1,3})?(?:/\d+)?(?!\d)"
)
_WRITTEN_NUMBER = re.compile(
    r"[-+]?(?:(?:[1-9]\d{0,2}(?:,\d{3})+|\d+)(?:\.\d*)?|\.\d+)(?:[eE][-+]?\d{1,3})?"
)
"""A decimal number: its commas, if any, stand between all of its thousands."""
_SIGN_OF_MONEY = re.compile(rf"([-+]?)\s*{_CURRENCY}\s*")
_MIXED = re.compile(r"([-+]?)(\d[\d,]*) (\d+/\d+)")
_UNSPACED = {"han", "hiragana", "katakana", "khmer", "lao", "myanmar", "thai", "tibetan"}
NOT_PROSE = re.compile(
    r"```.*?(?:```|\Z)|`[^`\n]*`|\$\$.*?\$\$|\$[^$\n]*\$|\\\(.*?\\\)"
    r"|\\\[.*?\\\]|\\[a-zA-Z]+",
    re.DOTALL,
)


@needs(check=check_tags)
def exact_match(
    completion: str, answer: str, *, answer_tag: str | None = None, think_tag: str | None = None
) -> float:
    """1 where the completion is the answer, but for surrounding white space; else 0."""
    if not answer.strip():
        return math.nan
    given = extract(completion, answer_tag, think_tag)
    return float(given is not None and given.strip() == answer.strip())


def _check_numeric_match(*, tolerance: float = 0.0, **tags: object) -> None:
    check_tags(**tags)
    check_number("tolerance", tolerance, least=0)


@needs(check=_check_numeric_match)
def numeric_match(
    completion: str,
    answer: str,
    *,
    tolerance: float = 0.0,
    answer_tag: str | None = None,
    think_tag: str | None = None,
) -> float:
    """1 where the last number of the completion equals the answer, else 0; NaN where the answer
    is not a number. Numbers may have a sign, a currency, commas between thousands, decimals, or be
    fractions and mixed numbers (`3 1/2`); they are compared exactly (`0.5` equals `1/2`), up to an
    absolute difference of `tolerance`, its bound included."""
    expected = _number(plain_numbers(answer))
    if expected is None:
        return math.nan
    given = extract(completion, answer_tag, think_tag) or ""
    found = _NUMBER.findall(plain_numbers(given))
    value = None
    if found:
        value = _number(found[-1])
    bound = Fraction(str(tolerance))  # as it is written: the float 0.3 is less than 3/10
    return float(value is not None and abs(value - expected) <= bound)


@needs("math_verify", check=check_tags)
def math_verify(
    completion: str, answer: str, *, answer_tag: str | None = None, think_tag: str | None = None
) -> float:
    """1 where math-verify finds completion and answer equivalent; 0 where it does not or cannot
    read the completion; NaN where it cannot read the answer."""
    from math_verify import verify

    gold = parsed_reference(answer)
    if not gold:
        return math.nan
    given = extract(completion, answer_tag, think_tag)
    if given is None:
        return 0.0
    parsed = parsed_completion(given)
    return float(bool(parsed) and verify(gold, parsed, timeout_seconds=TIMEOUT_S))


@needs("reasoning_gym", check=check_tags)
def reasoning_gym_score(
    completion: str, answer: str, *, metadata: Mapping[str, Any], answer_tag: str | None = None
) -> float:
    """The score in [0, 1] that reasoning-gym's own data set gives, by `source_dataset`."""
    if "source_dataset" not in metadata:
        raise DataError(
            "the prompt's metadata has no `source_dataset`",
            remedy='use reasoning_gym_score with source = "reasoning_gym" only',
        )
    given = extract(completion, answer_tag)
    if given is not None:
        given = given.strip()
    entry = {"question": metadata.get("question", ""), "answer": answer, "metadata": metadata}
    score = _reasoning_gym_scorer(metadata["source_dataset"])
    return float(score(answer=given, entry=entry))


@needs(check=check_tags)
def format_tags(
    completion: str,
    answer: str,
    *,
    think_tag: str = "think",
    answer_tag: str = "answer",
    opened: bool = False,
) -> float:
    """1 for exactly one think block, then exactly one answer block, neither empty, with only white
    space outside (DeepSeek-R1, arXiv:2501.12948); else 0. `opened`: the prompt opened it."""
    text = completion
    if opened:
        text = f"<{think_tag}>{completion}"
    first = re.escape(think_tag)
    second = re.escape(answer_tag)
    pattern = rf"\s*<{first}>(.*)</{first}>\s*<{second}>(.*)</{second}>\s*"
    blocks = re.fullmatch(pattern, text, re.DOTALL)
    if blocks is None:
        return 0.0
    for tag in (first, second):
        if len(re.findall(f"<{tag}>|</{tag}>", text)) != 2:
            return 0.0
    has_empty_block = not blocks[1].strip() or not blocks[2].strip()
    return float(not has_empty_block)


@needs(check=check_tags)
def format_think(
    completion: str, answer: str, *, think_tag: str = "think", opened: bool = False
) -> float:
    """1 for one think block that is not empty, and an answer behind it (the form of DeepSeek-R1,
    arXiv:2501.12948, whose answers have no tags); else 0. `opened`: the prompt opened the block."""
    text = completion
    if opened:
        text = f"<{think_tag}>{completion}"
    tag = re.escape(think_tag)
    parts = re.fullmatch(rf"\s*<{tag}>(.*)</{tag}>(.*)", text, re.DOTALL)
    if parts is None or len(re.findall(f"<{tag}>|</{tag}>", text)) != 2:
        return 0.0
    has_empty_part = not parts[1].strip() or not parts[2].strip()
    return float(not has_empty_part)


def check_scripts(
    *, scripts: Sequence[str] = ("latin",), think_tag: str | None = "think", **_: object
) -> None:
    """Raise RewardError unless `scripts` is a list of Unicode scripts, in lower case."""
    is_list = isinstance(scripts, list | tuple) and all(isinstance(name, str) for name in scripts)
    if not is_list or not _known_scripts().issuperset(scripts):
        raise RewardError(
            f"scripts = {scripts!r} is not a list of Unicode scripts",
            remedy='for example ["latin"], ["cyrillic"] or ["han"]',
        )
    if think_tag != "":  # all counts
        check_tags(think_tag=think_tag)


@needs(check=check_scripts)
def language_consistency(
    completion: str,
    answer: str,
    *,
    scripts: Sequence[str] = ("latin",),
    think_tag: str | None = "think",
) -> float:
    """Words of the target language / words of the chain of thought (DeepSeek-R1,
    arXiv:2501.12948), in [0, 1]; 0 without a word. What is a word: docs/rewards.md."""
    if think_tag:  # a block that the prompt opened, or that nothing closed, counts too
        completion = completion.partition(f"</{think_tag}>")[0].rpartition(f"<{think_tag}>")[2]
    prose = NOT_PROSE.sub(" ", completion)
    words = 0
    matching = 0
    previous = None
    for letter in unicodedata.normalize("NFKC", prose):
        if letter in "'’" or unicodedata.category(letter).startswith("M"):
            continue  # inside of a word
        script = _script(letter)
        if script and (script != previous or script in _UNSPACED):
            words += 1
            if script in scripts:
                matching += 1
        previous = script
    if words == 0:
        return 0.0
    return matching / words


def _bound(accuracy: str, accuracy_arguments: Mapping[str, Any] | None) -> BoundReward:
    return bind(accuracy, accuracy_arguments)


def _check_cosine_length(
    *,
    max_tokens: int,
    correct: object = (1.0, 0.5),
    wrong: object = (-1.0, -0.5),
    accuracy: str = _EXACT_MATCH,
    accuracy_arguments: Mapping[str, Any] | None = None,
) -> None:
    check_number("max_tokens", max_tokens, above=0)
    for name, pair in (("correct", correct), ("wrong", wrong)):
        if not isinstance(pair, list | tuple) or len(pair) != 2:
            raise RewardError(
                f"{name} = {pair!r} is not a pair of numbers",
                remedy=f"give those of no token and of max_tokens, as in {name} = [1.0, 0.5]",
            )
        for number in pair:
            check_number(f"a number of {name}", number)
    _bound(accuracy, accuracy_arguments)


@needs(check=_check_cosine_length)
def cosine_length(
    completion: str,
    answer: str,
    *,
    prompt: str,
    metadata: Mapping[str, Any],
    num_tokens: int,
    max_tokens: int,
    correct: tuple[float, float] = (1.0, 0.5),
    wrong: tuple[float, float] = (-1.0, -0.5),
    accuracy: str = _EXACT_MATCH,
    accuracy_arguments: Mapping[str, Any] | None = None,
) -> float:
    """b + (a − b)/2 · (1 + cos(π n/L)), from a at no token to b at L and beyond
    (arXiv:2502.03373): short right answers score most, short wrong ones least. L is `max_tokens`;
    (a, b) are `correct` for answers that the reward `accuracy` (`module:function`, with
    `accuracy_arguments`) scores above 0.5, else `wrong`; NaN stays NaN."""
    accuracy_reward = _bound(accuracy, accuracy_arguments)
    context = {"prompt": prompt, "metadata": metadata}
    score = to_float(accuracy_reward(completion, answer, context))
    if math.isnan(score):
        return math.nan
    start, end = wrong
    if score > 0.5:
        start, end = correct
    used = min(num_tokens / max_tokens, 1.0)
    return end + (start - end) / 2 * (1 + math.cos(math.pi * used))


def _check_soft_overlong(*, max_tokens: int, buffer: int) -> None:
    check_number("max_tokens", max_tokens, above=0)
    check_number("buffer", buffer, above=0)


@needs(check=_check_soft_overlong)
def soft_overlong(
    completion: str, answer: str, *, num_tokens: int, max_tokens: int, buffer: int
) -> float:
    """0 to L − B (max_tokens, buffer), ((L − B) − n)/B to L, then −1 (DAPO, arXiv:2503.14476)."""
    return max(-1.0, min(0.0, (max_tokens - buffer - num_tokens) / buffer))


def _check_length_penalty(*, max_tokens: int) -> None:
    check_number("max_tokens", max_tokens, above=0)


@needs(check=_check_length_penalty)
def length_penalty(completion: str, answer: str, *, num_tokens: int, max_tokens: int) -> float:
    """−min(1, n/max_tokens). Of right answers: `cosine_length`, correct (0, −1), wrong (0, 0)."""
    return -min(1.0, num_tokens / max_tokens)


def _check_repetition(*, n: int = 3, penalty: float = -1.0) -> None:
    check_whole_number("n", n, least=1)
    check_number("penalty", penalty)


@needs(check=_check_repetition)
def repetition(
    completion: str, answer: str, *, token_ids: tuple[int, ...], n: int = 3, penalty: float = -1.0
) -> float:
    """penalty · (1 − different n-grams / n-grams) of tokens (arXiv:2502.03373); 0 below n."""
    ngrams = list(zip(*(token_ids[i:] for i in range(n)), strict=False))
    if not ngrams:
        return 0.0
    return penalty * (1 - len(set(ngrams)) / len(ngrams))


def environment(completion: str, answer: str, *, outcome: float) -> float:
    """What the environment says that the episode was worth; NaN where there was no episode, or it
    cannot be scored. In a recipe: `function = "environment"`."""
    return outcome


def _number(text: str) -> Fraction | None:
    text = _SIGN_OF_MONEY.sub(r"\1", text.strip(), count=1)
    mixed = _MIXED.fullmatch(text)
    if mixed is not None:
        return _mixed_number(*mixed.groups())
    top, slash, bottom = text.partition("/")
    value = _decimal_number(top)
    if slash and value is not None:
        divisor = _decimal_number(bottom)
        if not divisor:
            return None
        value /= divisor
    return value


def _decimal_number(text: str) -> Fraction | None:
    text = text.strip()
    if not _WRITTEN_NUMBER.fullmatch(text):
        return None
    return Fraction(Decimal(text.replace(",", "")))


def _mixed_number(sign: str, whole: str, fraction: str) -> Fraction | None:
    part = _number(fraction)
    rest = _number(whole)
    if part is None or rest is None:
        return None
    value = rest + part
    if sign == "-":
        value = -value
    return value


@lru_cache(maxsize=128)
def _reasoning_gym_scorer(dataset: str) -> Callable[..., float]:
    from reasoning_gym.factory import get_score_answer_fn

    scorer: Callable[..., float] = get_score_answer_fn(dataset)
    return scorer


@cache
def _known_scripts() -> frozenset[str | None]:
    """Scripts of the letters in Unicode's first two planes."""
    return frozenset(_script(chr(code)) for code in range(0x20000))


@lru_cache(maxsize=8192)
def _script(letter: str) -> str | None:
    """Script of a letter, by its Unicode name; None for what is no letter."""
    if not letter.isalpha():
        return None
    name = unicodedata.name(letter, "").partition(" ")[0].lower()
    if name == "cjk":
        return "han"
    return name or None
