"""Bytes that a rank holds from start to end: weights, gradients, optimizer state, buffers.
`step_memory` has those beside them in a training step.

The buffers of Megatron's DistributedDataParallel, which the distributed optimizer pads
(megatron/core/distributed/param_and_grad_buffer.py) and shards over data-parallel ranks."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from grpo_megatron.config.trainer import TrainerConfig
from grpo_megatron.plan.weights import Sizes, Weight, weights_of_chunk

_PARAMETER_ALIGNMENT = 64
_BUCKET_ALIGNMENT = 128


@dataclass(frozen=True, slots=True)
class BytesPerParameter:
    """What one parameter that is trained needs."""

    weights: int
    gradients: int
    optimizer: int  # Adam's moments, and float32 weights where the model's are not


def bytes_per_parameter(element: int) -> BytesPerParameter:
    """Return the bytes per parameter, by those of a weight; optimizer state is divided among the
    ranks that shard it."""
    moments = 8
    main_weight = 0
    if element < 4:
        main_weight = 4
    return BytesPerParameter(element, 4, moments + main_weight)


HOST_BYTES_PER_PARAMETER = 16
"""Of an offloaded optimizer: a float32 weight, two moments and a gradient."""


def static_bytes(
    s: Sizes,
    stage: int,
    local_rank: int,
    *,
    frozen_routers: bool = False,
    overlaps: bool = False,
    offloads: bool = False,
) -> dict[str, int]:
    """`weights`, `gradients`, `optimizer` (Adam's moments, and float32 weights where the model's
    are not) and `buffers` of rank `local_rank` of a pipeline stage's ranks, on its device. Frozen
    routers have no gradients; reductions that overlap with computation are done in buckets; an
    optimizer that is offloaded has its state elsewhere, see `HOST_BYTES_PER_PARAMETER`."""
    t = s.trainer
    element = s.symbols["element"]
    replicas, expert_replicas = shard_counts(t)
    shards = {
        "": _Shard(local_rank // t.tensor_parallel_size, replicas),
        "expert": _Shard(local_rank // (t.etp * t.expert_parallel_size), expert_replicas),
    }
    num_frozen = 0
    num_elements = 0
    num_states = 0
    for chunk in range(s.num_chunks):
        for weight in weights_of_chunk(s, stage, chunk):
            if _is_frozen(weight, frozen_routers=frozen_routers):
                num_frozen += weight.numel
    buckets = _buckets_of_stage(s, stage, frozen_routers=frozen_routers, overlaps=overlaps)
    for kind, bucket in buckets:
        shard = shards[kind]
        if not t.distributed_optimizer:
            shard = _WHOLE
        num_elements += bucket.size
        num_states += bucket.num_states(shard)
    of_one = bytes_per_parameter(element)
    if offloads:
        num_states = 0
    return {
        "weights": of_one.weights * (num_elements + num_frozen),
        "gradients": of_one.gradients * num_elements,
        "optimizer": of_one.optimizer * num_states,
        "buffers": _buffers(s, stage),
    }


def gradient_elements(
    s: Sizes, stage: int, *, frozen_routers: bool = False, overlaps: bool = False
) -> tuple[int, int]:
    """Return elements of a stage's gradient buffers, with padding: of experts, after those of the
    rest."""
    found = {"": 0, "expert": 0}
    buckets = _buckets_of_stage(s, stage, frozen_routers=frozen_routers, overlaps=overlaps)
    for kind, bucket in buckets:
        found[kind] += bucket.size
    return found[""], found["expert"]


def _buckets_of_stage(
    s: Sizes, stage: int, *, frozen_routers: bool, overlaps: bool
) -> Iterator[tuple[str, "_Bucket"]]:
    """Yield every bucket of a stage's buffers, with "expert" or "" as its kind."""
    replicas, expert_replicas = shard_counts(s.trainer)
    for chunk in range(s.num_chunks):
        bucket_limit = math.inf
        if overlaps and stage == chunk == 0:
            bucket_limit = max(40_000_000, 1_000_000 * replicas)
        experts = []
        others = []
        for weight in weights_of_chunk(s, stage, chunk):
            if _is_frozen(weight, frozen_routers=frozen_routers):
                continue
            if weight.kind == "expert":
                experts.append(weight)
            else:
                others.append(weight)
        for kind, weights, count in (
            ("", others, replicas),
            ("expert", experts, expert_replicas),
        ):
            if not s.trainer.distributed_optimizer:
                count = _WHOLE.count
            for bucket in _buckets(weights, count, bucket_limit):
                yield kind, bucket


def _is_frozen(weight: Weight, *, frozen_routers: bool) -> bool:
    """Whether a weight has neither gradient nor optimizer state."""
    return not weight.is_trained or (frozen_routers and weight.kind == "router")


def shard_counts(trainer: TrainerConfig) -> tuple[int, int]:
    """Return ranks that share the optimizer state of a weight, and of an expert's weight, where the
    optimizer is distributed."""
    replicas = trainer.dp * trainer.context_parallel_size
    return replicas, trainer.num_ranks // trainer.expert_ranks


def inference_bytes(s: Sizes, stage: int) -> dict[str, int]:
    """`weights` and `buffers` of a rank of a model that is only computed, as a reference is: no
    gradients, nothing is padded."""
    num_elements = 0
    for chunk in range(s.num_chunks):
        num_elements += sum(weight.numel for weight in weights_of_chunk(s, stage, chunk))
    return {"weights": num_elements * s.symbols["element"], "buffers": _buffers(s, stage)}


@dataclass(frozen=True, slots=True)
class _Shard:
    """The part of every bucket of which a rank has the optimizer state."""

    index: int
    count: int


_WHOLE = _Shard(0, 0)
"""Without the distributed optimizer: nothing is sharded, nothing is padded."""


@dataclass(frozen=True, slots=True)
class _Bucket:
    start: int  # in elements of the buffer
    end: int
    spans: list[tuple[int, int]]  # of its weights; between them is padding

    @property
    def size(self) -> int:
        return self.end - self.start

    def num_states(self, shard: _Shard) -> int:
        """Return elements of weights, which have optimizer state, in a shard of the bucket."""
        size = self.size // max(shard.count, 1)
        first = self.start + shard.index * size
        last = first + size
        return sum(max(0, min(end, last) - max(start, first)) for start, end in self.spans)


def _buckets(weights: Sequence[Weight], num_shards: int, limit: float) -> Iterator[_Bucket]:
    """Yield the buckets of a buffer: last weight first, as backward goes. Without shards nothing is
    padded."""
    aligned = 1
    multiple = 1
    if num_shards:
        aligned = _PARAMETER_ALIGNMENT
        multiple = math.lcm(num_shards, _BUCKET_ALIGNMENT)
    start = 0
    end = 0
    spans: list[tuple[int, int]] = []
    for number, weight in enumerate(reversed(weights), start=1):
        first = _up(end, aligned)
        alone = weight.kind == "shared" and num_shards
        if alone and spans:
            first = _up(first, multiple)
            yield _Bucket(start, first, spans)
            start = first
            spans = []
        end = first + weight.numel
        spans.append((first, end))
        if alone or end - start >= limit or number == len(weights):
            end = _up(end, multiple)
            yield _Bucket(start, end, spans)
            start = end
            spans = []


def _up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def _buffers(s: Sizes, stage: int) -> int:
    """Expert biases (float32, and counts of tokens) and yarn's rotary tables of MLA layers."""
    layers = s.layers_of_stage(stage)
    element = s.symbols["element"]
    found = 0
    if s.model.get("moe_router_enable_expert_bias"):
        found += sum(layers) * s.symbols["experts"] * (4 + element)
    if "latent" in s.symbols:
        positions = s.hf["rope"].get("original_max_position_embeddings", 0)
        found += len(layers) * 2 * positions * s.model["qk_pos_emb_head_dim"] * element
    return found
