"""Which modules a layer is made of: Transformer Engine's where installed, else torch's own."""

from typing import Any

import torch
from megatron.core.models.gpt import gpt_layer_specs
from megatron.core.post_training.modelopt.layers import Linear
from megatron.core.transformer import transformer_block
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

from grpo_megatron.trainer.megatron.packed_attention import PackedAttention
from grpo_megatron.trainer.megatron.platform import HAS_TRANSFORMER_ENGINE
from grpo_megatron.trainer.megatron.transformer_engine_attention import with_gathered_keys


class TorchNorm:
    """torch's RMSNorm under sequence parallelism, which WrappedTorchNorm refuses."""

    def __new__(  # type: ignore[misc]  # a class, as specs have it, that makes another's object
        cls, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any
    ) -> torch.nn.RMSNorm:
        """Make the norm. Raises ValueError for other kinds of norm."""
        if config.layernorm_zero_centered_gamma or config.normalization != "RMSNorm":
            raise ValueError("layer norms and zero-centred norms need Transformer Engine")
        norm = torch.nn.RMSNorm(hidden_size, eps=eps, dtype=config.params_dtype)
        weight: Any = norm.weight
        weight.sequence_parallel = config.sequence_parallel  # finalize_model_grads sums it
        return norm


class LatentNorm:
    """Norm of a latent vector: transformers fixes its epsilon, whatever `rms_norm_eps` is."""

    def __new__(  # type: ignore[misc]  # as above
        cls, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any
    ) -> torch.nn.RMSNorm:
        """Make the norm. Raises ValueError for other kinds of norm."""
        norm: torch.nn.RMSNorm = TorchNorm(config, hidden_size, eps=1e-6)
        return norm


def block_spec(
    config: TransformerConfig, vp_stage: int | None, *, torch_attention: bool
) -> transformer_block.TransformerBlockSubmodules:
    """Specify the layers of this pipeline stage and model chunk.

    torch_attention: torch computes attention also between layers of Transformer Engine."""
    if HAS_TRANSFORMER_ENGINE:
        block = gpt_layer_specs.get_gpt_decoder_block_spec(
            config, use_transformer_engine=True, vp_stage=vp_stage
        )
        # layers of a kind may have one specification between them
        attentions = {}
        for layer in block.layer_specs:
            attention = _attention_of(layer)
            attentions[id(attention)] = attention
        for attention in attentions.values():
            if torch_attention:
                attention.core_attention = PackedAttention
            else:
                attention.core_attention = with_gathered_keys(attention.core_attention)
        return block
    offset = get_transformer_layer_offset(config, vp_stage=vp_stage)
    count = transformer_block.get_num_layers_to_build(config, vp_stage=vp_stage)
    with_experts = moe_layers(config)
    specs = []
    for layer in range(offset, offset + count):
        num_experts = None
        if layer in with_experts:
            num_experts = config.num_moe_experts
        specs.append(_torch_layer_spec(config, num_experts))
    return transformer_block.TransformerBlockSubmodules(specs, layer_norm=TorchNorm)


def _attention_of(layer: ModuleSpec) -> Any:
    """Return the parts of a layer's attention."""
    return layer.submodules.self_attention.submodules


def moe_layers(config: TransformerConfig) -> tuple[int, ...]:
    """Return the numbers, from 0, of the layers with experts."""
    if not config.num_moe_experts:
        return ()
    return tuple(layer for layer, is_moe in enumerate(config.moe_layer_freq) if is_moe)


def _torch_layer_spec(config: TransformerConfig, num_experts: int | None) -> ModuleSpec:
    """Specify a layer of torch's modules; num_experts: of an MoE layer, None of a dense one."""
    spec = gpt_layer_specs.get_gpt_layer_local_spec(
        num_experts=num_experts,
        moe_grouped_gemm=config.moe_grouped_gemm,
        qk_layernorm=config.qk_layernorm,
        normalization=config.normalization,
        multi_latent_attention=config.multi_latent_attention,
    )
    layer = spec.submodules
    layer.input_layernorm = layer.pre_mlp_layernorm = TorchNorm
    attention = layer.self_attention.submodules
    attention.core_attention = PackedAttention
    if config.multi_latent_attention:
        attention.q_layernorm = attention.kv_layernorm = LatentNorm
        if config.q_lora_rank is None:  # 0.19.2 refuses a norm that has nothing to do
            attention.q_layernorm = IdentityOp
        # column-parallel ones lose the gradient of the keys' rotary part on all ranks but one
        # (multi_latent_attention.py:618)
        attention.linear_q_down_proj = attention.linear_kv_down_proj = Linear
    elif config.qk_layernorm:
        attention.q_layernorm = attention.k_layernorm = TorchNorm
    return spec
