"""Grow and shrink shapes on a grid of cells, with plain array shifts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, get_args

import numpy as np

from sightlens._types import BoolGrid
from sightlens.errors import SelectorError

Connectivity = Literal[4, 8]
Border = Literal["object", "background"]


def dilate_grid(shape: BoolGrid, steps: int, connectivity: Connectivity = 8) -> BoolGrid:
    """Return the shape grown ``steps`` times by its 4 or 8 neighbours; what lies outside the grid adds nothing."""
    _check("connectivity", connectivity, get_args(Connectivity))
    return _repeated(lambda grid: _spread(grid, connectivity, outside=False), shape, steps)


def erode_grid(shape: BoolGrid, steps: int, connectivity: Connectivity = 8, border: Border = "object") -> BoolGrid:
    """Return the shape shrunk ``steps`` times; ``border`` says what the cells outside the grid count as.

    With ``object`` a shape that touches the grid's edge stays there, and growing followed by shrinking never loses a
    cell.
    """
    _check("connectivity", connectivity, get_args(Connectivity))
    _check("border", border, get_args(Border))
    return _repeated(lambda grid: ~_spread(~grid, connectivity, outside=border == "background"), shape, steps)


def _repeated(step: Callable[[BoolGrid], BoolGrid], shape: BoolGrid, steps: int) -> BoolGrid:
    """Apply a step so many times, or until it changes nothing, which a grid reaches within its own length."""
    for _ in range(steps):
        before, shape = shape, step(shape)
        if np.array_equal(before, shape):
            break
    return shape


def _spread(shape: BoolGrid, connectivity: Connectivity, *, outside: bool) -> BoolGrid:
    padded = np.pad(shape, 1, constant_values=outside)
    beside = padded[:, :-2] | padded[:, 1:-1] | padded[:, 2:]
    if connectivity == 8:
        return beside[:-2] | beside[1:-1] | beside[2:]
    return beside[1:-1] | padded[:-2, 1:-1] | padded[2:, 1:-1]


def _check(what: str, value: object, allowed: tuple[object, ...]) -> None:
    if value not in allowed:
        raise SelectorError(f"{what} {' or '.join(map(repr, allowed))}", repr(value), f"Choose one {what}.")
