"""Models and recorded steps for the parts: random, and made on this machine."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from grpo_megatron.batching.manifest import StepFacts
from grpo_megatron.batching.store import SampleRow, begin_step, finish_step, write_shard
from grpo_megatron.plan.model_facts import facts_from_hf
from grpo_megatron.routing.shape import RouteShape
from grpo_megatron.types import Completion, Prompt, RolloutGroup, VersionSpan

_COMMON = {
    "num_hidden_layers": 4,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "initializer_range": 0.05,
    "hidden_act": "silu",
}
_WIDE: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
}
"""Widths that kernels of a GPU take: multiples of 128 for FP8 in blocks, heads of 64."""
_NARROW: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}
"""For a CPU."""
_EXPERTS = {
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}
_LATENT = {
    "q_lora_rank": 64,
    "kv_lora_rank": 64,
    "first_k_dense_replace": 1,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "n_shared_experts": 1,
    "routed_scaling_factor": 2.5,
    "norm_topk_prob": True,
    "num_key_value_heads": 4,
}


@dataclass(frozen=True, slots=True)
class Size:
    """How large the models of a part are: for kernels of a GPU, or for a CPU."""

    common: Mapping[str, Any]
    expert_width: int
    latent: Mapping[str, int]
    """Widths of the parts of a latent attention's heads."""


WIDE = Size(_WIDE, 128, {"qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128})
NARROW = Size(_NARROW, 32, {"qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16})
_ENGINE_NARROW = {**_NARROW, "head_dim": 32, "intermediate_size": 128}
ENGINE_NARROW = Size(
    _ENGINE_NARROW, 64, {"qk_nope_head_dim": 32, "qk_rope_head_dim": 16, "v_head_dim": 32}
)
"""The narrowest that vLLM's CPU kernels take."""


def models(size: Size) -> dict[str, dict[str, Any]]:
    """`config.json` of the tiny models: dense, mixture of experts, latent attention."""
    dense = {
        **_COMMON,
        **size.common,
        "model_type": "qwen3",
        "architectures": ["Qwen3ForCausalLM"],
    }
    experts = {
        **_COMMON,
        **size.common,
        **_EXPERTS,
        "model_type": "qwen3_moe",
        "architectures": ["Qwen3MoeForCausalLM"],
        "moe_intermediate_size": size.expert_width,
    }
    latent = {
        **_COMMON,
        **size.common,
        **_LATENT,
        **size.latent,
        "model_type": "deepseek_v3",
        "architectures": ["DeepseekV3ForCausalLM"],
        "moe_intermediate_size": size.expert_width,
    }
    latent.pop("head_dim")
    return {"dense": dense, "moe": experts, "latent": latent}


@dataclass(frozen=True, slots=True)
class Lengths:
    """How long the samples of a made-up step are, in tokens."""

    prompt: int
    shortest: int
    """Of completions; lengths are drawn evenly up to the longest."""
    longest: int


def write_step(
    directory: Path,
    hf: Mapping[str, Any],
    lengths: Lengths,
    *,
    num_groups: int,
    group_size: int,
    num_updates: int = 1,
    with_routes: bool = False,
    seed: int = 0,
) -> Path:
    """Write a recorded step of random tokens and rewards, as the controller records one.

    with_routes: random experts for every token. Each of `num_updates` optimizer steps trains
    equally many groups. Returns the directory."""
    rng = np.random.default_rng(seed)
    shape: RouteShape | None = None
    if with_routes:
        facts = facts_from_hf(hf)
        shape = RouteShape(facts.moe_layers, facts.num_experts_per_token, facts.num_experts)
    vocab_size = hf["vocab_size"]
    groups = []
    rows: list[SampleRow] = []
    for number in range(num_groups):
        prompt_ids = tuple(rng.integers(0, vocab_size, lengths.prompt).tolist())
        completions = []
        for _ in range(group_size):
            length = int(rng.integers(lengths.shortest, lengths.longest + 1))
            completions.append(_completion(rng, hf, lengths.prompt, length, shape))
            row = SampleRow(
                shard=0,
                index=len(rows),
                group=number,
                update=number * num_updates // num_groups,
                reward=float(rng.normal()),
            )
            rows.append(row)
        prompt = Prompt(str(number), "made", "", prompt_ids, "")
        groups.append(RolloutGroup(prompt, tuple(completions), 0))
    shard = write_shard(begin_step(directory) / "rollout-0.safetensors", groups, shape)
    made = {"made": np.array([row.reward for row in rows])}
    finish_step(directory, [shard], rows, StepFacts(kind="rl", domains=["made"]), made)
    return directory


def _completion(
    rng: np.random.Generator,
    hf: Mapping[str, Any],
    prompt_length: int,
    length: int,
    shape: RouteShape | None,
) -> Completion:
    token_ids = rng.integers(0, hf["vocab_size"], length).astype(np.int32)
    logprobs = np.full(length, -np.log(hf["vocab_size"]), np.float32)
    routes = None
    route_versions: Sequence[VersionSpan] = ()
    if shape is not None:
        num_rows = prompt_length + length - 1
        routes = _routes(rng, num_rows, hf["num_hidden_layers"], shape)
        route_versions = (VersionSpan(0, 0, num_rows),)
    return Completion(
        token_ids,
        logprobs,
        (VersionSpan(0, 0, length),),
        "stop",
        "",
        routes,
        tuple(route_versions),
    )


def _routes(
    rng: np.random.Generator, num_rows: int, num_layers: int, shape: RouteShape
) -> np.ndarray:
    """Random experts, no one twice for a token: [rows, layers, K]. Experts of a token are
    neighbours of a random first one, which takes no sorting of all experts for every token."""
    first = rng.integers(0, shape.num_experts, (num_rows, num_layers, 1))
    routes = (first + np.arange(shape.experts_per_token)) % shape.num_experts
    return routes.astype(shape.dtype)
