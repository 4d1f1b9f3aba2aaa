"""Async rewards: concurrent up to a bound, cancelled at their limit, ended where that fails."""

from __future__ import annotations

import asyncio
import math

import numpy as np
import pytest

from grpo_megatron.rewards.pool import RewardPool
from tests.rewards.reward_pools import HOSTILE, domain, group, score

ASYNC = f"{HOSTILE}:coroutine"
TIMEOUT_S = 0.5


@pytest.mark.parametrize(
    ("order", "cause", "killed"),
    [
        ("sleep", "timed_out", False),
        ("late", "timed_out", False),
        ("stubborn", "timed_out", True),
        ("loop", "timed_out", True),
        ("nested loop", "timed_out", True),
        ("exit", "died", True),
        ("raise", "raised", False),
        ("sys.exit", "raised", False),
        ("interrupt", "raised", False),
        ("own timeout", "raised", False),
        ("cancelled", "raised", False),
        ("str", "raised", False),
    ],
)
def test_a_hostile_coroutine_costs_itself_only(order, cause, killed):
    [scored], pool = score(
        [domain(ASYNC)],
        [group(["1", "2", order, "3", order, "None", "4"])],
        timeout_s=TIMEOUT_S if cause == "timed_out" else 60,
        concurrency=2,
    )
    np.testing.assert_equal(scored.rewards, [1, 2, math.nan, 3, math.nan, math.nan, 4])
    metrics = pool.take_metrics()
    assert metrics[f"reward/d.coroutine/{cause}"] == 2
    assert (metrics["reward/pool/restarts"] > 0) == killed
    assert bool(pool.components[0].trace) == (cause == "raised")


def test_as_many_as_allowed_run_at_a_time():
    together = ["most at a time"] * 5
    [scored], _ = score([domain(ASYNC)], [group(together)], timeout_s=60, concurrency=5)
    assert scored.rewards.tolist() == [5] * 5
    [scored], pool = score(
        [domain(ASYNC)], [group([*together, "1"])], timeout_s=TIMEOUT_S, concurrency=4
    )
    assert np.isnan(scored.rewards[:4]).all() and scored.rewards[4:].tolist() == [5, 1]
    assert pool.take_metrics()["reward/d.coroutine/timed_out"] == 4


def test_plain_and_async_rewards_share_a_chunk():
    domains = [domain(ASYNC, {"function": f"{HOSTILE}:obey", "weight": 10.0})]
    [scored], pool = score(domains, [group(["1", "raise", "exit", "2"])], timeout_s=60)
    np.testing.assert_equal(scored.rewards, [11, math.nan, math.nan, 22])
    metrics = pool.take_metrics()
    assert metrics["reward/d.obey/died"] == metrics["reward/d.coroutine/died"] == 1


@pytest.mark.parametrize(
    "name",
    ["hidden_coroutine", "wrapped_coroutine", "ended_coroutine", "callable_coroutine", "future"],
)
@pytest.mark.parametrize(
    ("order", "cause", "killed"),
    [("sleep", "timed_out", None), ("raise", "raised", False), ("exit", "died", True)],
)
def test_what_is_to_be_awaited_is_awaited_whatever_hides_it(name, order, cause, killed):
    [scored], pool = score(
        [domain(f"{HOSTILE}:{name}")],
        [group(["1", order, "2", "None"])],
        timeout_s=2.0 if cause == "timed_out" else 60,
    )
    np.testing.assert_equal(scored.rewards, [1, math.nan, 2, math.nan])
    metrics = pool.take_metrics()
    assert metrics[f"reward/d.{name}/{cause}"] == 1
    if killed is not None:
        assert (metrics["reward/pool/restarts"] > 0) == killed


def test_an_object_whose_call_is_async_runs_beside_others():
    texts = ["most at a time"] * 5
    [scored], _ = score(
        [domain(f"{HOSTILE}:callable_coroutine")], [group(texts)], timeout_s=60, concurrency=5
    )
    assert scored.rewards.tolist() == [5] * 5


HIDDEN = ["hidden_coroutine", "wrapped_coroutine", "future"]
"""What returns coroutines, or other things to be awaited, and is no async function."""


@pytest.mark.parametrize("batches", [[6], [1, 5]])
@pytest.mark.parametrize("name", HIDDEN)
def test_what_turns_out_to_be_awaited_runs_beside_others(name, batches):
    """The first call alone, since only that says so; the next batch from its first call on."""
    texts = ["1", *["most at a time"] * 5]

    async def run() -> list[float]:
        found = []
        async with RewardPool([domain(f"{HOSTILE}:{name}")], timeout_s=60, concurrency=5) as pool:
            for size in batches:
                [scored] = await pool.score([group(texts[len(found) :][:size])])
                found += scored.rewards.tolist()
        return found

    assert asyncio.run(run()) == [1, 5, 5, 5, 5, 5]


def test_plain_rewards_and_those_that_turn_out_to_be_awaited_share_a_chunk():
    """The plain ones are answered in their order before the others are awaited."""
    plain = {"function": f"{HOSTILE}:obey", "weight": 10.0}
    hidden = [f"{HOSTILE}:{name}" for name in HIDDEN]
    texts = ["1", "raise", "2", "exit", "3", "None", "4"]
    [scored], pool = score([domain(plain, *hidden)], [group(texts)], timeout_s=60)
    nan = math.nan
    np.testing.assert_equal(scored.rewards, [13, nan, 26, nan, 39, nan, 52])
    metrics = pool.take_metrics()
    for name in ("obey", *HIDDEN):
        assert metrics[f"reward/d.{name}/died"] == metrics[f"reward/d.{name}/raised"] == 1


@pytest.mark.parametrize("name", HIDDEN)
def test_what_turns_out_to_be_awaited_is_cancelled_at_its_limit(name):
    texts = ["1", "sleep", "2", "sleep", "3"]
    [scored], pool = score([domain(f"{HOSTILE}:{name}")], [group(texts)], timeout_s=2.0)
    np.testing.assert_equal(scored.rewards, [1, math.nan, 2, math.nan, 3])
    metrics = pool.take_metrics()
    assert metrics[f"reward/d.{name}/timed_out"] == 2
    assert metrics["reward/pool/restarts"] == 0


def test_what_is_awaited_now_and_then_is_awaited_then():
    [scored], _ = score(
        [domain(f"{HOSTILE}:awaited_if_odd")], [group(["1", "2", "3", "4"])], timeout_s=60
    )
    assert scored.rewards.tolist() == [1, 2, 3, 4]
