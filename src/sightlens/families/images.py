"""Opening whatever a user calls an image, as the RGB picture that a person would see."""

from __future__ import annotations

import struct
import zlib
from io import BytesIO
from pathlib import Path

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError

from sightlens.errors import ImageError

ImageLike = Image.Image | np.ndarray | str | Path | bytes
"""A PIL image; an array ``[height, width]`` or ``[height, width, 1|3|4]`` of uint8, uint16 or floats in 0–1; a path; encoded bytes."""

MAX_PIXELS = 200_000_000


BROKEN = (OSError, SyntaxError, ValueError, EOFError, IndexError, KeyError, TypeError, OverflowError, struct.error, zlib.error)
"""What Pillow raises on damaged files, depending on the format."""


def open_image(source: ImageLike) -> Image.Image:
    """Open an image as RGB, upright (EXIF orientation applied), transparent parts on white, 16 bit scaled to 8.

    Args:
        source: a PIL image, array, path or encoded bytes.

    Raises:
        ImageError: when the file is missing, corrupt or truncated, or the array's shape, type or range has no meaning as an image.
    """
    if isinstance(source, np.ndarray):
        return _from_array(source)
    if not isinstance(source, (Image.Image, str, Path, bytes)):
        raise ImageError(
            "an image: a PIL image, a numpy array, a path or encoded bytes", type(source).__name__, "Convert it, a tensor with .numpy()."
        )
    image = source if isinstance(source, Image.Image) else _decode(source)
    _check_size(image.height, image.width)
    try:
        image.load()
        upright = ImageOps.exif_transpose(image)
    except BROKEN as problem:
        raise ImageError("a complete image", f"one that fails to decode: {problem}", "Save the image again.") from problem
    return _to_rgb(upright)


def _check_size(height: int, width: int) -> None:
    if height < 1 or width < 1:
        raise ImageError("an image of at least one pixel", f"{width}×{height}", "Check where it was cut.")
    if height * width > MAX_PIXELS:
        raise ImageError(f"at most {MAX_PIXELS:,} pixels", f"{width}×{height}", "Scale the image down first.")


def _decode(source: str | Path | bytes) -> Image.Image:
    name = f"{len(source)} bytes" if isinstance(source, bytes) else repr(str(source))
    try:
        return Image.open(BytesIO(source if isinstance(source, bytes) else Path(source).read_bytes()))
    except FileNotFoundError as problem:
        raise ImageError("the path of an image", f"{name}, which does not exist", "Check the path.") from problem
    except Image.DecompressionBombError as problem:
        raise ImageError(f"at most {MAX_PIXELS:,} pixels", f"{name}: {problem}", "Scale the image down first.") from problem
    except (UnidentifiedImageError, *BROKEN) as problem:
        raise ImageError("an image file that Pillow can read", f"{name}: {problem}", "Convert it to PNG or JPEG.") from problem


def _to_rgb(image: Image.Image) -> Image.Image:
    if image.mode.startswith("I;16"):
        return _from_array(np.asarray(image).astype(np.uint16))
    if image.mode == "I":
        return _from_array(np.asarray(image).astype(np.int64))
    if image.mode == "F":
        return _from_array(np.asarray(image, dtype=np.float64))
    try:
        if image.mode in ("RGBA", "LA", "PA", "RGBa", "La") or "transparency" in image.info:
            layer = (image.convert("LA") if image.mode == "La" else image).convert("RGBA")
            return Image.alpha_composite(Image.new("RGBA", layer.size, "white"), layer).convert("RGB")
        return image.convert("RGB")
    except ValueError as problem:
        raise ImageError("a mode that converts to RGB", f"{image.mode}: {problem}", "Convert the image to RGB first.") from problem


def _from_array(array: np.ndarray) -> Image.Image:
    shape = array.shape
    if array.ndim not in (2, 3) or 0 in shape or (array.ndim == 3 and shape[2] not in (1, 3, 4)):
        raise ImageError("an array [height, width] or [height, width, 1|3|4]", f"shape {list(shape)}", "Move the channels last.")
    _check_size(shape[0], shape[1])
    pixels = _to_bytes(array)
    return _to_rgb(Image.fromarray(pixels[..., 0] if pixels.ndim == 3 and shape[2] == 1 else pixels))


def _to_bytes(array: np.ndarray) -> np.ndarray:
    if array.dtype == np.uint8:
        return np.ascontiguousarray(array)
    if array.dtype == bool:
        return array.astype(np.uint8) * 255
    if not np.issubdtype(array.dtype, np.number) or np.iscomplexobj(array) or not np.isfinite(array).all():
        raise ImageError("finite real numbers", f"dtype {array.dtype} with NaN, infinity or non-numbers", "Clean the array first.")
    low, high = array.min(), array.max()
    if np.issubdtype(array.dtype, np.floating):
        if low < 0 or high > 1:
            raise ImageError("floats between 0 and 1", f"values between {low:g} and {high:g}", "Divide by the largest possible value.")
        return np.rint(array * 255).astype(np.uint8)
    if low < 0 or high > 65535:
        raise ImageError("integers of 8 or 16 bits", f"values between {low} and {high}", "Scale them to 0–255.")
    sixteen = array.dtype.kind == "u" and array.dtype.itemsize == 2  # of either byte order
    return (array // 257).astype(np.uint8) if sixteen or high > 255 else array.astype(np.uint8)
