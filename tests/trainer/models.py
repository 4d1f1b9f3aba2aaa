"""Tiny models and recorded samples for all tests that run Megatron."""

from __future__ import annotations

import json
from collections.abc import Collection
from pathlib import Path

import numpy as np

from grpo_megatron.batching.manifest import StepFacts
from grpo_megatron.batching.store import SampleRow, begin_step, finish_step, write_shard
from grpo_megatron.plan.model_facts import facts_from_hf
from grpo_megatron.routing.shape import RouteShape
from grpo_megatron.types import Completion, Prompt, RolloutGroup, SamplingMask, VersionSpan

VOCAB = 93  # not divisible by 2: tensor ranks pad it

MOE = {
    "model_type": "qwen3_moe",
    "architectures": ["Qwen3MoeForCausalLM"],
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "initializer_range": 0.1,
}
DENSE = {
    k: v
    for k, v in MOE.items()
    if "expert" not in k
    and "moe" not in k
    and k not in ("decoder_sparse_step", "mlp_only_layers", "norm_topk_prob")
} | {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]}

INTERLEAVED = MOE | {
    "num_hidden_layers": 6,
    "mlp_only_layers": [0, 2],
    "num_experts": 8,
    "num_experts_per_tok": 3,
}
"""Dense layers between MoE layers."""


def write_model(directory: Path, hf: dict, seed: int) -> str:
    """A random checkpoint with Hugging Face's per-expert names."""
    from grpo_megatron.data.tiny_model import init_weights

    directory.mkdir(parents=True)
    (directory / "config.json").write_text(json.dumps(hf))
    init_weights(directory, seed)
    return str(directory)


def route_shape(hf: dict) -> RouteShape:
    facts = facts_from_hf(hf)
    return RouteShape(facts.moe_layers, facts.num_experts_per_token, facts.num_experts)


def random_routes(num_rows: int, hf: dict, rng: np.random.Generator) -> np.ndarray:
    shape = route_shape(hf)
    order = np.argsort(rng.random((num_rows, hf["num_hidden_layers"], shape.num_experts)), -1)
    return order[..., : shape.experts_per_token].astype(shape.dtype)


def random_sets(ids: np.ndarray, vocab_size: int, rng: np.random.Generator) -> SamplingMask:
    """1 to 8 ids with the sampled one; every eighth without it, every eighth empty."""
    sets = []
    for token in ids:
        others = rng.permutation(vocab_size)
        others = others[others != token][: rng.integers(0, 8)]
        kind = rng.integers(8)
        sets.append(others[:0] if kind == 0 else others if kind == 1 else [token, *others])
    sizes = [len(one) for one in sets]
    return SamplingMask(np.concatenate(sets).astype(np.int32), np.cumsum([0, *sizes]))


def write_samples(
    directory: Path,
    *,
    num_groups: int = 6,
    num_samples: int = 4,
    vocab_size: int = VOCAB,
    seed: int = 0,
    num_updates: int = 1,
    stale: bool = False,
    num_domains: int = 1,
    hf: dict | None = None,
    truncated: bool = False,
    cut_groups: Collection[int] = (),
    max_tokens: int = 19,
    teacher_logprobs: dict[str, np.ndarray] | None = None,
) -> str:
    """Ragged samples with random rewards, plausible behaviour log-probs and, where the model `hf`
    is given, random routes; `truncated`: with random kept sets, some of which are not known;
    `cut_groups`: whose samples have all reached their limit of tokens.

    All samples of a group have the same routes on their prompt, but for the last one."""
    rng, working = np.random.default_rng(seed), begin_step(directory)
    shape, groups = hf and route_shape(hf), []
    for group in range(num_groups):
        completions = []
        of_prompt = random_routes(5, hf, rng) if hf else None
        for number in range(num_samples):
            n = int(rng.integers(1, max_tokens + 1))
            ids = rng.integers(0, vocab_size, n).astype(np.int32)
            logprobs = -rng.exponential(3.0, n).astype(np.float32)
            routes = shape and random_routes(5 + n - 1, hf, rng)
            if of_prompt is not None and number < num_samples - 1:
                routes[:5] = of_prompt
            completions.append(
                Completion(
                    ids,
                    logprobs,
                    (VersionSpan(0, 0, n),),
                    "stop",
                    "",
                    routes,
                    (VersionSpan(0, 0, 5 + n - 1),) if shape else (),
                    random_sets(ids, vocab_size, rng) if truncated else None,
                )
            )
        prompt = Prompt(str(group), "d", "", tuple(rng.integers(0, vocab_size, 5).tolist()), "")
        groups.append(RolloutGroup(prompt, tuple(completions), 0))
    rows = [
        SampleRow(
            0,
            i,
            group := i // num_samples,
            group * num_updates // num_groups,
            float(rng.normal()),
            group % num_domains,
            truncated=group in cut_groups,
        )
        for i in range(num_groups * num_samples)
    ]
    lengths = [len(c.token_ids) for group in groups for c in group.completions]
    steps = [
        (row, end, float(rng.normal()))
        for row, n in enumerate(lengths)
        for end in sorted({n // 2, n - 1})
    ]
    components = {"first": rng.normal(size=len(rows)), "second": rng.normal(size=len(rows))}
    shard = write_shard(working / "rollout-0.safetensors", groups, shape)
    finish_step(
        directory, [shard], rows, StepFacts(stale=stale), components, steps, teacher_logprobs
    )
    return str(directory)
