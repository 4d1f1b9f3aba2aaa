"""Reward functions that misbehave on purpose; the completion says how."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import math
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

from grpo_megatron.rewards.registry import needs

not_a_function = 3


@needs(check=lambda *, size: size + 1)
def checked(completion: str, answer: str, *, size: int) -> float:
    """Has a check that does not expect what it is given."""
    return 1.0


def lines_right(completion: str, answer: str) -> Any:
    """A process reward: 1 for every line that says right; NaN for one that says unknown."""
    ends = [i + 1 for i, letter in enumerate(completion) if letter == "\n"]
    return [
        (end, math.nan if line == "unknown" else float(line == "right"))
        for end, line in zip(ends, completion.split("\n"), strict=False)
    ]


def obey(completion: str, answer: str, *, prompt: str, metadata: Mapping[str, Any]) -> Any:
    """Do what the completion says, else return it as a number."""
    if completion == "loop":
        while True:
            pass
    elif completion == "sleep":
        time.sleep(1e6)
    elif completion == "nap":
        time.sleep(0.05)
        return 1.0
    elif completion == "exit":
        os._exit(3)
    elif completion == "sys.exit":
        sys.exit(3)
    elif completion == "segfault":
        os.kill(os.getpid(), signal.SIGSEGV)
    elif completion == "interrupt":
        raise KeyboardInterrupt
    elif completion == "raise":
        raise ValueError(f"no reward for {prompt}")
    elif completion == "print":
        print("printed by a reward" * 1000)
        sys.stdout.write("more")
        os.write(1, b"raw")
        return 1.0
    elif completion == "flood":
        while True:
            sys.stdout.write("x" * (1 << 20))
    elif completion == "read":
        return float(len(sys.stdin.read()))
    elif completion == "str":
        return "1.0"
    elif completion == "list":
        return [1.0]
    elif completion == "complex":
        from numpy import complex64  # here: processes of other rewards are light

        return complex64(1 + 2j)
    elif completion in SPECIAL:
        return SPECIAL[completion]
    return float(completion)


SPECIAL = {
    "None": None,
    "True": True,
    "int": 7,
    "nan": float("nan"),
    "inf": float("inf"),
    "huge": 10**400,
}


def length(completion: str, answer: str) -> float:
    """The shortest signature that a reward may have."""
    return len(completion)


def always_raises(completion: str, answer: str, **arguments: Any) -> float:
    raise RuntimeError("broken reward")


def always_loops(completion: str, answer: str) -> float:
    while True:
        pass


def counts_modules(completion: str, answer: str) -> float:
    """How many of the heavy modules this process has imported."""
    return sum(module in sys.modules for module in completion.split())


def scaled(completion: str, answer: str, *, factor: float = 1.0) -> float:
    return factor * float(completion)


def weighed(completion: str, answer: str, *, weight: float) -> float:
    return weight


def asks_for_the_promt(completion: str, answer: str, *, promt: str) -> float:
    return 0.0


def greedy(completion: str) -> float:
    return 0.0


def tokens(
    completion: str, answer: str, *, num_tokens: int, truncated: bool, token_ids: tuple[int, ...]
) -> float:
    assert num_tokens == len(token_ids) and type(token_ids) is tuple
    return sum(token_ids) + (0.5 if truncated else 0)


_running = 0


async def coroutine(completion: str, answer: str) -> Any:
    """Do what the completion says, else return it as a number."""
    global _running
    await asyncio.sleep(0)
    if completion == "most at a time":  # how many of these run at once, or the same number earlier
        _running += 1
        most = _running
        while most < 5:
            await asyncio.sleep(0.01)
            most = max(most, _running)
        return most
    if completion == "sleep":
        await asyncio.sleep(1e6)
    elif completion == "nested loop":
        await asyncio.gather(_block(), asyncio.sleep(0))
    elif completion == "stubborn":
        while True:
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.sleep(1e6)
    elif completion == "late":
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.sleep(1e6)
        return 1.0
    elif completion == "own timeout":
        raise TimeoutError("of the reward's own")
    elif completion == "cancelled":
        asyncio.current_task().cancel()
        await asyncio.sleep(1)
    return obey(completion, answer, prompt="37 + 48 =", metadata={})


async def _block() -> None:
    while True:
        pass


def _plain(function: Any) -> Any:
    def call(*texts: str) -> Any:
        return function(*texts)

    return call


def _named(function: Any) -> Any:
    @functools.wraps(function)
    def call(*texts: str) -> Any:
        return function(*texts)

    return call


def _with_a_loop_of_its_own(function: Any) -> Any:
    @functools.wraps(function)
    def call(*texts: str) -> Any:
        return asyncio.run(function(*texts))

    return call


class _Callable:
    async def __call__(self, completion: str, answer: str) -> Any:
        return await coroutine(completion, answer)


hidden_coroutine = _plain(coroutine)
wrapped_coroutine = _named(coroutine)
ended_coroutine = _with_a_loop_of_its_own(coroutine)
callable_coroutine = _Callable()


def awaited_if_odd(completion: str, answer: str) -> Any:
    """The number in the completion, or what comes to it."""
    if int(completion) % 2:
        return coroutine(completion, answer)
    return float(completion)


def future(completion: str, answer: str) -> Any:
    """What is to be awaited and no coroutine; without a number where it hangs."""

    class Later:
        def __await__(self) -> Any:
            return coroutine(completion, answer).__await__()

    return Later()


def process_number(completion: str, answer: str) -> float:
    """Of the process that computes it."""
    return float(os.getpid())


def slow(completion: str, answer: str) -> float:
    """The number in the completion, after a while."""
    time.sleep(0.3)
    return float(completion.split()[-1])


def of_last_turn(
    completion: str, answer: str, *, num_tokens: int, token_ids: tuple[int, ...]
) -> float:
    """Whether the ids are those of the text; the policy's tokens before it count."""
    assert completion == "".join(map(chr, token_ids))
    return float(num_tokens)


def ids(completion: str, answer: str, *, token_ids: tuple[int, ...]) -> float:
    """The sum of the token ids."""
    return float(sum(token_ids))


def takes_a_word(completion: str, answer: str, *, metadata: dict[str, Any]) -> float:
    """How many words the row had, of which this takes one; what it is else given, it forgets."""
    found = len(metadata["words"])
    metadata["words"].pop()
    metadata["level"] = completion
    return float(found)


async def waits_and_takes_a_word(
    completion: str, answer: str, *, metadata: dict[str, Any]
) -> float:
    """The same, while others run."""
    await asyncio.sleep(0)
    return takes_a_word(completion, answer, metadata=metadata)


def takes_an_argument(completion: str, answer: str, *, words: list[str]) -> float:
    """How many words the recipe gave, of which this takes one."""
    words.pop()
    return len(words) + 1.0


def swapped(answer: str, completion: str) -> list[str]:
    return [completion, answer]


def swapped_by_place(answer: str, completion: str, /) -> list[str]:
    return [completion, answer]


def by_name(*, answer: str, completion: str) -> list[str]:
    return [completion, answer]


def prompt_first(prompt: str, completion: str, answer: str) -> list[str]:
    assert prompt == "a prompt"
    return [completion, answer]


def text_and_answer(text: str, expected: str) -> list[str]:
    return [text, expected]


def answer_named(text: str, *, answer: str) -> list[str]:
    return [text, answer]


def _decorated(function: Callable[..., Any]) -> Callable[..., Any]:
    """As decorators are that name what they pass on."""

    @functools.wraps(function)
    def call(text: str, reference: str) -> Any:
        return function(text, reference)

    return call


@_decorated
def under_a_decorator(completion: str, answer: str) -> list[str]:
    return [completion, answer]


def answer_before_text(answer: str, text: str) -> list[str]:
    return [text, answer]


def text_before_completion(text: str, completion: str) -> list[str]:
    return [text, completion]


def weighed_between(answer: str, weight: float, completion: str) -> float:
    return weight


def of_many(prompts: list[str], completions: list[str], answer: list[str]) -> list[float]:
    """As TRL has it."""
    return [0.0] * len(completions)


def of_many_by_name(prompts: list[str], completions: list[str], **columns: Any) -> list[float]:
    return [0.0] * len(completions)


def answers_first(answers: str, completions: str) -> float:
    return 0.0


def wants_prompts(completion: str, answer: str, prompts: str) -> float:
    return 0.0


def nearly_named(text: str, competion: str, answer: str) -> float:
    return 0.0


def in_the_plural(completions: str, answers: str) -> list[str]:
    return [completions, answers]


def text_and_answer_and_completion(text: str, expected: str, completion: str = "") -> float:
    return 0.0


def weighed_by_name(text: str, weight: float, *, answer: str) -> float:
    return weight


def ends_as_told(completion: str, answer: str) -> list[tuple[int, float]]:
    """One step, which ends at the number in the completion."""
    return [(int(completion or "0"), 1.0)]


async def ends_as_told_later(completion: str, answer: str) -> list[tuple[int, float]]:
    """The same, as a coroutine."""
    await asyncio.sleep(0)
    return ends_as_told(completion, answer)


def says_much(completion: str, answer: str) -> Any:
    """Raise, or return steps: as many characters or steps as the completion says."""
    what, number = completion.split()
    if what == "raise":
        raise ValueError("The message begins. " + int(number) * "x" + " It ends.")
    return int(number) * [(1, 0.5)]
