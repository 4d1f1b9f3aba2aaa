"""Sizes of a vision tower, by their names in the closed forms. Every rank of the first pipeline
stage has it whole."""

from collections.abc import Mapping
from typing import Any

from grpo_megatron.errors import ConfigError
from grpo_megatron.plan.family import family_of

_DEFAULTS: dict[str, dict[str, Any]] = {
    "qwen2_5_vl": {
        "depth": 32,
        "hidden_size": 3584,
        "intermediate_size": 3420,
        "num_heads": 16,
        "out_hidden_size": 3584,
        "in_channels": 3,
        "patch_size": 14,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "window_size": 112,
        "fullatt_block_indexes": (7, 15, 23, 31),
    },
    "qwen3_vl": {
        "depth": 27,
        "hidden_size": 1152,
        "intermediate_size": 4304,
        "num_heads": 16,
        "out_hidden_size": 3584,
        "in_channels": 3,
        "patch_size": 16,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "num_position_embeddings": 2304,
        "deepstack_visual_indexes": (8, 16, 24),
    },
}
"""Of transformers' configuration of a tower, where config.json names none."""


def tower_fields(hf: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of `vision_config` of a model that sees, with transformers' defaults."""
    given = hf["vision_config"]
    tower = family_of(hf["model_type"]).tower
    return _DEFAULTS[tower] | {k: v for k, v in given.items() if v is not None}


def tower_settings(hf: Mapping[str, Any]) -> dict[str, Any]:
    """Return all that decides what the tower of a model that sees computes, by names as
    `vision_config.depth`, in comparable form; {} of a model that has none."""
    if "vision_config" not in hf:
        return {}
    fields = tower_fields(hf)
    settings = {}
    for name in _DEFAULTS[family_of(hf["model_type"]).tower]:
        value = fields[name]
        if isinstance(value, tuple):
            value = list(value)
        settings[f"vision_config.{name}"] = value
    return settings


def num_deep_levels(hf: Mapping[str, Any]) -> int:
    """Count the decoder layers, from the first on, after which features of images are added: those
    that early blocks of the tower make (DeepStack). 0 for other models."""
    if "vision_config" not in hf:
        return 0
    return len(tower_fields(hf).get("deepstack_visual_indexes", ()))


def refuse_deep_blocks(hf: Mapping[str, Any]) -> None:
    """Raise ConfigError where `deepstack_visual_indexes` are not blocks of the tower, in order.

    Features of others would go to other layers in transformers than in vLLM, or to none."""
    if num_deep_levels(hf) == 0:
        return
    vision = tower_fields(hf)
    blocks = list(vision["deepstack_visual_indexes"])
    in_order = blocks == sorted(set(blocks))
    if not in_order or blocks[0] < 0 or blocks[-1] >= vision["depth"]:
        raise ConfigError(
            f"vision_config.deepstack_visual_indexes = {blocks} are not blocks of a tower of "
            f"{vision['depth']}, in ascending order",
            remedy=f"numbers from 0 to {vision['depth'] - 1}, each once",
        )
    if len(blocks) > hf["num_hidden_layers"]:
        raise ConfigError(
            f"the vision tower has features for {len(blocks)} layers "
            f"(vision_config.deepstack_visual_indexes), and the model has "
            f"{hf['num_hidden_layers']} (num_hidden_layers)",
            remedy="is config.json of this checkpoint?",
        )


def tower_symbols(hf: Mapping[str, Any]) -> dict[str, int]:
    """Return the sizes of the tower of a model with the fields `hf`; {} where it has none."""
    if "vision_config" not in hf:
        return {}
    vision = tower_fields(hf)
    patches_of_token = vision["spatial_merge_size"] ** 2
    pixels = vision["temporal_patch_size"] * vision["patch_size"] ** 2
    return {
        "tower_blocks": vision["depth"],
        "tower_hidden": vision["hidden_size"],
        "tower_ffn": vision["intermediate_size"],
        "tower_heads": vision["num_heads"],
        "patch_values": vision["in_channels"] * pixels,
        "patches_of_token": patches_of_token,
        "merged_hidden": patches_of_token * vision["hidden_size"],
        "tower_output": vision["out_hidden_size"],
        "tower_positions": vision.get("num_position_embeddings", 0),
        "deep_levels": num_deep_levels(hf),
        "whole_image_blocks": _num_whole_image_blocks(vision),
        "window_patches": (vision.get("window_size", 0) // vision["patch_size"]) ** 2,
    }


def _num_whole_image_blocks(vision: Mapping[str, Any]) -> int:
    """Count the blocks in which a patch meets all of its image; others have windows."""
    if "window_size" not in vision:
        return int(vision["depth"])
    return len(set(vision["fullatt_block_indexes"]) & set(range(vision["depth"])))
