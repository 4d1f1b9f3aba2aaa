"""What a training step holds beside the static bytes: activations, logits, communication.

Coefficients were counted on the real layers (docs/planning.md). Packed tokens, no padding to
the longest sequence; w: width of an MLP, a: bytes of an element.
"""

from __future__ import annotations

from dataclasses import dataclass

from grpo_megatron.plan.weights import Sizes, weights_of_chunk

_MLP_WIDTHS = 5
"""Gate and up, activated gate, up, product."""
_EXPERT_WIDTHS = 6
"""The same and the product before the gate probabilities."""
_LOGIT_COPIES = 6
"""Float32 [chunk, vocabulary] that the backward of the log-probs holds at one time."""
_NCCL_BYTES = 512 * 2**20
"""Channels of a dimension of the layout; not measured here."""


@dataclass(frozen=True, slots=True)
class Workload:
    """What the recipe asks of a rank."""

    tokens: int
    """Of a full micro-batch."""
    sequence: int
    """Longest sequence."""
    num_microbatches: int
    on_gpu: bool
    replays_routes: bool = False


def kept_by_layer(s: Sizes, work: Workload, is_moe: bool) -> int:
    """Bytes of one layer and micro-batch between forward and backward, without recomputation."""
    own = work.tokens // (s.tp if s.layout.sequence_parallel else 1)
    mlp = _experts(s, work) if is_moe else _MLP_WIDTHS * work.tokens * (
        s.model["ffn_hidden_size"] // s.tp) * s.element_bytes
    latent = s.model.get("multi_latent_attention")
    attention = _latent(s, work, own) if latent else _grouped_query(s, work)
    return 2 * own * _norm(s, work, s.hidden) + attention + mlp


def _norm(s: Sizes, work: Workload, width: int) -> int:
    """Bytes a token: input and output; torch's plain norm also keeps two float32 copies."""
    return width * (2 * s.element_bytes if work.on_gpu else 8 + s.element_bytes)


def _grouped_query(s: Sizes, work: Workload) -> int:
    m, a = s.model, s.element_bytes
    query, key = (m[name] * m["kv_channels"] // s.tp
                  for name in ("num_attention_heads", "num_query_groups"))
    # projected, rotated queries and keys, output, log of the normaliser
    per_token = (3 * query + 3 * key) * a + 4 * m["num_attention_heads"] // s.tp
    if m.get("qk_layernorm"):
        per_token += _norm(s, work, query + key) - (query + key) * a
    return work.tokens * per_token


def _latent(s: Sizes, work: Workload, own: int) -> int:
    m, a, heads = s.model, s.element_bytes, s.model["num_attention_heads"] // s.tp
    query, value = heads * (m["qk_head_dim"] + m["qk_pos_emb_head_dim"]), heads * m["v_head_dim"]
    latents = (m["q_lora_rank"] or 0) + m["kv_lora_rank"]
    found = own * _norm(s, work, latents) + work.tokens * (2 * query + 2 * value) * a
    if s.trainer.recompute == "none" and not work.on_gpu:  # torch's plain attention
        found += work.tokens * (heads * work.sequence * 4 + (2 * query + value) * (4 - a))
    return found


def _experts(s: Sizes, work: Workload) -> int:
    m, a = s.model, s.element_bytes
    rows = work.tokens * m["moe_router_topk"] * s.etp // s.tp
    found = rows * (s.hidden + _EXPERT_WIDTHS * m["moe_ffn_hidden_size"] // s.etp) * a
    found += work.tokens // s.tp * (8 * m["num_moe_experts"] + 12 * m["moe_router_topk"])
    shared = m.get("moe_shared_expert_intermediate_size") or 0
    return found + _MLP_WIDTHS * work.tokens * shared // s.tp * a


def in_flight(s: Sizes, stage: int, num_microbatches: int) -> float:
    """Micro-batches whose activations a stage holds at one time; interleaved stages hold chunks,
    counted in whole stages."""
    if s.num_chunks == 1:
        return min(s.pp - stage, num_microbatches)
    chunks = 2 * (s.pp - stage - 1) + (s.num_chunks - 1) * s.pp + 1
    return min(chunks, num_microbatches * s.num_chunks) / s.num_chunks


def activation_bytes(s: Sizes, work: Workload, stage: int) -> int:
    """Highest sum over all layers of a stage, with the transients of one layer's backward."""
    own = work.tokens // (s.tp if s.layout.sequence_parallel else 1)
    boundary = own * s.hidden * s.element_bytes
    layers = [layer in s.moe_layers for chunk in range(s.num_chunks)
              for layer in s.layers_of_chunk(stage, chunk)]
    kept = {is_moe: kept_by_layer(s, work, is_moe) for is_moe in set(layers)}
    count = in_flight(s, stage, work.num_microbatches)
    if s.trainer.recompute == "full":
        held = count * len(layers) * boundary + 2 * max(kept.values(), default=0)
    else:
        held = count * sum(kept[is_moe] for is_moe in layers) + max(kept.values(), default=0) // 2
    return int(held) + (int(2 * count * boundary) if s.pp > 1 else 0)


def head_bytes(s: Sizes, work: Workload, stage: int) -> int:
    """Last stage: gathered hidden states, logits of a chunk, gradient of the output layer."""
    if stage != s.pp - 1:
        return 0
    chunk = min(s.trainer.logprob_chunk_tokens, work.tokens)
    hidden = 3 * work.tokens * s.hidden * s.element_bytes
    table = s.vocab_rows * s.hidden
    return _LOGIT_COPIES * chunk * s.vocab_rows * 4 + hidden + table * (8 + s.element_bytes)


def communication_bytes(s: Sizes, work: Workload, largest_gradients: int) -> int:
    """Receive buffers of stages and experts; GPU: NCCL's own; gloo: a copy of what is reduced."""
    boundary = work.tokens * s.hidden * s.element_bytes
    pipeline = 4 * boundary if s.pp > 1 else 0
    dispatch = 0
    if s.trainer.expert_parallel_size > 1:
        dispatch = 2 * boundary * s.model["moe_router_topk"] // s.tp
    if work.on_gpu:
        sizes = (s.tp, s.pp, s.layout.data_parallel_size, s.trainer.expert_parallel_size)
        return pipeline + dispatch + sum(size > 1 for size in sizes) * _NCCL_BYTES
    return pipeline + dispatch + (largest_gradients if s.trainer.distributed_optimizer else 0)


def routing_bytes(s: Sizes, work: Workload) -> int:
    """Replayed expert ids of a layer on the device, as int64."""
    if not work.replays_routes or not s.moe_layers:
        return 0
    return 8 * work.tokens * s.model["moe_router_topk"]


def step_bytes(s: Sizes, stage: int) -> int:
    """Temporaries of Adam: two float32 copies of the largest weight's share."""
    largest = max((w.numel for chunk in range(s.num_chunks)
                   for w in weights_of_chunk(s, stage, chunk)), default=0)
    shards = s.layout.data_parallel_size if s.trainer.distributed_optimizer else 1
    return 8 * -(-largest // shards)
