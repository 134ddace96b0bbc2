"""Geometry of boxes: overlap, growth and size."""

from __future__ import annotations

import math
from typing import Literal

import numpy as np
from jaxtyping import Float

from sightlens._types import Box
from sightlens.errors import MetricError

SizeBin = Literal["small", "medium", "large"]


def iou(a: Box | None, b: Box | None) -> float:
    """Return the intersection over union of two boxes.

    Args:
        a: ``(x0, y0, x1, y1)`` in any unit, or None for an answer that held no box.
        b: the other box, in the same unit.

    Returns:
        A number in 0..1; 0 when a box is missing, empty, inverted or not finite (P5, arXiv:2605.19792, metrics).

    >>> iou((0.0, 0.0, 2.0, 2.0), (1.0, 0.0, 3.0, 2.0))
    0.3333333333333333
    """
    if a is None or b is None:
        return 0.0
    return float(box_ious(np.asarray(a, dtype=np.float64), np.asarray(b, dtype=np.float64)))


def box_ious(a: Float[np.ndarray, "*a 4"], b: Float[np.ndarray, "*b 4"]) -> Float[np.ndarray, "*both"]:
    """Return the intersection over union of boxes, broadcast over every axis but the last.

    Pass ``a[:, None]`` and ``b[None]`` for all pairs. Empty, inverted and non-finite boxes give 0.
    """
    usable = _area(a) * _area(b) > 0
    a, b = np.nan_to_num(a, posinf=0.0, neginf=0.0), np.nan_to_num(b, posinf=0.0, neginf=0.0)
    sides = np.minimum(a[..., 2:], b[..., 2:]) - np.maximum(a[..., :2], b[..., :2])
    shared = np.prod(np.clip(sides, 0.0, None), axis=-1)
    union = _area(a) + _area(b) - shared
    return np.where(usable, shared / np.where(usable, union, 1.0), 0.0)


def _area(boxes: Float[np.ndarray, "*n 4"]) -> Float[np.ndarray, "*n"]:
    """Return areas, 0 for boxes that are empty, inverted or not finite."""
    boxes = np.where(np.isfinite(boxes).all(axis=-1, keepdims=True), boxes, 0.0)
    return np.asarray(np.prod(np.clip(boxes[..., 2:] - boxes[..., :2], 0.0, None), axis=-1))


def is_box(box: Box) -> bool:
    """Say whether a box is finite and has an area."""
    return all(math.isfinite(value) for value in box) and box[2] > box[0] and box[3] > box[1]


def expand_box(box: Box, *, cells: int, cell_size: tuple[float, float], image_size: tuple[int, int]) -> Box:
    """Grow a box by whole token cells on each side, clipped to the image.

    This is the "ground truth +p" of the containerization experiment (P5, arXiv:2605.19792, containerization). The
    paper leaves the unit open for models with several views; the caller chooses it through `cell_size`.

    Args:
        box: pixels of the original image.
        cells: how many cells to add per side, 0 or more.
        cell_size: ``(height, width)`` of one cell in pixels of the original image.
        image_size: ``(height, width)`` of the original image.

    Raises:
        MetricError: for a negative number of cells.

    >>> expand_box((10.0, 10.0, 20.0, 20.0), cells=1, cell_size=(4.0, 8.0), image_size=(100, 24))
    (2.0, 6.0, 24.0, 24.0)
    """
    if cells < 0:
        raise MetricError("cells >= 0", f"cells={cells}", "Only growth is defined; build a smaller box yourself.")
    (cell_height, cell_width), (height, width) = cell_size, image_size
    dx, dy = cells * cell_width, cells * cell_height
    x0, y0, x1, y1 = map(float, box)
    return max(0.0, x0 - dx), max(0.0, y0 - dy), min(float(width), x1 + dx), min(float(height), y1 + dy)


def size_bin(box: Box) -> SizeBin:
    """Return COCO's size class of a box by its area in original pixels: below 32², below 96², or larger.

    P5 (arXiv:2605.19792, global and local views) reports its effects by these classes.
    """
    area = float(_area(np.asarray(box, dtype=np.float64)))
    if area < 32**2:
        return "small"
    return "medium" if area < 96**2 else "large"
