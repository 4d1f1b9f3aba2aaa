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
