"""Tiny random models of every family, made by transformers, and what transformers answers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from grpo_megatron.batching.store import SampleTable
from grpo_megatron.plan.tensor_names import transformers_type
from grpo_megatron.weights.transformers_model import rename_tensors
from tests.trainer.models import VOCAB

_BASE = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "initializer_range": 0.15,
}
_YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8}
_LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
_LATENT = {
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-6,
}
_DEEPSEEK = _LATENT | {
    "q_lora_rank": 20,
    "first_k_dense_replace": 1,
    "n_routed_experts": 8,
    "num_experts_per_tok": 4,
    "n_group": 4,
    "topk_group": 2,
    "n_shared_experts": 1,
    "moe_intermediate_size": 32,
    "routed_scaling_factor": 2.5,
    "norm_topk_prob": True,
}
_DEEPSEEK_2 = _DEEPSEEK | {
    "norm_topk_prob": False,
    "topk_method": "group_limited_greedy",
    "n_shared_experts": 2,
    "num_experts_per_tok": 4,
    "topk_group": 2,
}
_GLM = {
    "head_dim": 16,
    "first_k_dense_replace": 1,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "n_shared_experts": 1,
    "moe_intermediate_size": 32,
    "routed_scaling_factor": 1.5,
    "norm_topk_prob": True,
    "use_qk_norm": True,
    "attention_bias": True,
    "partial_rotary_factor": 0.5,
}
_QWEN_MOE = {
    "head_dim": 16,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "moe_intermediate_size": 32,
}

MODELS: dict[str, dict] = {
    name: _BASE | own
    for name, own in {
        "qwen2": {"model_type": "qwen2"},
        "qwen2_tied_mqa": {
            "model_type": "qwen2",
            "num_attention_heads": 3,
            "num_key_value_heads": 1,
            "tie_word_embeddings": True,
        },
        "qwen3": {"model_type": "qwen3", "head_dim": 16},
        "qwen3_yarn": {"model_type": "qwen3", "head_dim": 16, "rope_scaling": _YARN},
        "qwen3_moe": {"model_type": "qwen3_moe", **_QWEN_MOE},
        "qwen3_moe_mixed": {
            "model_type": "qwen3_moe",
            **_QWEN_MOE,
            "norm_topk_prob": False,
            "mlp_only_layers": [1],
            "num_experts_per_tok": 3,
        },
        "llama": {"model_type": "llama", "rope_scaling": _LLAMA3},
        "llama_odd": {
            "model_type": "llama",
            "num_attention_heads": 3,
            "num_key_value_heads": 3,
            "rope_scaling": {"type": "linear", "factor": 2.0},
            "tie_word_embeddings": True,
        },
        "seed_oss": {"model_type": "seed_oss", "head_dim": 16},
        "seed_oss_unbiased": {
            "model_type": "seed_oss",
            "head_dim": 20,
            "num_attention_heads": 6,
            "num_key_value_heads": 3,
            "attention_bias": False,
            "tie_word_embeddings": True,
        },
        "mistral": {"model_type": "mistral", "head_dim": 16, "sliding_window": None},
        "mixtral": {
            "model_type": "mixtral",
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "sliding_window": None,
        },
        "deepseek_v2": {
            "model_type": "deepseek_v2",
            **_DEEPSEEK_2,
            "rope_scaling": _YARN | {"mscale": 0.7, "mscale_all_dim": 0.7},
        },
        "deepseek_v2_lite": {
            "model_type": "deepseek_v2",
            **_DEEPSEEK_2,
            "q_lora_rank": None,
            "topk_method": "greedy",
            "num_attention_heads": 6,
        },
        "deepseek_v3": {
            "model_type": "deepseek_v3",
            **_DEEPSEEK,
            "rope_scaling": _YARN | {"mscale": 1.0, "mscale_all_dim": 1.0},
        },
        "deepseek_v3_odd": {
            "model_type": "deepseek_v3",
            **_DEEPSEEK,
            "num_experts_per_tok": 3,
            "num_attention_heads": 3,
            "num_key_value_heads": 3,
        },
        "moonlight": {
            "model_type": "deepseek_v3",
            **_DEEPSEEK,
            "q_lora_rank": None,
            "n_group": 1,
            "topk_group": 1,
            "n_shared_experts": 2,
            "rms_norm_eps": 1e-5,
        },
        "kimi_k2": {
            "model_type": "kimi_k2",
            **_DEEPSEEK,
            "n_group": 1,
            "topk_group": 1,
            "rope_scaling": _YARN | {"mscale": 1.0, "mscale_all_dim": 1.0},
        },
        "glm4_moe": {"model_type": "glm4_moe", **_GLM},
        "glm4_moe_air": {
            "model_type": "glm4_moe",
            **_GLM,
            "use_qk_norm": False,
            "num_attention_heads": 6,
            "first_k_dense_replace": 2,
        },
    }.items()
}


def write_family(directory: Path, name: str, samples: str, **fields: Any) -> str:
    """A random checkpoint whose norms, biases and buffers are random too, and its logits.

    fields: of its configuration, in place of the family's.
    `logits.npy`: fp32 [policy tokens in table order, vocabulary], one sample at a time.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    hf = MODELS[name] | fields
    known_as = transformers_type(hf["model_type"])
    config = AutoConfig.for_model(
        known_as,
        **{key: value for key, value in hf.items() if key != "model_type"},
    )
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(len(name))
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
        for weight in [
            *model.parameters(),
            *(buffer for key, buffer in model.named_buffers() if "e_score_correction_bias" in key),
        ]:
            if weight.dim() == 1:
                weight.add_(torch.randn_like(weight) * 0.1)
        logits = [model(ids).logits[0, first - 1 : -1] for ids, first in _sequences(samples)]
    model.save_pretrained(directory)
    rename_tensors(directory, of=known_as, to=hf["model_type"])
    (directory / "config.json").write_text(json.dumps(hf))
    np.save(directory / "logits.npy", torch.cat(logits).numpy())
    return str(directory)


def _sequences(samples: str):
    """`(ids [1, length], position of the first policy token)` of every sample."""
    import torch

    table = SampleTable(Path(samples))
    for row in range(len(table)):
        prompt, (completion, _) = table.prompt_ids(row), table.completion(row)
        ids = np.concatenate([prompt, completion]).astype(np.int64)
        yield torch.from_numpy(ids)[None], len(prompt)
