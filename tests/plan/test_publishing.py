"""What a publish moves, and how long links need."""

from __future__ import annotations

import pytest

from grpo_megatron.plan.memory import plan_of
from grpo_megatron.plan.publishing import PublishPlan, bucket_bytes
from grpo_megatron.plan.resolve import resolve

MIB = 1 << 20


@pytest.mark.parametrize(
    ("num_bytes", "num_workers", "expected"),
    [
        (1000 * MIB, 1, 1000 * MIB // 64),
        (1000 * MIB, 8, 1000 * MIB // 64),
        (1000 * MIB, 16, 1000 * MIB // 128),
        (10 * MIB, 1, MIB),  # not smaller
        (100_000 * MIB, 1, 256 * MIB),  # not larger
    ],
)
def test_buckets_follow_from_what_a_worker_keeps(num_bytes, num_workers, expected):
    assert bucket_bytes(num_bytes, num_workers, 256 * MIB, MIB) == expected


def test_the_busiest_link_sets_the_time():
    """45 GB a worker over 45 GB/s, the fifth replica four of forty buckets behind the first."""
    plan = PublishPlan(45 * 10**9, 9 * 10**9, num_buckets=40, num_replicas=5, link_gbit=400)
    assert plan.link_bytes_per_s == 45e9
    assert plan.seconds == pytest.approx(1.1)
    one_sender = PublishPlan(45 * 10**9, 90 * 10**9, num_buckets=40, num_replicas=5, link_gbit=400)
    assert one_sender.seconds == pytest.approx(2.0)


@pytest.mark.parametrize(("recipe", "limit"), [("moe/qwen3-235b-a22b", 2), ("moe/deepseek-v3", 4)])
def test_large_models_are_published_in_seconds(recipe, limit):
    config = resolve(recipe, []).config
    publish = plan_of(config).publish
    assert publish.seconds < limit
    replicas = config.rollout.num_replicas
    assert publish.num_buckets >= 8 * replicas
    total = publish.worker_bytes * config.rollout.num_workers
    assert publish.sender_bytes == total // config.trainer.num_ranks
