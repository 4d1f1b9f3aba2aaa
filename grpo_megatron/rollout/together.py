"""Coroutines that run together, and end together."""

import asyncio
from collections.abc import Awaitable, Iterable
from typing import Any, TypeVar

Result = TypeVar("Result")


async def finish_or_cancel(
    coroutines: Iterable[Awaitable[Result]], settle_s: float = 0.0
) -> list[Result]:
    """Return the results of `coroutines`, run together, in order. When one fails, or this is
    cancelled, the others have `settle_s` seconds to end, are cancelled, and the error is raised;
    what they raised within that time is added to it as notes."""
    tasks = [asyncio.ensure_future(coroutine) for coroutine in coroutines]
    try:
        return await asyncio.gather(*tasks)
    except BaseException as error:
        try:
            done, _ = await asyncio.wait(tasks, timeout=settle_s)
        finally:  # this may be cancelled meanwhile
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        if settle_s > 0:
            _add_notes(error, done)
        raise


def _add_notes(error: BaseException, tasks: Iterable[asyncio.Future[Any]]) -> None:
    """What else was raised, told with `error`."""
    for task in tasks:
        if task.cancelled():
            continue
        other = task.exception()
        if other is not None and other is not error:
            error.add_note(f"then: {other}")
