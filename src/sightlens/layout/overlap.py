"""Which visual tokens an object mask touches."""

from __future__ import annotations

import numpy as np

from sightlens._types import BoolGrid, PixelMask, PositionMask
from sightlens.errors import MaskError
from sightlens.layout.structure import Structure
from sightlens.layout.views import View


def touched_positions(structure: Structure, mask: np.ndarray, *, image: int = 0, min_overlap: int = 1) -> PositionMask:
    """Return which positions are visual tokens whose cell meets at least ``min_overlap`` pixels of the mask.

    A pixel counts when its unit square and the cell share a positive area. The count is exact (a summed-area table read
    between the outward-rounded cell edges), so a cell smaller than a pixel still sees the pixel that it lies in.

    Source: Schaumlöffel et al. 2026 (arXiv 2605.19792), object tokens: a cell with at least one object pixel.

    Raises:
        MaskError: the mask is not bool, has not the size of the image, or is all False.
    """
    _check(structure, mask, image, min_overlap)
    chosen = np.zeros(structure.length, dtype=bool)
    for view, positions in zip(structure.views, structure.grid_positions, strict=True):
        if view.image == image:
            chosen[positions[_pixel_counts(view, mask) >= min_overlap]] = True
    return chosen


def _pixel_counts(view: View, mask: PixelMask) -> np.ndarray:
    area = np.pad(mask.astype(np.int64), ((1, 0), (1, 0))).cumsum(axis=0).cumsum(axis=1)
    (top, bottom), (left, right) = (
        (_pixels(np.floor(edges[:-1]), size), _pixels(np.ceil(edges[1:]), size))
        for edges, size in zip(view.edges(), mask.shape, strict=True)
    )
    return area[np.ix_(bottom, right)] - area[np.ix_(top, right)] - area[np.ix_(bottom, left)] + area[np.ix_(top, left)]


def _pixels(edges: np.ndarray, size: int) -> np.ndarray:
    return np.clip(edges, 0, size).astype(np.int64)


def inside_image(structure: Structure) -> PositionMask:
    """Return which positions are visual tokens whose cell shares a positive area with the original image."""
    inside = np.zeros(structure.length, dtype=bool)
    for view, positions in zip(structure.views, structure.grid_positions, strict=True):
        inside[positions[_overlaps(view, structure.image_sizes[view.image])]] = True
    return inside


def _overlaps(view: View, size: tuple[int, int]) -> BoolGrid:
    y, x = view.edges()
    height, width = size
    return np.logical_and.outer((y[1:] > 0) & (y[:-1] < height), (x[1:] > 0) & (x[:-1] < width))


def _check(structure: Structure, mask: np.ndarray, image: int, min_overlap: int) -> None:
    sizes = structure.image_sizes
    if not 0 <= image < len(sizes):
        raise MaskError(f"the index of one of {len(sizes)} images", f"image={image}", "Count the images of the prompt from 0.")
    if not isinstance(mask, np.ndarray) or mask.dtype != np.bool_:
        kind = f"an array of {mask.dtype}" if isinstance(mask, np.ndarray) else type(mask).__name__
        raise MaskError("a numpy array of bool", kind, "Convert it, for instance with `np.asarray(mask) > 0`.")
    if mask.shape != sizes[image]:
        raise MaskError(
            f"a mask of the original image's size (height, width) = {sizes[image]}",
            f"the shape {mask.shape}",
            "Draw the mask on the original image, before any resizing, and check that height comes first.",
        )
    if not mask.any():
        raise MaskError("a mask with at least one object pixel", "a mask that is all False", "Leave this image out.")
    if min_overlap < 1:
        raise MaskError("min_overlap of at least one pixel", str(min_overlap), "Use 1 for any overlap.")
