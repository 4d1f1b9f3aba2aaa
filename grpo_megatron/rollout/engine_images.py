"""Images of a prompt as `/inference/v1/generate` takes them (`features`): patches of pixels, so
that an engine computes with the very numbers that the trainer has.

vLLM 0.32 decodes an item of msgpack (`v1/serial_utils.py`, `_decode_mm_item`); `_item` writes one
without importing vLLM, and a test has vLLM read it."""

import base64
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from grpo_megatron.batching.image_folder import ImageFolder
from grpo_megatron.image_settings import ImageSettings
from grpo_megatron.images import patches_of
from grpo_megatron.plan.model_facts import read_config
from grpo_megatron.rundir import RunDir
from grpo_megatron.types import PromptImage

_RAW_BYTES = 3
"""Code of msgpack's extension that holds the bytes of a tensor (vLLM's CUSTOM_TYPE_RAW_VIEW)."""
_REMEMBERED = 16


@dataclass(frozen=True, slots=True)
class EngineImage:
    """An image of a prompt, with what an engine needs of it."""

    place: PromptImage
    name: str
    """Equal for the same patches: by it engines keep what their tower made of them."""
    item: str
    """Patches and grid: msgpack in base 64."""


class EngineImages:
    """Makes what engines need of images whose files are in `folder`."""

    def __init__(self, folder: ImageFolder, settings: ImageSettings):
        self._folder = folder
        self._settings = settings
        # samples of a prompt are often asked for one by one
        self._item_of = lru_cache(_REMEMBERED)(self._make_item)

    def of(self, images: Sequence[PromptImage]) -> tuple[EngineImage, ...]:
        """Return the images of a prompt, in its order. DataError where one cannot be read."""
        found = []
        for image in images:
            name = f"{image.digest}-{image.rows}x{image.columns}"
            item = self._item_of(image.digest, image.rows, image.columns)
            found.append(EngineImage(image, name, item))
        return tuple(found)

    def _make_item(self, digest: str, rows: int, columns: int) -> str:
        content = self._folder.read(digest)
        patches = patches_of(content, rows, columns, self._settings)
        merge = self._settings.merge_size
        return _item(patches, np.array([1, rows * merge, columns * merge]))


def engine_images(run_dir: RunDir, model: Path) -> EngineImages | None:
    """Of a run; None where the model at `model` sees no images."""
    hf = read_config(model)
    if "vision_config" not in hf:
        return None
    return EngineImages(ImageFolder(run_dir.images), ImageSettings.of_model(hf))


def features_of(images: Sequence[EngineImage]) -> dict[str, Any]:
    """Return the field `features` of a request."""
    ranges = []
    for image in images:
        ranges.append({"offset": image.place.start, "length": image.place.num_tokens})
    return {
        "mm_hashes": {"image": [image.name for image in images]},
        "mm_placeholders": {"image": ranges},
        "kwargs_data": {"image": [image.item for image in images]},
    }


def _item(patches: np.ndarray, grid: np.ndarray) -> str:
    """Write patches, uint8 [P, D], and their grid in time, height and width, int64 [3]."""
    fields = {
        "image_grid_thw": {"data": _tensor(grid), "field": ("batched", {"keep_on_cpu": True})},
        "pixel_values": {
            "data": _tensor(patches),
            "field": (
                "flat",
                {"slices": [[(0, len(patches), None)]], "dim": 0, "keep_on_cpu": False},
            ),
        },
    }
    return base64.b64encode(msgspec.msgpack.encode(fields)).decode("ascii")


def _tensor(values: np.ndarray) -> tuple[str, Sequence[int], msgspec.msgpack.Ext]:
    return values.dtype.name, values.shape, msgspec.msgpack.Ext(_RAW_BYTES, values.tobytes())
