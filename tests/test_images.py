"""Patches are those of transformers' image processor; what is no image is refused."""

from __future__ import annotations

import io
import random
import struct

import numpy as np
import pytest
from PIL import Image, TiffImagePlugin

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


@pytest.mark.parametrize(
    ("edits", "words"),
    [
        ({"min_pixels": "784"}, "min_pixels = '784', expected a whole number of pixels"),
        ({"max_pixels": -5}, "max_pixels = -5, expected a whole number of pixels"),
        ({"max_pixels": True}, "max_pixels = True"),
        ({"min_pixels": 0}, "min_pixels = 0"),
        ({"min_pixels": 100_000, "max_pixels": 784}, "expected at most max_pixels, which is 784"),
        ({"min_pixels": None, "size": 5}, "size = 5, expected a table with shortest_edge"),
        ({"min_pixels": None, "size": {"height": 28}}, "expected shortest_edge, in pixels"),
        (
            {"max_pixels": None, "size": {"shortest_edge": 9, "longest_edge": 1.5}},
            "size.longest_edge = 1.5, expected a whole number of pixels",
        ),
        ({"image_mean": 5}, "image_mean is not three numbers: 5"),
        ({"image_mean": [0.5, "0.5", 0.5]}, "image_mean is not three numbers"),
        ({"image_std": [0.5, 0.5, float("nan")]}, "image_std is not three numbers"),
        ({"image_std": [0, 0, 0]}, "image_std = [0, 0, 0], expected three numbers above 0"),
        ({"rescale_factor": "1/255"}, "rescale_factor = '1/255', expected a number above 0"),
        ({"rescale_factor": 0}, "rescale_factor = 0, expected a number above 0"),
        ({"do_resize": False}, "do_resize = False, expected True"),
        ({"do_rescale": False}, "do_rescale = False, expected True"),
        ({"do_convert_rgb": False}, "do_convert_rgb = False, expected True"),
        ({"resample": 2}, "resample = 2, expected 3"),
        (
            {"image_processor_type": "CLIPImageProcessor"},
            "image_processor_type = 'CLIPImageProcessor', expected 'Qwen2VLImageProcessor' or",
        ),
        ({"patch_size": 32}, "patch_size = 32, expected 14, as vision_config"),
        ({"merge_size": 1}, "merge_size = 1, expected 2, as vision_config"),
        ({"temporal_patch_size": 1}, "temporal_patch_size = 1, expected 2, as vision_config"),
    ],
)
def test_what_cannot_prepare_images_is_named(edits, words):
    with pytest.raises(ConfigError) as caught:
        ImageSettings.of_model(VISION | {"image_processor": PROCESSOR | edits})
    assert words in caught.value.message
    assert caught.value.where == "preprocessor_config.json" and caught.value.remedy


def test_limits_beside_a_size_of_old_files_are_taken():
    """transformers takes them out of it."""
    beside = PROCESSOR | {"size": {"min_pixels": 1, "max_pixels": 2}}
    assert ImageSettings.of_model(VISION | {"image_processor": beside}) == SETTINGS


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


def saved(image: Image.Image, kind: str, **options) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


ORIENTATION = struct.pack(">HHI4s", 0x112, 3, 1, b"\0\x06\0\0")  # turned by a quarter
WRONG_TYPES = {
    "resolution as text": struct.pack(">HHI4s", 0x11A, 2, 2, b"7\0\0\0"),
    "software as a number": struct.pack(">HHI4s", 0x131, 11, 1, b"\x3f\x80\0\0"),
    "no entry of the standard": struct.pack(">HHI4s", 0x9999, 2, 2, b"7\0\0\0"),
}


@pytest.mark.parametrize("name", WRONG_TYPES)
@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP"])
def test_other_entries_of_exif_may_be_damaged(name, kind):
    entries = sorted([ORIENTATION, WRONG_TYPES[name]])
    head = b"Exif\0\0MM\0*\0\0\0\x08" + struct.pack(">H", len(entries))
    exif = head + b"".join(entries) + bytes(4)
    assert read_image(saved(Image.new("RGB", (4, 2)), kind, exif=exif)).size == (2, 4)


@pytest.mark.parametrize(
    "kind", ["PNG", "JPEG", "TIFF", "WEBP", "GIF", "AVIF", "DDS", "BLP", "TGA"]
)
@pytest.mark.filterwarnings("ignore")  # Pillow warns of some of what it then refuses
def test_damaged_files_are_refused_whatever_pillow_raises(kind):
    rng = random.Random(7)
    image = Image.effect_noise((12, 9), 80).convert("P" if kind in ("BLP", "GIF") else "RGB")
    whole = saved(image, kind)
    for _ in range(150):
        content = bytearray(whole)
        for _ in range(rng.randrange(1, 5)):
            content[rng.randrange(min(len(whole), 120))] = rng.randrange(256)
        end = rng.choice([len(whole), rng.randrange(1, len(whole))])
        try:
            found = read_image(bytes(content[:end]))
        except DataError as error:
            assert "image" in error.message
        else:
            assert found.mode == "RGB"


@pytest.mark.parametrize(
    "error", [struct.error("3 bytes"), NotImplementedError(), RuntimeError("x")]
)
def test_whatever_the_library_raises_is_no_readable_image(monkeypatch, error):
    def fails(image):
        raise error

    monkeypatch.setattr(Image.Image, "getexif", fails)
    with pytest.raises(DataError, match=r"not a readable image: .+"):
        read_image(png(4, 4, 0))


def test_a_machine_without_memory_has_no_damaged_image(monkeypatch):
    def fails(image):
        raise MemoryError

    monkeypatch.setattr(Image.Image, "getexif", fails)
    with pytest.raises(MemoryError):
        read_image(png(4, 4, 0))


@pytest.mark.parametrize("kind", ["PNG", "TIFF", "PPM"])
def test_greys_of_16_bits_keep_the_upper_eight(kind):
    greys = np.arange(0, 65536, 1024, np.uint16).reshape(8, 8)
    found = np.asarray(read_image(saved(Image.fromarray(greys), kind)))
    assert (found == (greys >> 8)[..., None]).all()


@pytest.mark.parametrize(
    ("kind", "dtype", "words"), [("TIFF", np.int32, "32 bits"), ("TIFF", np.float32, "floating")]
)
def test_pixels_without_a_known_white_are_refused(kind, dtype, words):
    content = saved(Image.fromarray(np.ones((4, 4), dtype)), kind)
    with pytest.raises(DataError, match=f"{words}.* nothing says which one is white"):
        read_image(content)


def test_greys_with_a_sign_are_told_as_such():
    """Pillow reads 16 bits of them as it does 32."""
    greys = Image.fromarray(np.ones((4, 4), np.uint16))
    content = saved(greys, "TIFF", tiffinfo={TiffImagePlugin.SAMPLEFORMAT: 2})
    with pytest.raises(DataError, match="integers with a sign or of 32 bits") as caught:
        read_image(content)
    assert "with 16 without a sign" in caught.value.remedy


def test_what_is_transparent_is_white():
    """Whatever colour it hides; a half of it is half white, what is opaque stays."""
    pixels = np.zeros((1, 3, 4), np.uint8)
    pixels[0, :, 0] = 200
    pixels[0, :, 3] = (0, 255, 51)
    found = np.asarray(read_image(saved(Image.fromarray(pixels), "PNG")))
    assert found[0].tolist() == [[255, 255, 255], [200, 0, 0], [244, 204, 204]]
    two = Image.fromarray(np.array([[0, 1]], np.uint8)).convert("P")
    of_palette = np.asarray(read_image(saved(two, "PNG", transparency=0)))
    assert of_palette[0].tolist() == [[255, 255, 255], [1, 1, 1]]
    greys = Image.fromarray(np.array([[256, 512]], np.uint16))
    of_16_bits = np.asarray(read_image(saved(greys, "PNG", transparency=256)))
    assert of_16_bits[0].tolist() == [[255, 255, 255], [2, 2, 2]]


def test_huge_and_oblong_images_are_refused(monkeypatch):
    with pytest.raises(DataError, match="3000 x 10 pixels has one side more than 200 times"):
        SETTINGS.tokens_of(3000, 10)
    monkeypatch.setattr(images, "LARGEST_PIXELS", 100)
    with pytest.raises(DataError, match=r"^an image of 20 x 10 pixels is larger") as error:
        read_image(png(20, 10, 0))
    assert error.value.remedy == "scale it down, or leave the row out"
