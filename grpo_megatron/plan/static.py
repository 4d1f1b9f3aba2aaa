"""Bytes that a rank holds from start to end: weights, gradients, optimizer state, buffers.

The buffers of Megatron's DistributedDataParallel, which the distributed optimizer pads
(megatron/core/distributed/param_and_grad_buffer.py) and shards over data-parallel ranks.
"""

import math
from collections.abc import Iterator, Sequence

from grpo_megatron.plan.weights import Sizes, Weight, weights_of_chunk

_PARAMETER_ALIGNMENT, _BUCKET_ALIGNMENT = 64, 128
_Span = tuple[int, int]


def static_bytes(s: Sizes, stage: int, local_rank: int, *, frozen_routers: bool = False,
                 overlaps: bool = False) -> dict[str, int]:
    """`weights`, `gradients`, `optimizer` (Adam's moments, and float32 weights where the model's
    are not) and `buffers` of rank `local_rank` of a pipeline stage's ranks. Frozen routers have no
    gradients; reductions that overlap with computation (on GPUs) are done in buckets."""
    t, element = s.trainer, s.symbols["element"]
    replicas = s.layout.data_parallel_size * t.context_parallel_size
    experts_size = s.layout.expert_tensor_parallel_size * t.expert_parallel_size
    places = {False: (replicas, local_rank // t.tensor_parallel_size),
              True: (s.layout.expert_data_parallel_size, local_rank // experts_size)}
    num_frozen = num_elements = num_states = 0
    for chunk in range(s.num_chunks):
        weights = weights_of_chunk(s, stage, chunk)
        frozen = "router" if frozen_routers else None
        num_frozen += sum(w.numel for w in weights if w.kind == frozen)
        limit = max(40_000_000, 1_000_000 * replicas) if overlaps and stage == chunk == 0 else (
            math.inf)
        for is_expert, (num_shards, shard) in places.items():
            if not t.distributed_optimizer:
                num_shards, shard = 0, 0
            part = [w for w in weights if (w.kind == "expert") == is_expert and w.kind != frozen]
            for start, end, spans in _buckets(part, num_shards, limit):
                size = (end - start) // max(num_shards, 1)
                first = start + shard * size
                num_states += sum(max(0, min(b, first + size) - max(a, first)) for a, b in spans)
                num_elements += end - start
    return {"weights": (num_elements + num_frozen) * element, "gradients": 4 * num_elements,
            "optimizer": (12 if element < 4 else 8) * num_states, "buffers": _buffers(s, stage)}


def _buckets(weights: Sequence[Weight], num_shards: int,
             limit: float) -> Iterator[tuple[int, int, list[_Span]]]:
    """First element, end, and those of its weights, of every bucket: last weight first, as
    backward goes. Without shards nothing is padded."""
    aligned = _PARAMETER_ALIGNMENT if num_shards else 1
    multiple = math.lcm(num_shards, _BUCKET_ALIGNMENT) if num_shards else 1
    start = end = 0
    spans: list[_Span] = []
    for number, weight in enumerate(reversed(weights), start=1):
        first, alone = _up(end, aligned), weight.kind == "shared" and num_shards
        if alone and spans:
            yield start, _up(first, multiple), spans
            start, first, spans = _up(first, multiple), _up(first, multiple), []
        end = first + weight.numel
        spans.append((first, end))
        if alone or end - start >= limit or number == len(weights):
            yield start, _up(end, multiple), spans
            start = end = _up(end, multiple)
            spans = []


def _up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def _buffers(s: Sizes, stage: int) -> int:
    """Selection biases (float32, and counts of tokens) and yarn's rotary tables of MLA layers."""
    layers = [is_moe for chunk in range(s.num_chunks) for is_moe in s.layers_of(stage, chunk)]
    element, found = s.symbols["element"], 0
    if s.model.get("moe_router_enable_expert_bias"):
        found += sum(layers) * s.symbols["experts"] * (4 + element)
    if "latent" in s.symbols:
        positions = s.hf["rope"].get("original_max_position_embeddings", 0)
        found += len(layers) * 2 * positions * s.model["qk_pos_emb_head_dim"] * element
    return found
