"""Async rewards: the coroutines of a chunk, many at a time in the event loop of one worker.

A call over its limit is cancelled. Two things only the end of the process can stop: a coroutine
that blocks the loop (the parent sees the journal stand still, and blames whose step began last),
and one that goes on after its cancellation (seen here, at twice the limit).
"""

from __future__ import annotations

import asyncio
import os
import time
import traceback
import types
from collections.abc import Callable, Coroutine, Generator, Mapping
from typing import Any

from grpo_megatron.rewards.journal import Journal, Outcome
from grpo_megatron.rewards.registry import to_float


async def score_all(calls: Mapping[int, Callable[[], Any]], journal: Journal, *, timeout_s: float,
                    concurrency: int) -> None:
    """Await what the calls return, at most `concurrency` at a time."""
    free = asyncio.Semaphore(concurrency)
    started: dict[int, float] = {}

    async def score(index: int) -> None:
        async with free:
            started[index] = time.monotonic()
            try:
                async with asyncio.timeout(timeout_s) as limit:
                    outcome = Outcome(value=to_float(await _noted(calls[index](), index, journal)))
            except BaseException:  # also SystemExit, as of a plain reward
                outcome = Outcome("raised", trace=traceback.format_exc())
            journal.note(index, Outcome("timed_out") if limit.expired() else outcome)
            del started[index]

    async def beat() -> None:
        while True:
            journal.touch()
            await asyncio.sleep(timeout_s / 4)
            late = time.monotonic() - 2 * timeout_s
            for index in [index for index, since in started.items() if since < late]:
                journal.begin(index)
                journal.note(index, Outcome("timed_out"))
                os._exit(1)

    beating = asyncio.ensure_future(beat())
    await asyncio.gather(*map(score, calls))
    beating.cancel()


@types.coroutine
def _noted(coroutine: Coroutine[Any, Any, Any], index: int,
           journal: Journal) -> Generator[Any, Any, Any]:
    """Await `coroutine`; the journal knows whenever one of its steps begins."""
    resume, value = coroutine.send, None
    while True:
        journal.begin(index)
        try:
            waits_for = resume(value)
        except StopIteration as stop:
            return stop.value
        try:
            resume, value = coroutine.send, (yield waits_for)
        except BaseException as error:
            resume, value = coroutine.throw, error
