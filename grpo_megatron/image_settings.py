"""How images of a model become patches and tokens, by the files of its checkpoint. Without NumPy:
recipes are checked with it."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from grpo_megatron.errors import ConfigError, DataError

_PATCH_SIZES = {"qwen3_vl": 16, "qwen3_vl_moe": 16}
"""Of transformers' classes, where config.json names none; 14 of other families."""
_MOST_OBLONG = 200
"""Longest side by the shortest, as in transformers."""

RELEASED_LIMITS = {"token_pixels": 28, "min_pixels": 56 * 56, "max_pixels": 28 * 28 * 16384}
"""Of released Qwen2.5-VL checkpoints, which rewards for boxes take where a recipe names none."""


@dataclass(frozen=True, slots=True)
class ImageSettings:
    """How a model's images become patches."""

    patch_size: int
    """Pixels of a patch's side."""
    merge_size: int
    """Patches of the side of a square that is one token."""
    temporal_patch_size: int
    """How often a still image is repeated in a patch, as frames."""
    least_pixels: int
    most_pixels: int
    """An image is scaled, up or down, to have so many."""
    mean: tuple[float, ...]
    std: tuple[float, ...]
    rescale_factor: float
    """A colour c, 0 to 255, is seen as (c * rescale_factor - mean) / std."""

    @classmethod
    def of_model(cls, hf: Mapping[str, Any]) -> "ImageSettings":
        """Read them from `plan.model_facts.read_config` of a model that sees.

        Raises ConfigError where mean and deviation are missing: engines would then take colours as
        they are, transformers those of its class."""
        vision = hf["vision_config"]
        processor = hf["image_processor"]
        for name in ("image_mean", "image_std"):
            if len(processor.get(name) or ()) != 3:
                raise ConfigError(
                    f"{name} is not three numbers",
                    where="preprocessor_config.json",
                    remedy="copy the file of the original checkpoint",
                )
        size = processor.get("size") or {}
        least = processor.get("min_pixels") or size.get("shortest_edge") or 56 * 56
        most = processor.get("max_pixels") or size.get("longest_edge") or 28 * 28 * 1280
        return cls(
            patch_size=_patch_size(hf),
            merge_size=_merge_size(hf),
            temporal_patch_size=vision.get("temporal_patch_size", 2),
            least_pixels=least,
            most_pixels=most,
            mean=tuple(processor["image_mean"]),
            std=tuple(processor["image_std"]),
            rescale_factor=processor.get("rescale_factor") or 1 / 255,
        )

    @property
    def token_pixels(self) -> int:
        """Pixels of the side of the square that is one token."""
        return self.patch_size * self.merge_size

    @property
    def limits(self) -> dict[str, int]:
        """What scales images, by the names of `RELEASED_LIMITS`."""
        return {
            "token_pixels": self.token_pixels,
            "min_pixels": self.least_pixels,
            "max_pixels": self.most_pixels,
        }

    def tokens_of(self, width: int, height: int) -> tuple[int, int]:
        """Return rows and columns of tokens of an image of so many pixels.

        Raises DataError for one that is too oblong."""
        return tokens_of_size(
            width,
            height,
            side=self.token_pixels,
            least_pixels=self.least_pixels,
            most_pixels=self.most_pixels,
        )


def token_pixels(hf: Mapping[str, Any]) -> int:
    """Return pixels of the side of the square that is one token, of a model that sees with the
    fields `hf`."""
    return _patch_size(hf) * _merge_size(hf)


def _patch_size(hf: Mapping[str, Any]) -> int:
    default = _PATCH_SIZES.get(hf["model_type"], 14)
    found: int = hf["vision_config"].get("patch_size") or default
    return found


def _merge_size(hf: Mapping[str, Any]) -> int:
    found: int = hf["vision_config"].get("spatial_merge_size") or 2
    return found


def tokens_of_size(
    width: int, height: int, *, side: int, least_pixels: int, most_pixels: int
) -> tuple[int, int]:
    """Return rows and columns of tokens of an image of `width` x `height` pixels, as transformers
    scales it.

    side: pixels of a token's side; least_pixels, most_pixels: of the scaled image. Raises DataError
    for one that is too oblong."""
    if max(width, height) > _MOST_OBLONG * min(width, height):
        raise DataError(
            f"an image of {width} x {height} pixels is longer than {_MOST_OBLONG} times its width",
            remedy="cut it, or leave the row out",
        )
    rows = round(height / side)
    columns = round(width / side)
    if rows * columns * side**2 > most_pixels:
        shrink = math.sqrt(height * width / most_pixels)
        return (
            max(1, math.floor(height / shrink / side)),
            max(1, math.floor(width / shrink / side)),
        )
    if rows * columns * side**2 < least_pixels:
        grow = math.sqrt(least_pixels / (height * width))
        return math.ceil(height * grow / side), math.ceil(width * grow / side)
    return rows, columns
