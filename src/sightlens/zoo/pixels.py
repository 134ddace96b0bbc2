"""Pictures to model inputs, equal to what the Hugging Face image processors make and fast enough to train on."""

from dataclasses import dataclass

import numpy as np
import torch
from einops import rearrange
from jaxtyping import Float, UInt8
from PIL import Image
from torch import Tensor
from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import get_optimal_tiled_canvas
from transformers.utils.constants import OPENAI_CLIP_MEAN, OPENAI_CLIP_STD

PAD_COLOUR = tuple(int(mean * 255) for mean in OPENAI_CLIP_MEAN)
Window = tuple[float, float, float, float]


@dataclass(frozen=True, eq=False)
class Views:
    """The views of one picture, [views, height, width, 3], and the part of the picture each shows.

    A window is (x0, y0, x1, y1) in pixels of the picture; it may reach outside it, where padding was added. `frame` is the
    rectangle that answers measure boxes in.
    """

    pixels: UInt8[np.ndarray, "views height width 3"]
    windows: tuple[Window, ...]
    frame: Window


def padded(image: Image.Image, side: int) -> Views:
    """LLaVA: pad to a square with the mean colour, then resize; boxes are measured in the padded square."""
    width, height = image.size
    long = max(width, height)
    left, top = (long - width) // 2, (long - height) // 2
    square = Image.new("RGB", (long, long), PAD_COLOUR)
    square.paste(image, (left, top))
    window = (-left, -top, long - left, long - top)
    return Views(np.asarray(_resized(square, side, side))[None], (window,), window)


def tiled(image: Image.Image, side: int, *, most: int) -> Views:
    """InternVL: squash to a grid of at most `most` tiles, row-major, then the whole picture as a thumbnail if tiled."""
    width, height = image.size
    columns, rows = get_optimal_tiled_canvas((height, width), (side, side), 1, most)
    canvas = np.asarray(_resized(image, columns * side, rows * side))
    tiles = [canvas[r * side : (r + 1) * side, c * side : (c + 1) * side] for r in range(rows) for c in range(columns)]
    across, down = width / columns, height / rows
    windows = [(c * across, r * down, (c + 1) * across, (r + 1) * down) for r in range(rows) for c in range(columns)]
    frame = (0.0, 0.0, float(width), float(height))
    if len(tiles) > 1:
        tiles.append(np.asarray(_resized(image, side, side)))
        windows.append(frame)
    return Views(np.stack(tiles), tuple(windows), frame)


def normalize(pixels: UInt8[np.ndarray, "views height width 3"]) -> Float[Tensor, "views 3 height width"]:
    """Bytes to the zero-mean values the vision towers read."""
    values = rearrange(torch.tensor(pixels), "view height width channel -> view channel height width").float() / 255
    mean, std = torch.tensor(OPENAI_CLIP_MEAN), torch.tensor(OPENAI_CLIP_STD)
    return (values - mean[:, None, None]) / std[:, None, None]


def _resized(image: Image.Image, width: int, height: int) -> Image.Image:
    if image.size == (width, height):
        return image
    return image.resize((width, height), Image.Resampling.BICUBIC)
