"""A view: one rectangle of an image that the vision tower encodes at once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from jaxtyping import Float

from sightlens._types import Box
from sightlens.errors import LayoutError

ViewKind = Literal["global", "tile"]
Edge = float | int
Edges = Float[np.ndarray, " _edges"]
CellBoxes = Float[np.ndarray, "_rows _columns 4"]

SNAP = 1e-6
"""Cell edges nearer than this (in pixels) to a whole pixel lie on it: tile sizes such as 640/3 are not exact floats."""


@dataclass(frozen=True)
class View:
    """One rectangle of an original image, divided into a grid of equal cells with one visual token each.

    ``box`` is the rectangle of original-image pixels that the encoded canvas covers. It reaches beyond the image where
    the processor padded (LLaVA's square: ``(-left, -top, width + right, height + bottom)``), and is smaller than the
    image where it cropped or tiled. An image that is encoded once has the kind ``global``, even if no tile exists.
    """

    kind: ViewKind
    image: int
    grid: tuple[int, int]
    """(rows, columns) of visual tokens."""
    box: tuple[Edge, Edge, Edge, Edge]
    """(x0, y0, x1, y1) in pixels of the original image, ends exclusive; kept as floats."""
    tile: tuple[int, int] | None = None
    """(row, column) of a tile among the tiles of its image; None for a global view."""
    merge: int = 1
    """Patches per side that one visual token merges."""

    def __post_init__(self) -> None:
        """Check that the fields agree, and keep the box as floats.

        Raises:
            LayoutError: a global view with a tile index or a tile without one, an empty grid, or an empty box.
        """
        object.__setattr__(self, "box", tuple(float(edge) for edge in self.box))
        if self.kind not in ("global", "tile") or (self.kind == "tile") != (self.tile is not None):
            raise LayoutError(
                "kind 'global' without, or kind 'tile' with, a tile index",
                f"kind {self.kind!r}, tile {self.tile}",
                "Give `tile=(row, column)` to tiles only.",
            )
        if min(*self.grid, self.merge, 1 + self.image) < 1:
            raise LayoutError("at least one row, column and patch", str(self), "Derive the grid from the processor's output.")
        if self.box[0] >= self.box[2] or self.box[1] >= self.box[3]:
            raise LayoutError("a box (x0, y0, x1, y1) of positive area", str(self.box), "Give x before y, and exclusive ends.")

    @property
    def name(self) -> str:
        """The selector that names this view among the views of its image: ``global`` or ``tile[row,column]``."""
        return "global" if self.tile is None else f"tile[{self.tile[0]},{self.tile[1]}]"

    @property
    def count(self) -> int:
        """The number of visual tokens."""
        return self.grid[0] * self.grid[1]

    @property
    def patches(self) -> int:
        """The number of patches that one visual token merges."""
        return self.merge**2

    @property
    def cell_size(self) -> tuple[float, float]:
        """(height, width) of a cell in pixels of the original image."""
        x0, y0, x1, y1 = self.box
        return (y1 - y0) / self.grid[0], (x1 - x0) / self.grid[1]

    def edges(self) -> tuple[Edges, Edges]:
        """Return the cells' ``(y, x)`` edges in original pixels, ``rows + 1`` and ``columns + 1`` of them."""
        x0, y0, x1, y1 = self.box
        return _edges(y0, y1, self.grid[0]), _edges(x0, x1, self.grid[1])

    def cell_boxes(self) -> CellBoxes:
        """Return the ``(x0, y0, x1, y1)`` box of every cell in original pixels."""
        y, x = self.edges()
        top, left = np.meshgrid(y[:-1], x[:-1], indexing="ij")
        bottom, right = np.meshgrid(y[1:], x[1:], indexing="ij")
        return np.stack([left, top, right, bottom], axis=-1)

    def cell_box(self, row: int, column: int) -> Box:
        """Return the box of one cell in original pixels.

        Raises:
            LayoutError: the grid has no such cell.
        """
        if not (0 <= row < self.grid[0] and 0 <= column < self.grid[1]):
            raise LayoutError(f"a cell inside the grid {self.grid}", f"({row}, {column})", "Count rows and columns from 0.")
        x0, y0, x1, y1 = self.cell_boxes()[row, column].tolist()
        return x0, y0, x1, y1


def _edges(start: float, stop: float, cells: int) -> Edges:
    edges = start + (stop - start) * np.arange(cells + 1) / cells
    whole = np.round(edges)
    return np.where(np.abs(edges - whole) < SNAP, whole, edges)
