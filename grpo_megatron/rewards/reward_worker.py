"""A reward process: `python -m grpo_megatron.rewards.reward_worker SOCKET PARENT_PID`.

It reads chunks of calls (pickles) from the socket, says that it has one, and answers every call
with a line: plain ones in order, coroutines as they end. It ends with the input, or its parent.

Whether a plain function returns what is to be awaited (a decorator hides an `async def`) is known
by its first call. It is awaited before the next call begins; the others of its chunk run together
as coroutines do, behind all calls that are plain."""

import asyncio
import inspect
import json
import operator
import pickle
import signal
import socket
import sys
import traceback
from array import array
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

from grpo_megatron.errors import RewardError
from grpo_megatron.file_part import FilePart
from grpo_megatron.orphans import die_with_parent
from grpo_megatron.rewards.calls import Call, CallOutcome, Chunk
from grpo_megatron.rewards.registry import BoundReward, bind, to_float

_MOST_STEPS = 1 << 20
"""Of one call: its outcome is one line, and the parent reads no longer ones than 64 MiB."""
_LONGEST_TRACE = 1 << 15
"""Characters."""


class _Ready(NamedTuple):
    """A call with all that it needs."""

    component: int
    """Its number among the functions that the process has."""
    begin: Callable[[], Any]
    """Calls the reward."""
    num_characters: int
    """Of the completion, where its steps may end."""


def main() -> None:
    """Serve the parent until its end of the socket closes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's business
    link, parent = map(int, sys.argv[1:])
    die_with_parent(parent)  # a socket's end cannot stop a reward that hangs
    stream = socket.socket(fileno=link).makefile("rwb")

    def tell(message: Any) -> None:
        stream.write(json.dumps(message).encode() + b"\n")
        stream.flush()

    functions, limits = pickle.load(stream)
    try:
        rewards = [bind(reference, arguments) for reference, arguments in functions]
    except RewardError as error:
        return tell(str(error))
    tell(None)
    with asyncio.Runner() as loop:  # one for all chunks, so that rewards may keep connections
        while stream.peek(1):
            chunk: Chunk = pickle.load(stream)
            tell(None)
            waiting = {}
            for index, call in enumerate(chunk.calls):
                completion, answer, context = _read(call)
                reward = rewards[call.component]
                begin = partial(_called, reward, completion, answer, context)
                waiting[index] = _Ready(call.component, begin, len(completion))
            if not chunk.is_async:
                waiting = _answer_in_order(waiting, loop, tell)
            if waiting:
                loop.run(_await_all(waiting, tell, **limits))


def _read(call: Call) -> tuple[str, str, Mapping[str, Any]]:
    """Return the arguments of a call, with what lies in files."""
    completion = call.completion
    if isinstance(completion, FilePart):
        completion = completion.text()
    context = call.context
    token_ids = context.get("token_ids")
    if isinstance(token_ids, FilePart):
        context = {**context, "token_ids": tuple(array("i", token_ids.read()))}
    return completion, call.answer, context


def _called(reward: BoundReward, completion: str, answer: str, context: Mapping[str, Any]) -> Any:
    """Return what the reward returns. It gets metadata of its own, made when it begins: a chunk of
    calls may have large ones."""
    if "metadata" in context:
        context = {**context, "metadata": pickle.loads(context["metadata"])}
    return reward(completion, answer, context)


def _answer_in_order(
    calls: Mapping[int, _Ready], loop: asyncio.Runner, tell: Callable[[Any], None]
) -> dict[int, _Ready]:
    """Answer calls one after another. Returns those that are left to be awaited together: of
    components of which one call was to be awaited, all later ones."""
    awaited = set()
    left = {}
    for index, call in calls.items():
        if call.component in awaited:
            left[index] = call
            continue
        outcome = _outcome_in_order(call, loop)
        if outcome.is_awaited:
            awaited.add(call.component)
        tell((index, outcome))
    return left


def _outcome_in_order(call: _Ready, loop: asyncio.Runner) -> CallOutcome:
    """Return how a call ends that has the process for itself."""
    is_awaited = False

    def ended() -> Any:
        nonlocal is_awaited
        value = call.begin()
        is_awaited = inspect.isawaitable(value)
        if is_awaited:
            return loop.run(_result_of(value))
        return value

    outcome = _outcome(ended, call.num_characters)
    return outcome._replace(is_awaited=is_awaited)


async def _result_of(value: Any) -> Any:
    if inspect.isawaitable(value):
        return await value
    return value


async def _await_all(
    calls: Mapping[int, _Ready],
    tell: Callable[[Any], None],
    *,
    timeout_s: float,
    concurrency: int,
) -> None:
    """A call over its limit is cancelled; the parent ends one that does not let itself be."""
    free = asyncio.Semaphore(concurrency)

    async def score(index: int, call: _Ready) -> None:
        async with free:
            try:
                async with asyncio.timeout(timeout_s) as limit:
                    value = await _result_of(call.begin())
                outcome = _outcome(lambda: value, call.num_characters)
            except BaseException:
                outcome = CallOutcome("raised", trace=_trace())
            if limit.expired():
                outcome = CallOutcome("timed_out")
            tell((index, outcome))

    await asyncio.gather(*(score(index, call) for index, call in calls.items()))


def _outcome(call: Callable[[], Any], num_characters: int) -> CallOutcome:
    """Return how a call ends. num_characters: of its completion."""
    try:
        value = call()
        if not isinstance(value, list):
            return CallOutcome(value=to_float(value))
        if len(value) > _MOST_STEPS:
            raise ValueError(f"{len(value)} steps are more than {_MOST_STEPS}")
        steps = []
        total = 0.0
        for entry in value:
            end, reward = _step_in(entry)
            step_reward = to_float(reward)
            steps.append((_checked_end(operator.index(end), num_characters), step_reward))
            total += step_reward
        return CallOutcome(value=to_float(total), steps=steps)
    except BaseException:  # SystemExit of a reward must not end the worker either
        return CallOutcome("raised", trace=_trace())


def _step_in(entry: Any) -> tuple[Any, Any]:
    """Return the end and the reward of a step. Raises TypeError where an entry of a reward's list
    is no such pair, as of a function that returns one number for each of many completions."""
    try:
        end, reward = entry
    except (TypeError, ValueError):
        raise TypeError(
            f"a reward returns a number for its one completion, or a list of (end, reward), one "
            f"for each step: {str(entry)[:80]!r} in its list is no such pair"
        ) from None
    return end, reward


def _checked_end(end: int, num_characters: int) -> int:
    """Return where a step ends. Raises ValueError where that is no character's end: it would be
    credited to a token of another step, as places in tokens or bytes are."""
    first = min(1, num_characters)
    if first <= end <= num_characters:
        return end
    raise ValueError(
        f"a step ends at {end} of {num_characters} characters: its end is the number of "
        f"characters of the completion up to it, from {first} to {num_characters}"
    )


def _trace() -> str:
    """Return the traceback of what was raised, without its middle where it is long: the parent
    wants the frames, which come first, and the end of the message."""
    trace = traceback.format_exc()
    left_out = len(trace) - _LONGEST_TRACE
    if left_out <= 0:
        return trace
    half = _LONGEST_TRACE // 2
    return f"{trace[:half]} [{left_out} characters left out] {trace[-half:]}"


if __name__ == "__main__":
    main()
