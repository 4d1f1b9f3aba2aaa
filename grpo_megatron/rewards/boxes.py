"""Rewards for boxes in images, for models that answer where something is (VLM-R1,
arXiv:2504.07615). A box is `[x1, y1, x2, y2]` in pixels, left and top first."""

import math
import re
from collections.abc import Mapping
from typing import Any

from grpo_megatron.errors import DataError
from grpo_megatron.image_settings import RELEASED_LIMITS, tokens_of_size
from grpo_megatron.rewards.argument_checks import check_tags
from grpo_megatron.rewards.code_tests import extract
from grpo_megatron.rewards.functions import format_tags
from grpo_megatron.rewards.registry import needs

_NUMBER = r"-?\d+(?:\.\d+)?"
_FARTHEST_PIXEL = 1e9
"""Further than any image reaches. Beyond it areas overflow, and nothing is their share."""
_BOX = re.compile(rf"\[\s*({_NUMBER})\s*,\s*({_NUMBER})\s*,\s*({_NUMBER})\s*,\s*({_NUMBER})\s*\]")

Box = tuple[float, float, float, float]
"""Left, top, right, bottom."""


@needs(check=check_tags)
def box_iou(
    completion: str,
    answer: str,
    *,
    metadata: Mapping[str, Any],
    answer_tag: str | None = None,
    size_fields: tuple[str, str] | None = None,
    token_pixels: int = RELEASED_LIMITS["token_pixels"],
    min_pixels: int = RELEASED_LIMITS["min_pixels"],
    max_pixels: int = RELEASED_LIMITS["max_pixels"],
) -> float:
    """Intersection over union, in [0, 1], of the first box of the completion and that of the
    answer, which are both lists of four numbers; 0 without a box; NaN where the answer has none.

    A model speaks of the pixels that it sees, which are those of the file scaled. With
    `size_fields`, the row's fields with width and height of the file, the completion's box is
    scaled back: `token_pixels`, `min_pixels` and `max_pixels` are those of the model. Raises
    DataError for a row without these fields."""
    wanted = _box_of(answer)
    if wanted is None or _area(wanted) == 0:
        return math.nan
    given = _box_of(extract(completion, answer_tag) or "")
    if given is None:
        return 0.0
    if size_fields is not None:
        width, height = _size_of(metadata, size_fields)
        rows, columns = tokens_of_size(
            width, height, side=token_pixels, least_pixels=min_pixels, most_pixels=max_pixels
        )
        across = width / (columns * token_pixels)
        down = height / (rows * token_pixels)
        left, top, right, bottom = given
        given = (left * across, top * down, right * across, bottom * down)
    common = _area(
        (
            max(given[0], wanted[0]),
            max(given[1], wanted[1]),
            min(given[2], wanted[2]),
            min(given[3], wanted[3]),
        )
    )
    return common / (_area(given) + _area(wanted) - common)


@needs(check=check_tags)
def format_box(
    completion: str, answer: str, *, think_tag: str = "think", answer_tag: str = "answer"
) -> float:
    """1 for exactly one think block, then one answer block (`format_tags`), whose text has a box
    between braces, as a JSON object has it; else 0."""
    if not format_tags(completion, answer, think_tag=think_tag, answer_tag=answer_tag):
        return 0.0
    text = extract(completion, answer_tag) or ""
    first = text.find("{")
    last = text.rfind("}")
    if first < 0:
        return 0.0
    return float(_BOX.search(text, first, max(last, first)) is not None)


def _box_of(text: str) -> Box | None:
    """The first box of a text; None where there is none, or it is in no image."""
    found = _BOX.search(text)
    if found is None:
        return None
    left, top, right, bottom = map(float, found.groups())
    if max(abs(left), abs(top), abs(right), abs(bottom)) > _FARTHEST_PIXEL:
        return None
    return left, top, right, bottom


def _area(box: Box) -> float:
    left, top, right, bottom = box
    return max(right - left, 0) * max(bottom - top, 0)


def _size_of(metadata: Mapping[str, Any], fields: tuple[str, str]) -> tuple[int, int]:
    """Width and height of the row's image. DataError where the row does not say them."""
    found = []
    for name in fields:
        value = metadata.get(name)
        if not isinstance(value, int) or value < 1:
            raise DataError(
                f"the row's field {name!r} is {value!r}, expected pixels of its image",
                remedy="write width and height of the image into each row, or leave size_fields "
                "out where answers are in the pixels that the model sees",
            )
        found.append(value)
    return found[0], found[1]
