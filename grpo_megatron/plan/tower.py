"""Sizes of a vision tower, by their names in the closed forms. Every rank of the first pipeline
stage has it whole."""

from collections.abc import Mapping
from typing import Any

_DEFAULTS = {
    "depth": 32,
    "hidden_size": 3584,
    "intermediate_size": 3420,
    "num_heads": 16,
    "out_hidden_size": 3584,
    "in_channels": 3,
    "patch_size": 14,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
}
"""Of transformers' `Qwen2_5_VLVisionConfig`, where config.json names none."""


def tower_symbols(hf: Mapping[str, Any]) -> dict[str, int]:
    """Return the sizes of the tower of a model with the fields `hf`; {} where it has none."""
    given = hf.get("vision_config")
    if given is None:
        return {}
    vision = {name: given.get(name, default) for name, default in _DEFAULTS.items()}
    patches_of_token = vision["spatial_merge_size"] ** 2
    pixels = vision["temporal_patch_size"] * vision["patch_size"] ** 2
    return {
        "tower_blocks": vision["depth"],
        "seen": vision["hidden_size"],
        "seen_width": vision["intermediate_size"],
        "seen_heads": vision["num_heads"],
        "patch_numbers": vision["in_channels"] * pixels,
        "patches_of_token": patches_of_token,
        "merged": patches_of_token * vision["hidden_size"],
        "feature": vision["out_hidden_size"],
    }
