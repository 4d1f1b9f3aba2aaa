"""Async rewards: concurrent up to a bound, cancelled at their limit, ended where that fails."""

from __future__ import annotations

import math

import numpy as np
import pytest

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
