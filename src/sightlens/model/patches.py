"""Which patches of the vision tower an output of the projector merges: the one place that knows."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from jaxtyping import Int

from sightlens.families.family import Grid
from sightlens.layout import Layout

Outputs = Int[np.ndarray, " output"]


def merged_patches(outputs: Outputs, layouts: Sequence[Layout], grid: Grid, *, held: int) -> Int[np.ndarray, "output patch"]:
    """Return the patches of each output, row by row, counted over all crops of a pass; a class token is never among them.

    Args:
        outputs: of the projector, counted over the whole pass.
        layouts: of all rows of the pass.
        grid: of a crop's outputs; 0 × 0 for packed towers, whose views are as large as their pictures.
        held: how many patches and class tokens the tower holds per crop.
    """
    if grid.count:
        crop, cell = np.divmod(outputs, grid.count)
        start = crop * held + held - grid.count * grid.merge**2  # a class token stands before the patches
        columns, merge = np.full_like(cell, grid.columns), grid.merge
    else:
        views = [view for layout in layouts for view in layout.views]
        counts = np.array([view.count for view in views], dtype=np.int64)
        crop = np.searchsorted(counts.cumsum(), outputs, side="right")
        first, merge = (counts.cumsum() - counts)[crop], grid.merge
        cell, start = outputs - first, first * merge**2
        columns = np.array([view.grid[1] for view in views], dtype=np.int64)[crop]
    down, across = np.indices((merge, merge)).reshape(2, -1)
    rows = (cell // columns * merge)[:, None] + down
    return start[:, None] + rows * (columns * merge)[:, None] + (cell % columns * merge)[:, None] + across
