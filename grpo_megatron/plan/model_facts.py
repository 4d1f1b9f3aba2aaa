"""What the layout rules need to know of a model, from any dialect of Hugging Face `config.json`."""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grpo_megatron.config.loader import read_resolved
from grpo_megatron.config.presets import load_preset
from grpo_megatron.config.run import ModelConfig
from grpo_megatron.errors import ConfigError, raised_as
from grpo_megatron.plan.hf_config import (
    derived,
    flattened,
    model_fields,
    refuse_flat_text,
    unified,
)
from grpo_megatron.plan.tower import num_deep_levels
from grpo_megatron.rundir import run_that_writes

IMAGE_FILES = ("preprocessor_config.json", "processor_config.json")
"""In which a checkpoint says how images become patches: the one for them, and the one for all
modalities, which transformers 5 may save and which is read first."""


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
    sees_images: bool = False  # has a vision tower (docs/vision.md)
    num_deep_layers: int = 0  # first layers to whose outputs the tower's features are added
    query_rank: int = 0  # of latent attention: the low rank of its queries; 0: none
    latent_rank: int = 0  # of the vector that its keys and values are made of
    latent_query_dim: int = 0  # of a head, both of its parts
    latent_key_value_dim: int = 0  # of a head: what is made of the latent vector
    latent_value_dim: int = 0  # of a head

    @property
    def is_moe(self) -> bool:
        """Whether the model has experts."""
        return self.num_experts > 0

    @property
    def has_dense_layers(self) -> bool:
        """Whether some layers have a plain MLP."""
        return len(self.moe_layers) < self.num_layers


def model_facts(model: ModelConfig) -> ModelFacts:
    """Facts of the configured model, of which every field must be known; ConfigError for an unknown
    preset, a path without `config.json`, or a model that the trainer does not compute."""
    hf, where = configuration_of(model)
    model_fields(hf, where=where)
    facts = facts_from_hf(hf)
    is_preset = origin_of(model).path is None
    if facts.vocab_size is None and not is_preset:  # of a tiny preset, whose tokenizer decides
        raise ConfigError(
            "vocab_size is missing", where=where, remedy="download the checkpoint again"
        )
    return facts


def origin_of(model: ModelConfig) -> ModelConfig:
    """Return the model that `model` is: itself, or, where its path is an export that a run is yet
    to write, the model of that run."""
    if model.path is None or model.path.exists():
        return model
    run = run_that_writes(model.path)
    if run is None:
        return model
    return origin_of(read_resolved(run / "config.json").config.model)


def configuration_of(model: ModelConfig) -> tuple[dict[str, Any], str]:
    """Return the configured model's `config.json`, and what messages call it. Raises
    ConfigError."""
    model = origin_of(model)
    if model.path is not None:
        return read_config(model.path), str(model.path / "config.json")
    assert model.preset is not None  # rule model_source
    preset = load_preset(model.preset)
    return preset.hf, preset.file.display


def read_config(directory: Path) -> dict[str, Any]:
    """Return a checkpoint's `config.json`, of a model that sees with its preprocessor_config.json
    as the field `image_processor`. Raises ConfigError where one is missing or damaged, or says two
    things of one field."""
    config = config_fields(directory)
    if "vision_config" in config:
        config["image_processor"] = image_processor(directory)
    return config


def config_fields(directory: Path) -> dict[str, Any]:
    """Return a checkpoint's `config.json` alone, with the fields of `text_config` among the others.
    Raises ConfigError where it is missing or damaged, or says two things of one field."""
    written = written_config(directory)
    where = str(directory / "config.json")
    config: dict[str, Any] = flattened(written, where=where)
    refuse_flat_text(written, where=where)
    return config


def written_config(directory: Path) -> dict[str, Any]:
    """Return a checkpoint's `config.json` as it is written. Raises ConfigError where it is missing
    or damaged."""
    file = directory / "config.json"
    written = _read_table(file)
    texts = written.get("text_config") or {}
    if not isinstance(texts, dict):
        raise _no_table("text_config", texts, file)
    return written


def _read_table(file: Path) -> dict[str, Any]:
    """Return the JSON object in a file of a checkpoint. Raises ConfigError for anything else."""
    with _explained(file):
        found = json.loads(file.read_text(encoding="utf-8-sig"))
    if not isinstance(found, dict):
        raise _no_table("the file", found, file)
    return found


@contextmanager
def _explained(file: Path) -> Iterator[None]:
    """Raise a ConfigError for a file of a checkpoint that cannot be read, or is not JSON."""
    with (
        raised_as(
            ConfigError,
            f"cannot read the model's {file.name}",
            OSError,
            where=file,
            remedy="give a Hugging Face checkpoint directory",
        ),
        raised_as(
            ConfigError,
            f"the model's {file.name} is not valid",
            ValueError,
            where=file,
            remedy="download the checkpoint again",
        ),
    ):
        yield


def _no_table(name: str, found: object, file: Path) -> ConfigError:
    return ConfigError(
        f"{name} has {type(found).__name__}, expected a table",
        where=str(file),
        remedy="download the checkpoint again",
    )


def image_processor(directory: Path) -> dict[str, Any]:
    """Return what a checkpoint says of how images become patches, in the file for them or, as
    transformers 5 may save it, in one for all modalities. Raises ConfigError where it says
    nothing."""
    of_images, of_all_kinds = IMAGE_FILES
    of_all = directory / of_all_kinds
    if of_all.exists():
        found = _read_table(of_all).get("image_processor")
        if isinstance(found, dict):
            return found
        if found is not None:
            raise _no_table("image_processor", found, of_all)
    return _read_table(directory / of_images)


def facts_from_hf(hf: Mapping[str, Any]) -> ModelFacts:
    """Return the facts of a model that the trainer computes, from its `config.json` or the `[hf]`
    table of a preset."""
    hf = unified(hf)
    hf |= derived(hf)
    num_experts = hf.get("num_experts") or 0
    intermediate = hf.get("intermediate_size") or 0
    moe_intermediate = 0
    if num_experts:
        moe_intermediate = hf.get("moe_intermediate_size") or intermediate
    return ModelFacts(
        model_type=hf["model_type"],
        hidden_size=hf["hidden_size"],
        head_dim=hf["head_dim"],
        num_layers=hf["num_hidden_layers"],
        num_heads=hf["num_attention_heads"],
        num_kv_heads=hf["num_key_value_heads"],
        intermediate_size=intermediate,
        num_experts=num_experts,
        num_experts_per_token=hf.get("num_experts_per_tok") or 0,
        moe_intermediate_size=moe_intermediate,
        vocab_size=hf.get("vocab_size"),
        shared_expert_intermediate_size=hf["shared_expert_intermediate_size"] or 0,
        moe_layers=tuple(i for i, is_moe in enumerate(hf["moe_layers"]) if is_moe),
        is_mla=hf.get("kv_lora_rank") is not None,
        max_position_embeddings=hf.get("max_position_embeddings"),
        sees_images="vision_config" in hf,
        num_deep_layers=num_deep_levels(hf),
        **_latent_dims(hf),
    )


def _latent_dims(hf: Mapping[str, Any]) -> dict[str, int]:
    """Sizes of latent attention; none of another one."""
    if hf.get("kv_lora_rank") is None:
        return {}
    without_position: int = hf.get("qk_nope_head_dim") or 0
    with_position: int = hf.get("qk_rope_head_dim") or 0
    value: int = hf.get("v_head_dim") or 0
    return {
        "query_rank": hf.get("q_lora_rank") or 0,
        "latent_rank": hf["kv_lora_rank"],
        "latent_query_dim": without_position + with_position,
        "latent_key_value_dim": without_position + value,
        "latent_value_dim": value,
    }
