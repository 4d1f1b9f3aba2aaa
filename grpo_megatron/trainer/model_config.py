"""From a Hugging Face `config.json` and a layout to Megatron's TransformerConfig.

Fields that change the model's mathematics and that we do not translate are refused by name: a
default taken for one of them would train another model silently.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from megatron.core.transformer.transformer_config import TransformerConfig

from grpo_megatron.config.trainer import TrainerConfig
from grpo_megatron.errors import ConfigError
from grpo_megatron.trainer.platform import HAS_CUDA, HAS_TRANSFORMER_ENGINE

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}

# value that means "this model does not have it"; any other value is refused
_MUST_BE = {
    "attention_bias": (False, None), "use_sliding_window": (False, None),
    "attention_dropout": (0.0, None), "hidden_act": ("silu",),
}


def transformer_config(hf: dict[str, Any], layout: TrainerConfig) -> TransformerConfig:
    """Raises ConfigError for a family or a field that is not supported."""
    family = hf.get("model_type")
    if family not in _FAMILIES:
        raise ConfigError(f"model_type {family!r} is not supported; known: {sorted(_FAMILIES)}",
                          where="config.json")
    for field, allowed in _MUST_BE.items():
        if hf.get(field) not in allowed and field in hf:
            raise ConfigError(f"{field} = {hf[field]!r} is not supported for {family}",
                              where="config.json")
    settings = _common(hf) | _FAMILIES[family](hf) | _parallel(layout) | _precision(layout)
    if not HAS_CUDA:
        settings |= {"bias_activation_fusion": False, "bias_dropout_fusion": False,
                     "masked_softmax_fusion": False, "gradient_accumulation_fusion": False}
    return TransformerConfig(**settings)


def rope_theta(hf: dict[str, Any]) -> float:
    """transformers 4 writes `rope_theta`, transformers 5 `rope_parameters`."""
    parameters = hf.get("rope_parameters") or hf.get("rope_scaling") or {}
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    if kind != "default":
        raise ConfigError(f"rope type {kind!r} is not supported", where="config.json")
    theta = hf.get("rope_theta") or parameters.get("rope_theta")
    if theta is None:
        raise ConfigError("neither rope_theta nor rope_parameters.rope_theta is set",
                          where="config.json")
    return float(theta)


def _common(hf: dict[str, Any]) -> dict[str, Any]:
    heads = hf["num_attention_heads"]
    return dict(
        num_layers=hf["num_hidden_layers"], hidden_size=hf["hidden_size"],
        num_attention_heads=heads, num_query_groups=hf.get("num_key_value_heads") or heads,
        kv_channels=hf.get("head_dim") or hf["hidden_size"] // heads,
        ffn_hidden_size=hf["intermediate_size"], layernorm_epsilon=hf["rms_norm_eps"],
        normalization="RMSNorm", add_bias_linear=False, gated_linear_unit=True,
        activation_func=torch.nn.functional.silu, attention_dropout=0.0, hidden_dropout=0.0,
        # the only dispatcher that takes packed micro-batches; dense models are checked too
        moe_token_dispatcher_type="alltoall",
        attention_softmax_in_fp32=True,
    )


def _qwen3(hf: dict[str, Any]) -> dict[str, Any]:
    return {"qk_layernorm": True}


def _qwen3_moe(hf: dict[str, Any]) -> dict[str, Any]:
    step, dense = hf.get("decoder_sparse_step", 1), set(hf.get("mlp_only_layers") or ())
    sparse = [int((i + 1) % step == 0 and i not in dense) for i in range(hf["num_hidden_layers"])]
    if not hf.get("norm_topk_prob", False):
        raise ConfigError("norm_topk_prob = false is not supported for qwen3_moe",
                          where="config.json")
    return dict(
        qk_layernorm=True, moe_layer_freq=sparse,
        num_moe_experts=hf.get("num_experts") or hf["num_local_experts"],
        moe_router_topk=hf["num_experts_per_tok"],
        moe_ffn_hidden_size=hf["moe_intermediate_size"],
        moe_router_load_balancing_type="none",
        moe_router_dtype="fp32", moe_router_pre_softmax=False,
        moe_grouped_gemm=HAS_TRANSFORMER_ENGINE,
    )


_FAMILIES: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "qwen3": _qwen3, "qwen3_moe": _qwen3_moe,
}


def _parallel(layout: TrainerConfig) -> dict[str, Any]:
    vpp = layout.virtual_pipeline_parallel_size
    settings = dict(
        tensor_model_parallel_size=layout.tensor_parallel_size,
        pipeline_model_parallel_size=layout.pipeline_parallel_size,
        virtual_pipeline_model_parallel_size=vpp,
        context_parallel_size=layout.context_parallel_size,
        expert_model_parallel_size=layout.expert_parallel_size,
        expert_tensor_parallel_size=layout.expert_tensor_parallel_size,
        sequence_parallel=uses_sequence_parallel(layout),
        # packed micro-batches differ in length, so pipeline stages tell each other the shape
        variable_seq_lengths=True,
        # without overlap the interleaved schedule of 0.16.1 computes wrong gradients
        overlap_p2p_comm=bool(vpp), batch_p2p_comm=not vpp,
    )
    if layout.recompute == "full":
        settings |= dict(recompute_granularity="full", recompute_method="uniform",
                         recompute_num_layers=1)
    elif layout.recompute == "selective":
        settings |= dict(recompute_granularity="selective", recompute_modules=["core_attn"])
    return settings


def uses_sequence_parallel(layout: TrainerConfig) -> bool:
    """On by default with tensor parallelism; MoE layers need it there."""
    if layout.sequence_parallel is None:
        return layout.tensor_parallel_size > 1
    return layout.sequence_parallel


def _precision(layout: TrainerConfig) -> dict[str, Any]:
    dtype = DTYPES[layout.precision]
    return dict(params_dtype=dtype, pipeline_dtype=dtype, bf16=dtype == torch.bfloat16)
