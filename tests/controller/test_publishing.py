"""Engines that sleep while the trainer has their devices."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest

from grpo_megatron.controller.publishing import Publisher
from grpo_megatron.rollout.publish import WeightPublisher
from tests.controller.cases import recipe


def test_a_new_set_of_engines_is_woken_by_whoever_publishes_next():
    """One of them died asleep; the others hold neither weights nor keys and values."""
    calls = []

    async def control(path, *args, params=None, **options):
        calls.append((path, params))

    async def done(*args, **options):
        return {}

    client = SimpleNamespace(control=control, call_workers=done, reset_prefix_cache=done,
                             set_weight_version=done)
    alive = [SimpleNamespace(client=client)]

    async def run():
        publisher = Publisher(recipe(publish={"method": "file"}, placement={
            "mode": "colocated", "gpus_per_node": 1}), None, None, SimpleNamespace(alive=alive))
        await publisher.make_room()
        await publisher._connect([client])
        await publisher._publisher.publish_file(1, "x")

    asyncio.run(run())
    assert calls == [("/wake_up", {"tags": "weights"}), ("/wake_up", {"tags": "kv_cache"}),
                     ("/resume", None)]


@pytest.mark.parametrize(("sleep", "expected"), [
    (True, ["/pause", "/sleep", "/wake_up", "/resume"]), (False, ["/pause", "/resume"])])
def test_a_judge_rests_between_uses(sleep, expected):
    calls = []

    async def control(path, *args, **options):
        calls.append(path)

    async def run():
        judges = WeightPublisher([SimpleNamespace(control=control)])
        await judges.rest(sleep=sleep)
        await judges.wake()

    asyncio.run(run())
    assert calls == expected
