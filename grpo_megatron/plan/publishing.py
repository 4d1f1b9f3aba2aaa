"""What a publish moves over each link, and how long the links need for it.

    each engine worker receives what it keeps; of the workers that keep the same parts, one in each
    replica, the first receives from the trainer and every other from the one before it

    seconds = bytes of a worker / link * (1 + (replicas - 1) / buckets)

A worker passes on a bucket when it is there as a whole, so the last is done (replicas - 1) buckets
after the first. The trainer's links carry less, unless it has fewer ranks than a replica has
workers."""

from dataclasses import dataclass

from grpo_megatron.config.run import RunConfig
from grpo_megatron.plan.devices import DEVICES

NETWORK = DEVICES["network"]
_BUCKETS = 64
_BUCKETS_PER_WORKER = 8
MIN_BUCKET_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class PublishPlan:
    """A publish of a run."""

    worker_bytes: int
    """What an engine worker keeps and receives."""
    sender_bytes: int
    """What a trainer rank sends, on the mean of all."""
    num_buckets: int
    """Into which a worker's bytes are divided."""
    num_replicas: int
    """Through which each bucket passes."""
    link_gbit: float
    """Of a GPU, in each direction."""

    @property
    def link_bytes_per_s(self) -> float:
        """What is left of a link for the weights."""
        return self.link_gbit * 1e9 / 8 * float(NETWORK["share"])

    @property
    def seconds(self) -> float:
        """How long the links need; an engine's pause and resume come on top."""
        behind = 1 + (self.num_replicas - 1) / self.num_buckets
        return max(self.worker_bytes * behind, self.sender_bytes) / self.link_bytes_per_s


def bucket_bytes(num_bytes: int, num_workers: int, max_bytes: int, min_bytes: int) -> int:
    """Return the size of the buckets of a stream of `num_bytes` through `num_workers`.

    There are so many that the last worker is hardly behind the first, and several even for a small
    model: a worker loads one while the next arrives."""
    num_buckets = max(_BUCKETS, _BUCKETS_PER_WORKER * num_workers)
    return min(max_bytes, max(min_bytes, num_bytes // num_buckets))


def plan_publish(config: RunConfig, worker_bytes: int) -> PublishPlan:
    """Plan the publish of a run whose engine workers keep `worker_bytes` each."""
    replicas = config.rollout.num_replicas
    size = bucket_bytes(worker_bytes, replicas, config.publish.bucket_mib << 20, MIN_BUCKET_BYTES)
    of_replica = worker_bytes * config.rollout.num_workers
    return PublishPlan(
        worker_bytes=worker_bytes,
        sender_bytes=of_replica // config.trainer.num_ranks,
        num_buckets=-(-worker_bytes // size),
        num_replicas=replicas,
        link_gbit=float(NETWORK["gbit"]),
    )
