"""What a vLLM worker holds: weights, and a KV cache in what is left."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from grpo_megatron.config.rollout import RolloutConfig
from grpo_megatron.config.trainer import TrainerConfig
from grpo_megatron.plan.weights import Sizes, weights_of_chunk

_UTILISATION_FLAG, _UTILISATION = "--gpu-memory-utilization", 0.9
_RUNTIME_BYTES = 3 * 2**30
"""CUDA graphs and a forward pass of a GPU worker; not measured here."""


@dataclass(frozen=True, slots=True)
class EngineMemory:
    """Of one GPU, in bytes."""

    weights: int
    kv_cache: int
    runtime: int
    kv_tokens: int
    """Tokens that the cache of a server holds."""

    @property
    def total(self) -> int:
        return self.weights + self.kv_cache + self.runtime


def engine_memory(sizes: Sizes, rollout: RolloutConfig, device_bytes: int | None) -> EngineMemory:
    """`device_bytes`: of a GPU; None: on a CPU, where `rollout.kv_cache_gib` decides."""
    m, size = sizes.model, rollout.tensor_parallel_size
    element = {"float32": 4, "bfloat16": 2}[rollout.dtype]
    layout = TrainerConfig(num_ranks=size, tensor_parallel_size=size)  # experts too, as vLLM
    split = Sizes(m, sizes.vocab_size, sizes.is_tied, layout, sizes.moe_layers)
    weights = element * sum(w.numel for w in weights_of_chunk(split, 0, 0))
    if m.get("multi_latent_attention"):  # one latent vector, on every rank
        per_layer = m["kv_lora_rank"] + m["qk_pos_emb_head_dim"]
    else:
        per_layer = 2 * max(m["num_query_groups"] // size, 1) * m["kv_channels"]
    per_token = per_layer * m["num_layers"] * element
    if device_bytes is None:
        cache, runtime = int(rollout.kv_cache_gib * 2**30), 0
    else:
        runtime = _RUNTIME_BYTES
        cache = max(int(utilisation(rollout) * device_bytes) - weights - runtime, 0)
    return EngineMemory(weights, cache, runtime, cache // per_token)


def utilisation(rollout: RolloutConfig) -> float:
    """Share of a GPU that vLLM is told to take, from `rollout.engine_arguments`."""
    arguments = rollout.engine_arguments
    for argument, value in itertools.zip_longest(arguments, arguments[1:], fillvalue=""):
        name, _, joined = argument.partition("=")
        if name == _UTILISATION_FLAG:
            return float(joined or value)
    return _UTILISATION
