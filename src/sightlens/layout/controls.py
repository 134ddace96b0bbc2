"""Control sets: as many tokens drawn at random, or the same shape somewhere else."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from jaxtyping import Int

from sightlens._types import PositionMask
from sightlens.errors import SelectorError
from sightlens.layout.sheets import Sheet

Cells = Int[np.ndarray, "_token 2"]
Shift = tuple[int, int]


def draw_positions(pool: PositionMask, count: int, *, seed: int) -> PositionMask:
    """Return ``count`` positions of the pool, uniformly and without replacement.

    Source: Schaumlöffel et al. 2026 (arXiv 2605.19792), random control.

    Raises:
        SelectorError: the pool is smaller than ``count``.
    """
    candidates = np.flatnonzero(pool)
    if not 0 <= count <= len(candidates):
        raise SelectorError(f"at most {len(candidates)} tokens, the size of the pool", str(count), "Draw fewer, or widen the pool.")
    chosen = np.zeros(len(pool), dtype=bool)
    chosen[np.random.default_rng(seed).choice(candidates, size=count, replace=False)] = True
    return chosen


def move_shape(sheets: Sequence[Sheet], shape: PositionMask, *, pool: PositionMask, seed: int) -> PositionMask | None:
    """Return the shape moved to a place in the pool that it does not touch now, or None when no place fits.

    Each image moves by one displacement, drawn uniformly from those that fit: whole cells on the sheet with the largest
    cells, and on the image's other sheets the nearest number of whole cells. So every view shows the same move, and
    each sheet keeps its number of tokens.
    """
    rng = np.random.default_rng(seed)
    moved = np.zeros_like(shape)
    for image in sorted({sheet.image for sheet in sheets}):
        used = [sheet for sheet in sheets if sheet.image == image and shape[sheet.positions].any()]
        if used and not _move_image(used, shape, pool & ~shape, rng, moved):
            return None
    return moved


def _move_image(sheets: Sequence[Sheet], shape: PositionMask, free: PositionMask, rng: np.random.Generator, moved: PositionMask) -> bool:
    coarse = max(sheets, key=lambda sheet: sheet.cell_size[0] * sheet.cell_size[1])
    cells = [np.argwhere(shape[sheet.positions]) for sheet in sheets]
    for shift in rng.permutation(_shifts(coarse, np.argwhere(shape[coarse.positions]))):
        targets = [_targets(s, c, _scaled(shift, coarse, s)) for s, c in zip(sheets, cells, strict=True)]
        if all(target is not None and free[target].all() for target in targets):
            moved[np.concatenate([target for target in targets if target is not None])] = True
            return True
    return False


def _shifts(sheet: Sheet, cells: Cells) -> Cells:
    low, high = -cells.min(axis=0), np.array(sheet.positions.shape) - cells.max(axis=0)
    rows, columns = (np.arange(a, b) for a, b in zip(low, high, strict=True))
    return np.stack(np.meshgrid(rows, columns, indexing="ij"), axis=-1).reshape(-1, 2)


def _scaled(shift: np.ndarray, coarse: Sheet, sheet: Sheet) -> np.ndarray:
    return np.round(shift * np.array(coarse.cell_size) / np.array(sheet.cell_size)).astype(np.int64)


def _targets(sheet: Sheet, cells: Cells, shift: np.ndarray) -> np.ndarray | None:
    places = cells + shift
    if (places < 0).any() or (places >= sheet.positions.shape).any():
        return None
    return sheet.positions[places[:, 0], places[:, 1]]
