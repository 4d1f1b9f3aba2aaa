"""Bytes that a rank holds from start to end: weights, gradients, optimizer state, buffers.

The gradient buffers of Megatron's DistributedDataParallel, which the distributed optimizer pads
(megatron/core/distributed/param_and_grad_buffer.py) and shards over data-parallel ranks.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from grpo_megatron.plan.weights import Sizes, Weight, weights_of_chunk

_PARAMETER_ALIGNMENT, _BUCKET_ALIGNMENT = 64, 128
_GRADIENT_BYTES, _MOMENTS_BYTES, _MAIN_BYTES = 4, 8, 4


@dataclass(frozen=True, slots=True)
class StaticBytes:
    """Of one rank."""

    weights: int
    gradients: int
    optimizer: int
    """Adam's moments, and float32 weights where the model's are not."""
    buffers: int
    """Selection biases of routers and tables of rotary angles."""


def static_bytes(s: Sizes, stage: int, local_rank: int, *, frozen_routers: bool = False,
                 overlaps: bool = False) -> StaticBytes:
    """Of rank `local_rank` of the ranks of pipeline stage `stage`; see `ranks_of_stage`.

    Args:
        frozen_routers: `routing.router_policy = "freeze_weights"`: they have no gradients.
        overlaps: gradients are reduced while others are computed (on GPUs), so in buckets.
    """
    sharded, layout = s.trainer.distributed_optimizer, s.layout
    experts_size = s.etp * s.trainer.expert_parallel_size
    places = {False: (layout.data_parallel_size * s.trainer.context_parallel_size,
                      local_rank // s.tp),
              True: (layout.expert_data_parallel_size, local_rank // experts_size)}
    num_weights = num_gradients = num_states = 0
    for chunk in range(s.num_chunks):
        weights = weights_of_chunk(s, stage, chunk)
        frozen = [w for w in weights if w.is_router and frozen_routers]
        num_weights += sum(w.numel for w in frozen)
        for is_expert, (num_shards, shard) in places.items():
            part = [w for w in weights if w.is_expert == is_expert and w not in frozen]
            if not sharded:
                num_shards = shard = 0
            limit = max(40_000_000, 1_000_000 * places[False][0])
            buckets = list(_buckets(part, num_shards, limit if overlaps and not (
                stage or chunk) else math.inf))
            padded = buckets[-1].end if buckets else 0
            num_weights, num_gradients = num_weights + padded, num_gradients + padded
            num_states += sum(bucket.held_by(shard, num_shards) for bucket in buckets)
    state = _MOMENTS_BYTES + (_MAIN_BYTES if s.element_bytes < 4 else 0)
    return StaticBytes(num_weights * s.element_bytes, num_gradients * _GRADIENT_BYTES,
                       num_states * state, _buffers(s, stage))


def ranks_of_stage(s: Sizes) -> range:
    """Ranks of a pipeline stage; rank i of stage p is rank `p * len + i` of the world."""
    return range(s.trainer.num_ranks // s.pp)


@dataclass(frozen=True, slots=True)
class _Bucket:
    start: int
    end: int
    spans: tuple[tuple[int, int], ...]
    """First element and end of every weight."""

    def held_by(self, shard: int, num_shards: int) -> int:
        """Elements of weights, without padding, in a shard; of all without shards."""
        size = (self.end - self.start) // max(num_shards, 1)
        first = self.start + shard * size
        return sum(max(0, min(end, first + size) - max(start, first))
                   for start, end in self.spans)


def _buckets(weights: Sequence[Weight], num_shards: int, limit: float) -> Iterator[_Bucket]:
    """Last weight first, as backward goes; without shards nothing is padded."""
    aligned = _PARAMETER_ALIGNMENT if num_shards else 1
    multiple = math.lcm(num_shards, _BUCKET_ALIGNMENT) if num_shards else 1
    start = end = 0
    spans: list[tuple[int, int]] = []
    for number, weight in enumerate(reversed(weights), start=1):
        first = _up(end, aligned)
        splits = weight.is_shared and num_shards
        if splits and spans:
            yield _Bucket(start, _up(first, multiple), tuple(spans))
            start, first, spans = _up(first, multiple), _up(first, multiple), []
        end = first + weight.numel
        spans.append((first, end))
        if splits or end - start >= limit or number == len(weights):
            yield _Bucket(start, _up(end, multiple), tuple(spans))
            start = end = _up(end, multiple)
            spans = []


def _up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def _buffers(s: Sizes, stage: int) -> int:
    m, layers = s.model, [layer for chunk in range(s.num_chunks)
                          for layer in s.layers_of_chunk(stage, chunk)]
    num_moe = sum(layer in s.moe_layers for layer in layers)
    biases = m.get("moe_router_enable_expert_bias")  # one float32 each, and a count of tokens
    found = num_moe * m["num_moe_experts"] * (4 + s.element_bytes) if biases else 0
    if m.get("multi_latent_attention") and s.yarn_positions:  # cosines and sines, every layer
        found += len(layers) * 2 * s.yarn_positions * m["qk_pos_emb_head_dim"] * s.element_bytes
    return found
