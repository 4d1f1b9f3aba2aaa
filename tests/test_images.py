"""Patches are those of transformers' image processor; what is no image is refused."""

from __future__ import annotations

import io

import numpy as np
import pytest
from PIL import Image

from grpo_megatron import images
from grpo_megatron.errors import ConfigError, DataError
from grpo_megatron.image_settings import ImageSettings
from grpo_megatron.images import patches_of, read_image
from tests.trainer.vision import PROCESSOR, VISION, png

SETTINGS = ImageSettings.of_model(VISION | {"image_processor": PROCESSOR})


@pytest.mark.parametrize(
    ("width", "height"),
    [(1, 1), (28, 28), (64, 40), (1000, 700), (13, 300), (231, 230), (700, 40), (5, 6)],
)
def test_patches_are_those_of_transformers(width, height):
    """Also where the image is scaled down to the most pixels, or up to the fewest."""
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import (
        Qwen2VLImageProcessorPil,
    )

    processor = Qwen2VLImageProcessorPil(**PROCESSOR)
    content = png(width, height, seed=width)
    image = Image.open(io.BytesIO(content))
    raw = processor(image, do_rescale=False, do_normalize=False, return_tensors="np")
    rows, columns = SETTINGS.tokens_of(width, height)
    assert raw["image_grid_thw"].tolist() == [[1, 2 * rows, 2 * columns]]
    found = patches_of(content, rows, columns, SETTINGS)
    assert found.dtype == np.uint8
    np.testing.assert_array_equal(found, raw["pixel_values"])


def test_settings_of_either_spelling():
    by_size = PROCESSOR | {"min_pixels": None, "max_pixels": None}
    by_size |= {"size": {"shortest_edge": 28 * 28, "longest_edge": 28 * 28 * 64}}
    assert ImageSettings.of_model(VISION | {"image_processor": by_size}) == SETTINGS


def test_colours_without_a_mean_are_refused():
    """vLLM would take them as they are."""
    without = {"image_processor": PROCESSOR | {"image_mean": None}}
    with pytest.raises(ConfigError, match="image_mean is not three numbers"):
        ImageSettings.of_model(VISION | without)


def test_images_lie_upright_and_have_three_colours():
    pixels = np.zeros((28, 56), np.uint8)
    pixels[:, :28] = 200
    turned = Image.fromarray(pixels)
    exif = Image.Exif()
    exif[0x0112] = 3  # upside down: turned by half
    file = io.BytesIO()
    turned.save(file, "PNG", exif=exif)
    found = np.asarray(read_image(file.getvalue()))
    assert found.shape == (28, 56, 3)
    assert (found[:, 28:] == 200).all() and (found[:, :28] == 0).all()


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "has no bytes"),
        (b"GIF89a and nothing else", "not a readable image"),
        (png(40, 40, 0)[:-900], "not a readable image"),
        (b"a text", "not a readable image: cannot identify"),
    ],
)
def test_what_is_no_image_is_refused(content, words):
    with pytest.raises(DataError, match=words):
        read_image(content)


def test_huge_and_oblong_images_are_refused(monkeypatch):
    with pytest.raises(DataError, match="3000 x 10 pixels is longer than 200 times"):
        SETTINGS.tokens_of(3000, 10)
    monkeypatch.setattr(images, "LARGEST_PIXELS", 100)
    with pytest.raises(DataError, match="20 x 10 pixels is larger than 100 pixels"):
        read_image(png(20, 10, 0))
