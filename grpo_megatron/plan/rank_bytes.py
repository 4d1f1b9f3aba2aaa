"""Bytes that a rank holds from start to end (weights, gradients, optimizer state, buffers), and
beside them in a training step: the closed forms of `closed_forms.toml`.

The buffers of Megatron's DistributedDataParallel, which the distributed optimizer pads
(megatron/core/distributed/param_and_grad_buffer.py) and shards over data-parallel ranks."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from grpo_megatron.config.trainer import TrainerConfig
from grpo_megatron.plan.weights import FORMS, Sizes, Weight, product, weights_of_chunk

_PARAMETER_ALIGNMENT = 64
_BUCKET_ALIGNMENT = 128


@dataclass(frozen=True, slots=True)
class BytesPerParameter:
    """What one parameter that is trained needs."""

    weights: int
    gradients: int
    optimizer: int  # Adam's moments, and float32 weights where the model's are not


def bytes_per_parameter(element: int) -> BytesPerParameter:
    """By the bytes of a weight; optimizer state is shared by the ranks that shard it."""
    moments = 8
    main_weight = 0
    if element < 4:
        main_weight = 4
    return BytesPerParameter(element, 4, moments + main_weight)


def static_bytes(
    s: Sizes, stage: int, local_rank: int, *, frozen_routers: bool = False, overlaps: bool = False
) -> dict[str, int]:
    """`weights`, `gradients`, `optimizer` (Adam's moments, and float32 weights where the model's
    are not) and `buffers` of rank `local_rank` of a pipeline stage's ranks. Frozen routers have no
    gradients; reductions that overlap with computation are done in buckets."""
    t = s.trainer
    element = s.symbols["element"]
    replicas, expert_replicas = shard_counts(t)
    dense_shard = _Shard(local_rank // t.tensor_parallel_size, replicas)
    expert_shard = _Shard(local_rank // (t.etp * t.expert_parallel_size), expert_replicas)
    num_frozen = 0
    num_elements = 0
    num_states = 0
    for chunk in range(s.num_chunks):
        bucket_limit = math.inf
        if overlaps and stage == chunk == 0:
            bucket_limit = max(40_000_000, 1_000_000 * replicas)
        trained = []
        for weight in weights_of_chunk(s, stage, chunk):
            if frozen_routers and weight.kind == "router":
                num_frozen += weight.numel
            else:
                trained.append(weight)
        experts = [weight for weight in trained if weight.kind == "expert"]
        others = [weight for weight in trained if weight.kind != "expert"]
        for weights, shard in ((others, dense_shard), (experts, expert_shard)):
            if not t.distributed_optimizer:
                shard = _WHOLE
            for bucket in _buckets(weights, shard.count, bucket_limit):
                num_elements += bucket.size
                num_states += bucket.num_states(shard)
    of_one = bytes_per_parameter(element)
    return {
        "weights": of_one.weights * (num_elements + num_frozen),
        "gradients": of_one.gradients * num_elements,
        "optimizer": of_one.optimizer * num_states,
        "buffers": _buffers(s, stage),
    }


def shard_counts(trainer: TrainerConfig) -> tuple[int, int]:
    """Ranks that share the optimizer state of a weight, and of an expert's weight, where the
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
        """Elements of weights, which have optimizer state, in a shard of the bucket."""
        size = self.size // max(shard.count, 1)
        first = self.start + shard.index * size
        last = first + size
        return sum(max(0, min(end, last) - max(start, first)) for start, end in self.spans)


def _buckets(weights: Sequence[Weight], num_shards: int, limit: float) -> Iterator[_Bucket]:
    """The buckets of a buffer: last weight first, as backward goes. Without shards nothing is
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
    layers = _layers_of_stage(s, stage)
    element = s.symbols["element"]
    found = 0
    if s.model.get("moe_router_enable_expert_bias"):
        found += sum(layers) * s.symbols["experts"] * (4 + element)
    if "latent" in s.symbols:
        positions = s.hf["rope"].get("original_max_position_embeddings", 0)
        found += len(layers) * 2 * positions * s.model["qk_pos_emb_head_dim"] * element
    return found


def _layers_of_stage(s: Sizes, stage: int) -> list[bool]:
    """Of all model chunks of a stage: does the layer have experts?"""
    layers = []
    for chunk in range(s.num_chunks):
        layers += s.layers_of(stage, chunk)
    return layers


def step_bytes(
    s: Sizes,
    stage: int,
    *,
    tokens: int,
    sequence: int,
    num_microbatches: int,
    on_gpu: bool,
    replayed: bool,
) -> dict[str, int]:
    """Bytes of `activations`, `logits`, `routing`, `communication` and `libraries` of a rank at
    their highest, for `tokens` of a full micro-batch and of the longest `sequence`."""
    t = s.trainer
    chunks = [weights_of_chunk(s, stage, chunk) for chunk in range(s.num_chunks)]
    symbols = {
        **s.symbols,
        **_step_symbols(s, stage, tokens, on_gpu=on_gpu),
        "sequence": sequence,
        "replayed": replayed,
    }
    if t.distributed_optimizer and not on_gpu:
        symbols["gloo_copy"] = 4 * _largest_buffer(chunks)
    s = replace(s, symbols=symbols)

    found = {name: _total(forms, s) for name, forms in FORMS["beside"].items()}
    boundary = symbols["own"] * symbols["hidden"] * symbols["element"]
    layers = [_kept(s, is_moe) for is_moe in _layers_of_stage(s, stage)]
    if t.recompute == "full":
        held = boundary * len(layers)
        computed_again = 2 * max(layers)
    else:
        held = sum(layers)
        computed_again = max(layers) // 2
    if t.pipeline_parallel_size > 1:
        held += 2 * boundary
    activations = int(in_flight(s, stage, num_microbatches) * held) + computed_again
    # Adam's two float32 copies of the largest weight's share, when activations have gone
    largest = 0
    for weights in chunks:
        for weight in weights:
            largest = max(largest, weight.numel)
    adam = 8 * largest
    if t.distributed_optimizer:
        adam //= t.dp
    return {**found, "activations": max(activations, adam - found["logits"])}


def _step_symbols(s: Sizes, stage: int, tokens: int, *, on_gpu: bool) -> dict[str, Any]:
    """What the closed forms of a step say beside the model's sizes."""
    t = s.trainer
    element = s.symbols["element"]
    tp = t.tensor_parallel_size
    pp = t.pipeline_parallel_size
    own = tokens
    if t.sp:
        own = tokens // tp
    norm_copy = element
    nccl_dimensions = 0
    if on_gpu:
        sizes = (tp, pp, t.dp, t.expert_parallel_size)
        nccl_dimensions = sum(size > 1 for size in sizes)
    else:
        norm_copy = 8  # torch's plain norms keep float32
    return {
        "tokens": tokens,
        "own": own,
        "norm": norm_copy + element,
        "qk_copies": norm_copy * bool(s.symbols.get("head_norm")),
        "rows": tokens * s.symbols["top_k"] * t.etp // tp,
        "upcast": 4 - element,
        "chunk": min(t.logprob_chunk_tokens, tokens),
        "plain": t.recompute == "none" and not on_gpu,
        "is_last": stage == pp - 1,
        "keeps_logits": t.keep_logits,
        "pipelined": pp > 1,
        "dispatched": t.expert_parallel_size > 1,
        "nccl_dimensions": nccl_dimensions,
        "gloo_copy": 0,
    }


def _largest_buffer(chunks: Sequence[Sequence[Weight]]) -> int:
    """Elements; each model chunk has one buffer for experts and one for the rest."""
    sizes = []
    for weights in chunks:
        experts = sum(weight.numel for weight in weights if weight.kind == "expert")
        others = sum(weight.numel for weight in weights if weight.kind != "expert")
        sizes += [experts, others]
    return max(sizes)


def in_flight(s: Sizes, stage: int, num_microbatches: int) -> float:
    """Micro-batches whose activations a stage holds at one time; its chunks are parts of one."""
    later = s.trainer.pipeline_parallel_size - stage - 1
    if s.num_chunks == 1:
        return min(later + 1, num_microbatches)
    chunks = 2 * later + (s.num_chunks - 1) * s.trainer.pipeline_parallel_size + 1
    return min(chunks, num_microbatches * s.num_chunks) / s.num_chunks


def _kept(s: Sizes, is_moe: bool) -> int:
    """Bytes of one layer and micro-batch between forward and backward."""
    mlp = "mlp"
    if is_moe:
        mlp = "moe"
    parts = ("norms", s.attention, mlp)
    return sum(_total(FORMS["kept"][part], s) for part in parts)


def _total(forms: Mapping[str, int], s: Sizes) -> int:
    return sum(count * product(form, s.symbols) for form, count in forms.items())
