"""Async rewards: the coroutines of a chunk, many at a time in the event loop of one worker.

A call over its limit is cancelled. Two things only the end of the process can stop: a coroutine
that blocks the loop (the parent sees the board stand still, and blames whose step began last), and
one that goes on after its cancellation (seen here, at twice the limit).
"""

from __future__ import annotations

import asyncio
import math
import os
import time
import types
from collections.abc import Callable, Coroutine, Generator, Mapping
from typing import Any

from grpo_megatron.rewards.board import SCORED, TIMED_OUT, Board
from grpo_megatron.rewards.registry import to_float


async def score_all(calls: Mapping[int, Callable[[], Any]], board: Board, *, timeout_s: float,
                    concurrency: int, raised: Callable[[int], None]) -> None:
    """Await what the calls return, at most `concurrency` at a time; `raised(index)` is called
    while an exception is handled."""
    free = asyncio.Semaphore(concurrency)
    started: dict[int, float] = {}

    async def score(index: int) -> None:
        async with free:
            started[index] = time.monotonic()
            try:
                async with asyncio.timeout(timeout_s) as limit:
                    value = to_float(await _noted(calls[index](), index, board))
                board.record(index, TIMED_OUT if limit.expired() else SCORED, value)
            except BaseException:  # also SystemExit, as of a plain reward
                if limit.expired():
                    board.record(index, TIMED_OUT, math.nan)
                else:
                    raised(index)
            del started[index]

    async def beat() -> None:
        while True:
            board.touch()
            await asyncio.sleep(timeout_s / 4)
            late = time.monotonic() - 2 * timeout_s
            for index in [index for index, since in started.items() if since < late]:
                board.begin(index)
                board.record(index, TIMED_OUT, math.nan)
                os._exit(1)

    beating = asyncio.ensure_future(beat())
    await asyncio.gather(*map(score, calls))
    beating.cancel()


@types.coroutine
def _noted(coroutine: Coroutine[Any, Any, Any], index: int,
           board: Board) -> Generator[Any, Any, Any]:
    """Await `coroutine`; the board knows whenever one of its steps begins."""
    resume, value = coroutine.send, None
    while True:
        board.begin(index)
        try:
            waits_for = resume(value)
        except StopIteration as stop:
            return stop.value
        try:
            resume, value = coroutine.send, (yield waits_for)
        except BaseException as error:
            resume, value = coroutine.throw, error
