"""What the layout rules need to know of a model, from any dialect of Hugging Face `config.json`.

The dialects: `num_experts` (Qwen) / `num_local_experts` (Mixtral, and Qwen3-MoE as written by
transformers 5) / `n_routed_experts` (DeepSeek, GLM); `rope_theta` / `rope_parameters`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from grpo_megatron import assets
from grpo_megatron.config.presets import load_preset
from grpo_megatron.config.run import ModelConfig
from grpo_megatron.errors import ConfigError


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """Sizes of one model. Counts are of the whole model, before any split."""

    model_type: str
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    """Width of dense MLP layers; 0 where all layers are MoE and the config names none."""
    num_experts: int
    """Routed experts a layer; 0: dense model."""
    num_experts_per_token: int
    moe_intermediate_size: int
    shared_expert_intermediate_size: int
    """Width of all shared experts of a layer together; 0: none."""
    moe_layers: tuple[int, ...]
    """Indices, from 0, of the layers with experts."""
    vocab_size: int | None
    """`None` for a preset whose tokenizer decides."""
    max_position_embeddings: int | None
    rope_theta: float
    is_mla: bool
    """Multi-head latent attention (DeepSeek)."""

    @property
    def is_moe(self) -> bool:
        return self.num_experts > 0

    @property
    def has_dense_layers(self) -> bool:
        return len(self.moe_layers) < self.num_layers


def model_facts(model: ModelConfig) -> ModelFacts:
    """Facts of the configured model.

    Raises:
        ConfigError: Unknown preset, no `config.json` at the path, or one without a needed key.
    """
    if model.preset is not None:
        preset = load_preset(model.preset)
        return facts_from_hf(preset.hf, where=assets.display(preset.path))
    if model.path is None:
        raise ConfigError("neither model.preset nor model.path is set",
                          remedy="set one of them in [model]")
    file = model.path / "config.json"
    try:
        hf = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read the model's config.json: {error.strerror}",
                          where=str(file),
                          remedy="model.path must be a Hugging Face checkpoint directory") from None
    except ValueError as error:
        raise ConfigError(f"the model's config.json is not valid: {error}", where=str(file),
                          remedy="download the checkpoint again") from None
    return facts_from_hf(hf, where=str(file))


def facts_from_hf(hf: Mapping[str, Any], *, where: str = "config.json") -> ModelFacts:
    """Normalise the content of a `config.json`.

    Args:
        hf: The parsed file, or the `[hf]` table of a preset.
        where: What error messages call it.

    Raises:
        ConfigError: A size that every decoder has is missing.
    """
    if "hidden_size" not in hf and isinstance(hf.get("text_config"), Mapping):
        hf = hf["text_config"]

    def needed(key: str) -> int:
        if not isinstance(hf.get(key), int):
            raise ConfigError(f"the model's configuration has no {key}", where=where,
                              remedy="only decoder-only language models are supported")
        return hf[key]

    num_layers, num_heads = needed("num_hidden_layers"), needed("num_attention_heads")
    num_experts = _first(hf, "num_experts", "num_local_experts", "n_routed_experts") or 0
    intermediate = hf.get("intermediate_size") or 0
    moe_intermediate = (hf.get("moe_intermediate_size") or intermediate) if num_experts else 0
    return ModelFacts(
        model_type=str(hf.get("model_type", "")),
        hidden_size=needed("hidden_size"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=hf.get("num_key_value_heads") or num_heads,
        head_dim=hf.get("head_dim") or needed("hidden_size") // num_heads,
        intermediate_size=intermediate,
        num_experts=num_experts,
        num_experts_per_token=_first(hf, "num_experts_per_tok", "num_experts_per_token") or 0,
        moe_intermediate_size=moe_intermediate,
        shared_expert_intermediate_size=hf.get("shared_expert_intermediate_size")
        or (hf.get("n_shared_experts") or 0) * moe_intermediate,
        moe_layers=_moe_layers(hf, num_layers) if num_experts else (),
        vocab_size=hf.get("vocab_size"),
        max_position_embeddings=hf.get("max_position_embeddings"),
        rope_theta=_rope_theta(hf),
        is_mla=hf.get("kv_lora_rank") is not None,
    )


def _first(hf: Mapping[str, Any], *keys: str) -> int | None:
    return next((hf[key] for key in keys if hf.get(key) is not None), None)


def _rope_theta(hf: Mapping[str, Any]) -> float:
    parameters = hf.get("rope_parameters") or {}
    return float(hf.get("rope_theta") or parameters.get("rope_theta") or 10000.0)


def _moe_layers(hf: Mapping[str, Any], num_layers: int) -> tuple[int, ...]:
    """Layers with experts: every layer but those that the dialect's keys make dense."""
    step = hf.get("decoder_sparse_step") or 1
    frequency = hf.get("moe_layer_freq") or 1
    dense = set(hf.get("mlp_only_layers") or ())
    first = hf.get("first_k_dense_replace") or 0
    if isinstance(frequency, list):
        return tuple(index for index in range(num_layers) if frequency[index])
    return tuple(index for index in range(num_layers)
                 if index >= first and index not in dense and (index + 1) % step == 0
                 and index % frequency == 0)
