"""Images as a policy sees them: from the bytes of a file to patches, as transformers' image
processor of Qwen2-VL makes them, with Pillow and NumPy alone.

Patches are what was read, one byte a colour: engine and trainer scale and shift them themselves, in
the same way, so that both compute with the same numbers.

Shape legend: P patches of an image, D = 3 x temporal_patch_size x patch_size x patch_size."""

import hashlib
import io

import numpy as np
from PIL import Image, ImageOps

from grpo_megatron.errors import DataError
from grpo_megatron.image_settings import ImageSettings

LARGEST_PIXELS = 1 << 26
"""Of an image before it is scaled down: more is a mistake or an attack, and takes gigabytes."""


def digest_of(content: bytes) -> str:
    """Name an image by its bytes: sha256, hex."""
    return hashlib.sha256(content).hexdigest()


def read_image(content: bytes) -> Image.Image:
    """Decode the bytes of an image file, upright and in RGB.

    Raises DataError for what is no image, is cut off or damaged, or has more than `LARGEST_PIXELS`.
    """
    if not content:
        raise DataError("the image has no bytes", remedy="leave the row out, or mend the image")
    try:
        image = Image.open(io.BytesIO(content))
        width, height = image.size
        if width * height > LARGEST_PIXELS:
            raise DataError(
                f"an image of {width} x {height} pixels is larger than {LARGEST_PIXELS} pixels",
                remedy="scale it down, or leave the row out",
            )
        image.load()
        return ImageOps.exif_transpose(image).convert("RGB")
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise DataError(
            f"not a readable image: {error}", remedy="leave the row out, or mend the image"
        ) from error


def patches_of(content: bytes, rows: int, columns: int, settings: ImageSettings) -> np.ndarray:
    """Return the patches of an image of so many rows and columns of tokens, uint8 [P, D].

    Patches of a token are neighbours, tokens come row by row. Raises DataError as `read_image`."""
    side = settings.token_pixels
    image = read_image(content).resize((columns * side, rows * side), Image.Resampling.BICUBIC)
    merge = settings.merge_size
    patch = settings.patch_size
    pixels = np.asarray(image).reshape(rows, merge, patch, columns, merge, patch, 3)
    # token row, token column, patch row, patch column, colour, pixel row, pixel column
    pixels = pixels.transpose(0, 3, 1, 4, 6, 2, 5)
    frames = np.repeat(pixels[:, :, :, :, :, None], settings.temporal_patch_size, axis=5)
    return frames.reshape(rows * columns * merge**2, -1)
