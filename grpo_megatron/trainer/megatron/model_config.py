"""From a Hugging Face `config.json` and a layout to Megatron's TransformerConfig.

What a family's fields mean to Megatron is in its table (`plan/families`)."""

import math
from typing import Any

import torch
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

from grpo_megatron.config.trainer import TrainerConfig
from grpo_megatron.errors import ConfigError
from grpo_megatron.plan.family import family_of
from grpo_megatron.plan.hf_config import megatron_settings, model_fields
from grpo_megatron.trainer.megatron.kernels import (
    Computation,
    Kernel,
    choose,
    installed,
    settings_of,
)
from grpo_megatron.trainer.megatron.rope import rotary

_NAMES: dict[str, str] = {
    "tensor_model_parallel_size": "tensor_parallel_size",
    "pipeline_model_parallel_size": "pipeline_parallel_size",
    "virtual_pipeline_model_parallel_size": "virtual_pipeline_parallel_size",
    "num_layers_in_first_pipeline_stage": "first_stage_layers",
    "num_layers_in_last_pipeline_stage": "last_stage_layers",
    "context_parallel_size": "context_parallel_size",
    "expert_model_parallel_size": "expert_parallel_size",
    "expert_tensor_parallel_size": "expert_tensor_parallel_size",
    "sequence_parallel": "sp",
}
"""Megatron's names for keys of [trainer]; `sp` is on where MoE layers with TP need it."""


def transformer_config(hf: dict[str, Any], layout: TrainerConfig) -> TransformerConfig:
    """Translate a `config.json` at a layout of ranks to Megatron's settings.

    Raises ConfigError for a family, a field or a value that is not supported."""
    fields = model_fields(hf)
    dtype = getattr(torch, layout.precision)
    settings = {
        "activation_func": torch.nn.functional.silu,
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "bf16": dtype == torch.bfloat16,
        **_parallel(layout),
        **megatron_settings(family_of(hf["model_type"]), fields),
    }
    settings |= settings_of(kernels_of(hf, layout))
    settings["masked_softmax_fusion"] = False  # of an attention that is not used
    if settings.get("multi_latent_attention"):
        return MLATransformerConfig(**settings, **_latent_rope(fields["rope"]))
    config = TransformerConfig(**settings)
    # what attention.py:1102 computes the factor of cosines and sines from; no fields of the class
    config.yarn_rotary_scaling_factor = math.e
    config.yarn_mscale_all_dim = 0.0
    config.yarn_mscale = 10.0 * (rotary(fields["rope"], config.kv_channels)[1] - 1.0)
    return config


def why_not_share_prefixes(hf: dict[str, Any], router_policy: str) -> str:
    """Say why computing a prompt once would not be exact; empty where it is.

    router_policy: of `RoutingConfig`. Raises ConfigError as `transformer_config` does."""
    settings = megatron_settings(family_of(hf["model_type"]), model_fields(hf))
    has_bias = bool(settings.get("moe_router_enable_expert_bias"))
    if has_bias and router_policy == "none":
        return (
            "Megatron moves the routers' selection bias by how many tokens it sees, "
            "and routing.router_policy is 'none'"
        )
    return ""


def kernels_of(hf: dict[str, Any], layout: TrainerConfig) -> list[Kernel]:
    """Say which kernels compute a `config.json` at a layout on this machine.

    Raises ConfigError as `transformer_config` does, SetupError where one that the layout names is
    not installed."""
    fields = model_fields(hf)
    settings = megatron_settings(family_of(hf["model_type"]), fields)
    is_latent = bool(settings.get("multi_latent_attention"))
    rotary_factor = 1.0
    if not is_latent:
        rotary_factor = rotary(fields["rope"], fields["head_dim"])[1]
    wanted = Computation(
        layout,
        num_experts=settings.get("num_moe_experts") or 0,
        latent_attention=is_latent,
        rotary_factor=rotary_factor,
    )
    return choose(installed(), wanted)


def _latent_rope(rope: dict[str, Any]) -> dict[str, Any]:
    """Return the settings by which latent attention rotates by itself.

    rope: the result of `plan.hf_config.rope_fields`. Raises ConfigError for what is not supported.
    """
    settings = {"rope_type": "rope", "rotary_base": rope["theta"]}
    if rope["type"] == "default":
        return settings | {"rotary_scaling_factor": 1.0}
    if rope["type"] != "yarn" or rope["attention_factor"] or not rope["truncate"]:
        raise ConfigError(
            "latent attention takes rope type 'default', or 'yarn' without "
            "attention_factor and with truncate",
            where="config.json",
        )
    if rope["mscale_all_dim"] and not rope["mscale"]:
        raise ConfigError(
            "rope type 'yarn' with mscale_all_dim needs mscale too", where="config.json"
        )
    # transformers looks at mscale only where both are set, and scales the softmax by the second
    mscale = 1.0
    if rope["mscale"] and rope["mscale_all_dim"]:
        mscale = rope["mscale"]
    return settings | dict(
        rope_type="yarn",
        rotary_scaling_factor=rope["factor"],
        original_max_position_embeddings=rope["original_max_position_embeddings"],
        beta_fast=rope["beta_fast"],
        beta_slow=rope["beta_slow"],
        mscale=mscale,
        mscale_all_dim=rope["mscale_all_dim"],
    )


def _parallel(layout: TrainerConfig) -> dict[str, Any]:
    """Return the settings of parallelism and of recomputation."""
    settings = {theirs: getattr(layout, ours) for theirs, ours in _NAMES.items()}
    # packed micro-batches differ in length, so pipeline stages tell each other the shape
    settings["variable_seq_lengths"] = True
    # without overlap the interleaved schedule of 0.16.1 computes wrong gradients
    is_interleaved = bool(layout.virtual_pipeline_parallel_size)
    settings["overlap_p2p_comm"] = is_interleaved
    settings["batch_p2p_comm"] = not is_interleaved
    if layout.recompute != "none":
        settings["recompute_granularity"] = layout.recompute
    if layout.recompute == "full":
        settings["recompute_method"] = "uniform"
        settings["recompute_num_layers"] = 1
    return settings
