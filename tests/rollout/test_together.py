"""Coroutines that end together, also when they are cancelled in the middle of it."""

from __future__ import annotations

import asyncio

import pytest

from grpo_megatron.rollout.together import finish_or_cancel


async def failing():
    raise ValueError("first")


def test_what_is_cancelled_while_others_settle_leaves_none_of_them():
    ended = []

    async def endless():
        try:
            await asyncio.sleep(600)
        finally:
            ended.append(True)

    async def run():
        together = asyncio.create_task(finish_or_cancel([failing(), endless()], settle_s=600))
        for _ in range(5):  # it waits for the second one now
            await asyncio.sleep(0)
        together.cancel()
        with pytest.raises(asyncio.CancelledError):
            await together
        assert ended == [True]

    asyncio.run(run())


def test_what_others_raise_within_the_time_is_told_with_the_first():
    async def later():
        await asyncio.sleep(0.01)
        raise ValueError("second")

    with pytest.raises(ValueError, match="first") as caught:
        asyncio.run(finish_or_cancel([failing(), later()], settle_s=600))
    assert caught.value.__notes__ == ["then: second"]
