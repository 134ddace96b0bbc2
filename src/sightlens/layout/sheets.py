"""Sheets: the planes of neighbouring visual tokens, on which shapes grow, shrink and move."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Int

from sightlens.errors import LayoutError
from sightlens.layout.views import CellBoxes, View, ViewKind

PositionGrid = Int[np.ndarray, "_rows _columns"]


@dataclass(frozen=True, eq=False)
class Sheet:
    """The cells of one global view, or of all tiles of one image stitched side by side."""

    kind: ViewKind
    image: int
    positions: PositionGrid
    """The sequence position of each cell."""
    boxes: CellBoxes
    """The box of each cell in pixels of the original image."""

    @property
    def cell_size(self) -> tuple[float, float]:
        """(height, width) of a cell in original pixels, averaged over the sheet."""
        rows, columns = self.positions.shape
        (x0, y0), (x1, y1) = self.boxes[0, 0, :2], self.boxes[-1, -1, 2:]
        return float(y1 - y0) / rows, float(x1 - x0) / columns


def stitch(views: Sequence[View], grids: Sequence[PositionGrid]) -> tuple[Sheet, ...]:
    """Return the sheets of all images, in the order in which their first view comes in ``views``.

    Raises:
        LayoutError: the tiles of an image do not form a complete rectangle of fitting grids.
    """
    groups: dict[tuple[int, int], list[int]] = {}
    for index, view in enumerate(views):
        key = (view.image, -1 if view.kind == "tile" else index)
        groups.setdefault(key, []).append(index)
    return tuple(_sheet([views[i] for i in members], [grids[i] for i in members]) for members in groups.values())


def _sheet(views: Sequence[View], grids: Sequence[PositionGrid]) -> Sheet:
    boxes = [view.cell_boxes() for view in views]
    if views[0].kind == "tile":
        grids, boxes = [_stitched(views, grids)], [_stitched(views, boxes)]
    return Sheet(views[0].kind, views[0].image, grids[0], boxes[0])


def _stitched(views: Sequence[View], arrays: Sequence[np.ndarray]) -> np.ndarray:
    by_tile = {view.tile: array for view, array in zip(views, arrays, strict=True) if view.tile is not None}
    rows, columns = 1 + max(row for row, _ in by_tile), 1 + max(column for _, column in by_tile)
    complete = len(views) == rows * columns == len(by_tile)
    if not complete or any(
        array.shape[:2] != (by_tile[row, 0].shape[0], by_tile[0, column].shape[1]) for (row, column), array in by_tile.items()
    ):
        raise LayoutError(
            f"{rows} × {columns} different tiles whose grids fit side by side",
            ", ".join(f"{view.name} {view.grid}" for view in views),
            "Give each tile of the image once; tiles in one row need equally many rows, in one column columns.",
        )
    return np.concatenate([np.concatenate([by_tile[r, c] for c in range(columns)], axis=1) for r in range(rows)], axis=0)
