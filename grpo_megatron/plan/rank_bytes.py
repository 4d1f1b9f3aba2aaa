"""Bytes that a rank holds from start to end (weights, gradients, optimizer state, buffers), and
beside them in a training step: the closed forms of `closed_forms.toml`.

The buffers of Megatron's DistributedDataParallel, which the distributed optimizer pads
(megatron/core/distributed/param_and_grad_buffer.py) and shards over data-parallel ranks."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from grpo_megatron.plan.weights import FORMS, Sizes, Weight, product, weights_of_chunk

_PARAMETER_ALIGNMENT, _BUCKET_ALIGNMENT = 64, 128
_Span = tuple[int, int]


def static_bytes(
    s: Sizes, stage: int, local_rank: int, *, frozen_routers: bool = False, overlaps: bool = False
) -> dict[str, int]:
    """`weights`, `gradients`, `optimizer` (Adam's moments, and float32 weights where the model's
    are not) and `buffers` of rank `local_rank` of a pipeline stage's ranks. Frozen routers have no
    gradients; reductions that overlap with computation (on GPUs) are done in buckets."""
    t = s.trainer
    element = s.symbols["element"]
    replicas = t.dp * t.context_parallel_size
    places = {
        False: (replicas, local_rank // t.tensor_parallel_size),
        True: (t.num_ranks // t.expert_ranks, local_rank // (t.etp * t.expert_parallel_size)),
    }
    num_frozen = num_elements = num_states = 0
    for chunk in range(s.num_chunks):
        weights = weights_of_chunk(s, stage, chunk)
        frozen = "router" if frozen_routers else None
        num_frozen += sum(w.numel for w in weights if w.kind == frozen)
        limit = (
            max(40_000_000, 1_000_000 * replicas)
            if overlaps and stage == chunk == 0
            else (math.inf)
        )
        for is_expert, (num_shards, shard) in places.items():
            if not t.distributed_optimizer:
                num_shards, shard = 0, 0
            part = [w for w in weights if (w.kind == "expert") == is_expert and w.kind != frozen]
            for start, end, spans in _buckets(part, num_shards, limit):
                size = (end - start) // max(num_shards, 1)
                first = start + shard * size
                num_states += sum(max(0, min(b, first + size) - max(a, first)) for a, b in spans)
                num_elements += end - start
    return {
        "weights": (num_elements + num_frozen) * element,
        "gradients": 4 * num_elements,
        "optimizer": (12 if element < 4 else 8) * num_states,
        "buffers": _buffers(s, stage),
    }


def _buckets(
    weights: Sequence[Weight], num_shards: int, limit: float
) -> Iterator[tuple[int, int, list[_Span]]]:
    """First element, end, and those of its weights, of every bucket: last weight first, as
    backward goes. Without shards nothing is padded."""
    aligned = _PARAMETER_ALIGNMENT if num_shards else 1
    multiple = math.lcm(num_shards, _BUCKET_ALIGNMENT) if num_shards else 1
    start = end = 0
    spans: list[_Span] = []
    for number, weight in enumerate(reversed(weights), start=1):
        first = _up(end, aligned)
        alone = weight.kind == "shared" and num_shards
        if alone and spans:
            yield start, _up(first, multiple), spans
            start = _up(first, multiple)
            first = _up(first, multiple)
            spans = []
        end = first + weight.numel
        spans.append((first, end))
        if alone or end - start >= limit or number == len(weights):
            yield start, _up(end, multiple), spans
            start = end = _up(end, multiple)
            spans = []


def _up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def _buffers(s: Sizes, stage: int) -> int:
    """Expert biases (float32, and counts of tokens) and yarn's rotary tables of MLA layers."""
    layers = [is_moe for chunk in range(s.num_chunks) for is_moe in s.layers_of(stage, chunk)]
    element = s.symbols["element"]
    found = 0
    if s.model.get("moe_router_enable_expert_bias"):
        found += sum(layers) * s.symbols["experts"] * (4 + element)
    if "latent" in s.symbols:
        positions = s.hf["rope"].get("original_max_position_embeddings", 0)
        found += len(layers) * 2 * positions * s.model["qk_pos_emb_head_dim"] * element
    return found


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
    """Bytes of `activations`, `logits`, `routing`, `communication` of a rank at their highest,
    for `tokens` of a full micro-batch and of the longest `sequence`."""
    t = s.trainer
    element = s.symbols["element"]
    tp = t.tensor_parallel_size
    pp = t.pipeline_parallel_size
    copies = element if on_gpu else 8  # torch's plain norms keep float32
    own = tokens // (tp if t.sp else 1)
    chunks = [weights_of_chunk(s, stage, chunk) for chunk in range(s.num_chunks)]
    buffers = [
        sum(w.numel for w in weights if (w.kind == "expert") == experts)
        for weights in chunks
        for experts in (True, False)
    ]
    s = replace(
        s,
        symbols={
            **s.symbols,
            "tokens": tokens,
            "own": own,
            "sequence": sequence,
            "norm": copies + element,
            "qk_copies": copies * bool(s.symbols.get("head_norm")),
            "rows": tokens * s.symbols["top_k"] * t.etp // tp,
            "upcast": 4 - element,
            "chunk": min(t.logprob_chunk_tokens, tokens),
            "plain": t.recompute == "none" and not on_gpu,
            "replayed": replayed,
            "is_last": stage == pp - 1,
            "pipelined": pp > 1,
            "dispatched": t.expert_parallel_size > 1,
            "nccl_dimensions": on_gpu
            * sum(size > 1 for size in (tp, pp, t.dp, t.expert_parallel_size)),
            "gloo_copy": 4 * max(buffers) * (t.distributed_optimizer and not on_gpu),
        },
    )
    found = {name: _total(forms, s) for name, forms in FORMS["beside"].items()}
    boundary = own * s.symbols["hidden"] * element
    layers = [
        _kept(s, is_moe) for chunk in range(s.num_chunks) for is_moe in s.layers_of(stage, chunk)
    ]
    held, one = (
        ([boundary] * len(layers), 2 * max(layers))
        if t.recompute == "full"
        else (layers, max(layers) // 2)
    )
    held = sum(held) + 2 * boundary * (pp > 1)
    activations = int(in_flight(s, stage, num_microbatches) * held) + one
    # Adam's two float32 copies of the largest weight's share, when activations have gone
    largest = max(w.numel for weights in chunks for w in weights)
    adam = 8 * largest // (t.dp if t.distributed_optimizer else 1)
    return {**found, "activations": max(activations, adam - found["logits"])}


def in_flight(s: Sizes, stage: int, num_microbatches: int) -> float:
    """Micro-batches whose activations a stage holds at one time; its chunks are parts of one."""
    later = s.trainer.pipeline_parallel_size - stage - 1
    if s.num_chunks == 1:
        return min(later + 1, num_microbatches)
    chunks = 2 * later + (s.num_chunks - 1) * s.trainer.pipeline_parallel_size + 1
    return min(chunks, num_microbatches * s.num_chunks) / s.num_chunks


def _kept(s: Sizes, is_moe: bool) -> int:
    """Bytes of one layer and micro-batch between forward and backward."""
    attention = "latent" if "latent" in s.symbols else "grouped_query"
    return sum(
        _total(FORMS["kept"][part], s) for part in ("norms", attention, "moe" if is_moe else "mlp")
    )


def _total(forms: Mapping[str, int], s: Sizes) -> int:
    return sum(count * product(form, s.symbols) for form, count in forms.items())
