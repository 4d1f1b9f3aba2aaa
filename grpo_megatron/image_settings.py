"""How images of a model become patches and tokens, by the files of its checkpoint. Without NumPy:
recipes are checked with it."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from grpo_megatron.errors import ConfigError, DataError

_PATCH_SIZES = {"qwen3_vl": 16, "qwen3_vl_moe": 16}
"""Of transformers' classes, where config.json names none; 14 of other families."""
_PROCESSORS = ("Qwen2VLImageProcessor", "Qwen2VLImageProcessorFast", "Qwen2VLImageProcessorPil")
"""Classes of transformers that make the patches of `images.patches_of`."""
_SUPPORTED: dict[str, tuple[Any, ...]] = {
    "image_processor_type": _PROCESSORS,
    "do_resize": (True,),
    "do_rescale": (True,),
    "do_normalize": (True,),
    "do_convert_rgb": (True,),
    "resample": (3,),  # bicubic
}
"""Values of fields that say how images are prepared; of others `images.patches_of`, or the engines,
would do something else."""
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
        they are, transformers those of its class. So it does for what is no number of its kind, for
        what `vision_config` says otherwise, and for a way to prepare images that is not this
        one."""
        processor = hf["image_processor"]
        for name, supported in _SUPPORTED.items():
            found = processor.get(name)
            if found is not None and found not in supported:
                raise _unfit(name, found, " or ".join(map(repr, supported)))
        mean = _three_numbers(processor, "image_mean")
        std = _three_numbers(processor, "image_std")
        if min(std) <= 0:
            raise _unfit(
                "image_std", list(std), "three numbers above 0: colours are divided by them"
            )
        least = _pixels(processor, "min_pixels", "shortest_edge", default=56 * 56)
        most = _pixels(processor, "max_pixels", "longest_edge", default=28 * 28 * 1280)
        if least > most:
            raise _unfit("min_pixels", least, f"at most max_pixels, which is {most}")
        rescale_factor = processor.get("rescale_factor")
        if rescale_factor is None:
            rescale_factor = 1 / 255
        if not _is_number(rescale_factor) or rescale_factor <= 0:
            raise _unfit("rescale_factor", rescale_factor, "a number above 0, usually 1/255")
        settings = cls(
            patch_size=_patch_size(hf),
            merge_size=_merge_size(hf),
            temporal_patch_size=hf["vision_config"].get("temporal_patch_size", 2),
            least_pixels=least,
            most_pixels=most,
            mean=mean,
            std=std,
            rescale_factor=rescale_factor,
        )
        for name in ("patch_size", "merge_size", "temporal_patch_size"):
            of_tower = getattr(settings, name)
            if processor.get(name) not in (None, of_tower):
                raise _unfit(
                    name, processor[name], f"{of_tower}, as vision_config of config.json has"
                )
        return settings

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


def _unfit(name: str, found: Any, expected: str) -> ConfigError:
    return ConfigError(
        f"{name} = {found!r}, expected {expected}",
        where="preprocessor_config.json",
        remedy="copy the file of the original checkpoint; min_pixels and max_pixels may be changed",
    )


def _is_number(value: Any) -> bool:
    is_one = isinstance(value, int | float) and not isinstance(value, bool)
    return is_one and math.isfinite(value)


def _three_numbers(processor: Mapping[str, Any], name: str) -> tuple[float, ...]:
    found = processor.get(name)
    if not isinstance(found, list | tuple) or len(found) != 3 or not all(map(_is_number, found)):
        raise ConfigError(
            f"{name} is not three numbers: {found!r}",
            where="preprocessor_config.json",
            remedy="copy the file of the original checkpoint",
        )
    return tuple(found)


def _pixels(processor: Mapping[str, Any], name: str, name_in_size: str, *, default: int) -> int:
    """Return a limit of pixels, of which `name` goes before that in `size`, as in transformers."""
    size = processor.get("size") or {}
    if not isinstance(size, Mapping):
        raise _unfit("size", size, "a table with shortest_edge and longest_edge, in pixels")
    found = processor.get(name)
    if found is None:
        found = size.get(name_in_size)
        name = f"size.{name_in_size}"
    if found is None and size:
        raise _unfit("size", dict(size), f"{name_in_size}, in pixels of an image, among its keys")
    if found is None:
        return default
    if not isinstance(found, int) or isinstance(found, bool) or found < 1:
        raise _unfit(name, found, "a whole number of pixels above 0")
    return found


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
            f"an image of {width} x {height} pixels has one side more than {_MOST_OBLONG} times as "
            "long as the other",
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
