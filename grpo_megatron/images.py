"""Images as a policy sees them: from the bytes of a file to patches, as transformers' image
processor of Qwen2-VL makes them, with Pillow and NumPy alone.

Patches are what was read, one byte a colour: engine and trainer scale and shift them themselves, in
the same way, so that both compute with the same numbers.

Shape legend: P patches of an image, D = 3 x temporal_patch_size x patch_size x patch_size."""

import hashlib
import io

import numpy as np
from PIL import ExifTags, Image

from grpo_megatron.errors import DataError
from grpo_megatron.image_settings import ImageSettings

LARGEST_PIXELS = 1 << 26
"""Of an image before it is scaled down: more is a mistake or an attack, and takes gigabytes."""
_TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
"""What turns an image upright, by its orientation in EXIF."""
_WHITE = (255, 255, 255)


def digest_of(content: bytes) -> str:
    """Name an image by its bytes: sha256, hex."""
    return hashlib.sha256(content).hexdigest()


def read_image(content: bytes) -> Image.Image:
    """Decode the bytes of an image file, upright and in RGB, on white where it is transparent.
    Greys of 16 bits lose the lower eight, as Pillow has it of colours.

    Raises DataError for what is no image, is cut off or damaged, has more than `LARGEST_PIXELS`, or
    numbers as pixels of which nothing says which one is white."""
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
        return _in_rgb(_upright(image))
    except (DataError, MemoryError):
        raise
    except Exception as error:  # a damaged file raises whatever Pillow's reader of its kind does
        raise DataError(
            f"not a readable image: {str(error) or repr(error)}",
            remedy="leave the row out, or mend the image",
        ) from error


def _upright(image: Image.Image) -> Image.Image:
    """Turn an image as its EXIF says. Pillow's `exif_transpose` also writes all of EXIF anew, which
    fails where any other entry has a wrong type."""
    turn = _TURNS.get(image.getexif().get(ExifTags.Base.Orientation, 1))
    if turn is None:
        return image
    return image.transpose(turn)


def _in_rgb(image: Image.Image) -> Image.Image:
    """Return an image in RGB, on white where it is transparent."""
    is_of_ppm = image.mode == "I" and image.format == "PPM"  # which Pillow scales to 16 bits
    if is_of_ppm or image.mode.startswith("I;16"):
        return _of_16_bits(image)
    if image.mode in ("I", "F"):
        kind = {"I": "integers with a sign or of 32 bits", "F": "floating-point numbers"}[
            image.mode
        ]
        raise DataError(
            f"the image's pixels are {kind}, of which nothing says which one is white",
            remedy="save it with 8 bits a colour, or with 16 without a sign, or leave the row out",
        )
    if not image.has_transparency_data:
        return image.convert("RGB")
    seen = image.convert("RGBA")
    found = Image.new("RGB", seen.size, _WHITE)
    found.paste(seen, mask=seen.getchannel("A"))
    return found


def _of_16_bits(image: Image.Image) -> Image.Image:
    """Return an image of 65,536 greys in RGB; the grey that is transparent, if one is, as white."""
    values = np.asarray(image)
    greys = (values >> 8).astype(np.uint8)
    transparent = image.info.get("transparency")
    if transparent is not None:
        greys[values == transparent] = 255
    return Image.fromarray(greys).convert("RGB")


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
