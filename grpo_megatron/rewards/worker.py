"""A reward process: `python -m grpo_megatron.rewards.worker SOCKET JOURNAL PARENT_PID`.

It reads chunks of calls (pickles) from the socket, notes results in the journal and answers with
a line when a chunk is done. It ends when the input ends, and with its parent even while a reward
hangs.
"""

from __future__ import annotations

import asyncio
import json
import operator
import os
import pickle
import signal
import socket
import sys
import traceback
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from grpo_megatron.errors import RewardError
from grpo_megatron.rewards.coroutines import score_all
from grpo_megatron.rewards.journal import FINISHED, Journal, Outcome
from grpo_megatron.rewards.registry import bind, to_float

Call = tuple[int, str, str, Mapping[str, Any]]
"""Index of the function, completion, answer, the context that the function takes."""


def main() -> None:
    """Serve until the input ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's business
    link, journal_fd, parent = map(int, sys.argv[1:])
    _die_with(parent)
    stream, journal = socket.socket(fileno=link).makefile("rwb"), Journal(journal_fd)

    def answer(failure: str | None) -> None:
        stream.write(json.dumps(failure).encode() + b"\n")
        stream.flush()

    functions, limits = pickle.load(stream)
    try:
        rewards = [bind(reference, arguments) for reference, arguments in functions]
    except RewardError as error:
        return answer(str(error))
    answer(None)
    with asyncio.Runner() as loop:  # one for all chunks, so that rewards may keep connections
        while stream.peek(1):
            calls: list[Call] = pickle.load(stream)
            waiting = {}
            for index, (function, *arguments) in enumerate(calls):
                call = partial(rewards[function], *arguments)
                if rewards[function].is_async:
                    waiting[index] = call
                else:
                    journal.begin(index)
                    journal.note(index, _outcome(call))
            if waiting:
                loop.run(score_all(waiting, journal, **limits))
            journal.begin(FINISHED)
            answer(None)


def _outcome(call: Callable[[], Any]) -> Outcome:
    try:
        value = call()
        if not isinstance(value, list):
            return Outcome(value=to_float(value))
        steps = [(operator.index(end), to_float(reward)) for end, reward in value]
        return Outcome(value=to_float(sum(reward for _, reward in steps)), steps=steps)
    except BaseException:  # SystemExit of a reward must not end the worker either
        return Outcome("raised", trace=traceback.format_exc())


def _die_with(parent: int) -> None:
    """Linux: be killed when the parent ends. A socket's end cannot stop a reward that hangs."""
    if sys.platform == "linux":
        import ctypes

        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)
    if os.getppid() != parent:
        sys.exit(0)


if __name__ == "__main__":
    main()
