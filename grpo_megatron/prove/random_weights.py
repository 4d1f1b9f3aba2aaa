"""Random checkpoints of the tiny models, without transformers, whose import takes seconds.

Names and shapes are those of Hugging Face's Qwen3, Qwen3-MoE and DeepSeek-V3."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

Named = tuple[str, tuple[int, ...]]
"""Name and shape of a weight."""


def write_model(directory: Path, hf: Mapping[str, Any], seed: int = 1) -> Path:
    """Write a random Hugging Face checkpoint of `hf`, in float32; returns its directory."""
    directory.mkdir(parents=True)
    (directory / "config.json").write_text(json.dumps(hf, indent=2), encoding="utf-8")
    rng = np.random.default_rng(seed)
    weights = {}
    for name, shape in weight_shapes(hf):
        scale = hf["initializer_range"]
        mean = 0.0
        if name.endswith("norm.weight"):
            mean = 1.0
        weights[name] = rng.normal(mean, scale, shape).astype(np.float32)
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


def weight_shapes(hf: Mapping[str, Any]) -> Iterator[Named]:
    """Yield every weight of the model."""
    hidden = hf["hidden_size"]
    yield "model.embed_tokens.weight", (hf["vocab_size"], hidden)
    for layer in range(hf["num_hidden_layers"]):
        prefix = f"model.layers.{layer}"
        yield f"{prefix}.input_layernorm.weight", (hidden,)
        yield f"{prefix}.post_attention_layernorm.weight", (hidden,)
        if "kv_lora_rank" in hf:
            yield from _latent_attention(f"{prefix}.self_attn", hf)
        else:
            yield from _attention(f"{prefix}.self_attn", hf)
        has_experts = layer >= hf.get("first_k_dense_replace", 0) and _num_experts(hf) > 0
        if has_experts:
            yield from _experts(f"{prefix}.mlp", hf)
        else:
            yield from _mlp(f"{prefix}.mlp", hidden, hf["intermediate_size"])
    yield "model.norm.weight", (hidden,)
    yield "lm_head.weight", (hf["vocab_size"], hidden)


def _attention(prefix: str, hf: Mapping[str, Any]) -> Iterator[Named]:
    hidden = hf["hidden_size"]
    queries = hf["num_attention_heads"] * hf["head_dim"]
    keys = hf["num_key_value_heads"] * hf["head_dim"]
    yield f"{prefix}.q_proj.weight", (queries, hidden)
    yield f"{prefix}.k_proj.weight", (keys, hidden)
    yield f"{prefix}.v_proj.weight", (keys, hidden)
    yield f"{prefix}.o_proj.weight", (hidden, queries)
    yield f"{prefix}.q_norm.weight", (hf["head_dim"],)
    yield f"{prefix}.k_norm.weight", (hf["head_dim"],)


def _latent_attention(prefix: str, hf: Mapping[str, Any]) -> Iterator[Named]:
    hidden = hf["hidden_size"]
    heads = hf["num_attention_heads"]
    query_rank = hf["q_lora_rank"]
    rank = hf["kv_lora_rank"]
    rotated = hf["qk_rope_head_dim"]
    plain = hf["qk_nope_head_dim"]
    values = hf["v_head_dim"]
    yield f"{prefix}.q_a_proj.weight", (query_rank, hidden)
    yield f"{prefix}.q_a_layernorm.weight", (query_rank,)
    yield f"{prefix}.q_b_proj.weight", (heads * (plain + rotated), query_rank)
    yield f"{prefix}.kv_a_proj_with_mqa.weight", (rank + rotated, hidden)
    yield f"{prefix}.kv_a_layernorm.weight", (rank,)
    yield f"{prefix}.kv_b_proj.weight", (heads * (plain + values), rank)
    yield f"{prefix}.o_proj.weight", (hidden, heads * values)


def _experts(prefix: str, hf: Mapping[str, Any]) -> Iterator[Named]:
    hidden = hf["hidden_size"]
    width = hf["moe_intermediate_size"]
    num_experts = _num_experts(hf)
    yield f"{prefix}.gate.weight", (num_experts, hidden)
    if "n_routed_experts" in hf:
        yield f"{prefix}.gate.e_score_correction_bias", (num_experts,)
        yield from _mlp(f"{prefix}.shared_experts", hidden, width * hf["n_shared_experts"])
    for expert in range(num_experts):
        yield from _mlp(f"{prefix}.experts.{expert}", hidden, width)


def _mlp(prefix: str, hidden: int, width: int) -> Iterator[Named]:
    yield f"{prefix}.gate_proj.weight", (width, hidden)
    yield f"{prefix}.up_proj.weight", (width, hidden)
    yield f"{prefix}.down_proj.weight", (hidden, width)


def _num_experts(hf: Mapping[str, Any]) -> int:
    return int(hf.get("num_experts") or hf.get("n_routed_experts") or 0)
