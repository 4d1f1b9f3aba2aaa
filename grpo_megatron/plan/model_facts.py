"""What the layout rules need to know of a model, from any dialect of Hugging Face `config.json`."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grpo_megatron import assets
from grpo_megatron.config.presets import load_preset
from grpo_megatron.config.run import ModelConfig
from grpo_megatron.errors import ConfigError
from grpo_megatron.plan.hf_config import derived, model_fields, unified


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """Sizes of one model. Counts are of the whole model, before any split."""

    model_type: str
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int  # of dense MLP layers; 0 where all are MoE and the config names none
    num_experts: int  # routed experts a layer; 0: dense model
    num_experts_per_token: int
    moe_intermediate_size: int
    shared_expert_intermediate_size: int  # of all shared experts of a layer together; 0: none
    moe_layers: tuple[int, ...]  # indices, from 0, of the layers with experts
    vocab_size: int | None  # None for a preset whose tokenizer decides
    max_position_embeddings: int | None
    is_mla: bool  # multi-head latent attention (DeepSeek)

    @property
    def is_moe(self) -> bool:
        return self.num_experts > 0

    @property
    def has_dense_layers(self) -> bool:
        return len(self.moe_layers) < self.num_layers


def model_facts(model: ModelConfig) -> ModelFacts:
    """Facts of the configured model, of which every field must be known; ConfigError for an unknown
    preset, a path without `config.json`, or a model that the trainer does not compute."""
    hf, where = configuration_of(model)
    model_fields(hf, where=where)
    return facts_from_hf(hf, where=where)


def configuration_of(model: ModelConfig) -> tuple[dict[str, Any], str]:
    """The configured model's `config.json`, and what messages call it. Raises ConfigError."""
    if model.path is not None:
        hf, where = read_config(model.path), str(model.path / "config.json")
    elif model.preset is not None:
        preset = load_preset(model.preset)
        hf, where = preset.hf, assets.display(preset.path)
    else:
        raise ConfigError("neither model.preset nor model.path is set",
                          remedy="set one of them in [model]")
    return hf, where


def read_config(directory: Path) -> dict[str, Any]:
    """The `config.json` of a checkpoint."""
    file = directory / "config.json"
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read the model's config.json: {error.strerror}",
                          where=str(file),
                          remedy="model.path must be a Hugging Face checkpoint directory") from None
    except ValueError as error:
        raise ConfigError(f"the model's config.json is not valid: {error}", where=str(file),
                          remedy="download the checkpoint again") from None


def facts_from_hf(hf: Mapping[str, Any], *, where: str = "config.json") -> ModelFacts:
    """Normalise the content of a `config.json`, or the `[hf]` table of a preset; ConfigError where
    a size is missing that every decoder has."""
    if "hidden_size" not in hf and isinstance(hf.get("text_config"), Mapping):
        hf = hf["text_config"]

    hf = unified(hf)
    for key in ("num_hidden_layers", "num_attention_heads", "hidden_size"):
        if not isinstance(hf.get(key), int):
            raise ConfigError(f"the model's configuration has no {key}", where=where,
                              remedy="only decoder-only language models are supported")
    hf |= derived(hf)
    num_experts, intermediate = hf.get("num_experts") or 0, hf.get("intermediate_size") or 0
    return ModelFacts(
        model_type=str(hf.get("model_type", "")),
        hidden_size=hf["hidden_size"],
        num_layers=hf["num_hidden_layers"],
        num_heads=hf["num_attention_heads"],
        num_kv_heads=hf["num_key_value_heads"],
        head_dim=hf["head_dim"],
        intermediate_size=intermediate,
        num_experts=num_experts,
        num_experts_per_token=hf.get("num_experts_per_tok") or 0,
        moe_intermediate_size=(hf.get("moe_intermediate_size") or intermediate)
        if num_experts else 0,
        shared_expert_intermediate_size=hf["shared_expert_intermediate_size"] or 0,
        moe_layers=tuple(i for i, is_moe in enumerate(hf["moe_layers"]) if is_moe),
        vocab_size=hf.get("vocab_size"),
        max_position_embeddings=hf.get("max_position_embeddings"),
        is_mla=hf.get("kv_lora_rank") is not None,
    )
