"""Shapes of released models for `memory` and `speed`; their weights are random."""

from collections.abc import Mapping
from typing import Any

from grpo_megatron.config.presets import load_preset
from grpo_megatron.plan.model_facts import ModelFacts, facts_from_hf

_QWEN3 = {
    "model_type": "qwen3",
    "architectures": ["Qwen3ForCausalLM"],
    "hidden_act": "silu",
    "head_dim": 128,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "attention_bias": False,
    "use_sliding_window": False,
    "tie_word_embeddings": True,
}
QWEN3_0_6B: dict[str, Any] = {
    **_QWEN3,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
}
QWEN3_4B: dict[str, Any] = {
    **_QWEN3,
    "hidden_size": 2560,
    "intermediate_size": 9728,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
}


def qwen3_30b_a3b() -> dict[str, Any]:
    """`config.json` of Qwen3-30B-A3B: 128 experts, 8 for each token."""
    return dict(load_preset("qwen3-30b-a3b").hf)


def with_layers(hf: Mapping[str, Any], num_layers: int) -> dict[str, Any]:
    """Return the same model with fewer layers."""
    return {**hf, "num_hidden_layers": num_layers}


def forward_flops(hf: Mapping[str, Any], lengths: list[int], num_policy_tokens: int) -> float:
    """Operations of a forward pass: 2 for each weight that a token meets, and attention.

    Of a sample of L tokens, attention multiplies queries with keys, and weights with values, for
    L^2 / 2 pairs: 2 L^2 operations for each layer and unit of the heads' width together. The output
    layer is for policy tokens only. A backward pass has twice as many; what is computed again for
    it is not counted. lengths: of prompt and completion, by sample."""
    facts = facts_from_hf(hf)
    num_tokens = sum(lengths)
    pairs = sum(length**2 for length in lengths)
    queries = facts.num_heads * facts.head_dim
    attention = 2.0 * pairs * queries * facts.num_layers
    matrices = 2.0 * num_tokens * weights_of_token(facts)
    assert facts.vocab_size is not None  # of a released model
    output = 2.0 * num_policy_tokens * facts.hidden_size * facts.vocab_size
    return matrices + attention + output


def weights_of_token(facts: ModelFacts) -> int:
    """Return weights of all layers with which one token is multiplied: of its own experts only.

    Of attention with query groups; latent attention is not counted right."""
    queries = facts.num_heads * facts.head_dim
    keys = facts.num_kv_heads * facts.head_dim
    attention = facts.hidden_size * (2 * queries + 2 * keys)
    dense = 3 * facts.hidden_size * facts.intermediate_size
    experts = facts.num_experts_per_token * facts.moe_intermediate_size
    experts += facts.shared_expert_intermediate_size
    routed = 3 * facts.hidden_size * experts + facts.hidden_size * facts.num_experts
    num_routed = len(facts.moe_layers)
    num_dense = facts.num_layers - num_routed
    return facts.num_layers * attention + num_dense * dense + num_routed * routed


PEAK_TFLOPS = {
    "GB200": 2500.0,
    "B200": 2250.0,
    "H200": 989.0,
    "GH200": 989.0,
    "H100 PCIe": 756.0,
    "H100 NVL": 835.0,
    "H100": 989.0,
    "H800": 989.0,
    "A100": 312.0,
    "A800": 312.0,
    "L40S": 362.0,
    "A10": 125.0,
    "L4": 121.0,
}
"""bfloat16 without sparsity, from NVIDIA's data sheets; the first name that a GPU's name has."""


def peak_flops(gpu_name: str) -> float | None:
    """Operations a second that a GPU can do in bfloat16; None for one that is not known."""
    for name, tflops in PEAK_TFLOPS.items():
        if name.lower() in gpu_name.lower():
            return tflops * 1e12
    return None
