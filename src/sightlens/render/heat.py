"""A matrix as a map: layers × heads, layers × tokens, query groups × key groups."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from jaxtyping import Float
from matplotlib.axes import Axes
from matplotlib.axis import Axis, XAxis
from matplotlib.figure import Figure as Canvas
from matplotlib.ticker import MaxNLocator

from sightlens.errors import SightLensError
from sightlens.render.figure import Plot
from sightlens.render.style import Labels, Scale, house_style

LAYERS_AND_HEADS = Labels(x="head", y="layer", colour="value")


def heat_map(
    values: Float[np.ndarray, "rows columns"],
    *,
    labels: Labels = LAYERS_AND_HEADS,
    rows: Sequence[str] | None = None,
    columns: Sequence[str] | None = None,
    scale: Scale | None = None,
) -> Plot:
    """Draw a matrix with row 0 at the bottom for numbered rows, at the top for named ones.

    Numbers are written into the cells of small maps. NaN cells are left white with a cross.

    Args:
        values: such as a score per layer and head.
        labels: the words; `colour` names the unit.
        rows: names of the rows; None numbers them.
        columns: names of the columns; None numbers them.
        scale: colours and their range; None spans the values.

    Raises:
        SightLensError: for an empty matrix or names that do not fit it.
    """
    for names, length, axis in ((rows, values.shape[0], "rows"), (columns, values.shape[1], "columns")):
        if length == 0 or (names is not None and len(names) != length):
            got = f"{'no' if names is None else len(names)} names for {length} {axis}"
            raise SightLensError(f"one or more {axis}, with a name each if any", got, "Name every one, or none.")
    scale = Scale.of(values) if scale is None else scale
    with house_style():
        height, width = (min(high, max(low, 1.2 + 0.26 * n)) for n, low, high in zip(values.shape, (2.4, 4.0), (9.0, 12.0), strict=True))
        canvas = Canvas(figsize=(width + 1.2, height + 0.5))
        axes = canvas.subplots()
        origin = "lower" if rows is None else "upper"
        style = {"cmap": scale.colours, "norm": scale.norm, "interpolation": "nearest", "aspect": "auto"}
        drawn = axes.imshow(np.ma.masked_invalid(values), origin=origin, **style)
        _mark_missing(axes, values)
        _write_numbers(axes, values, scale=scale)
        _name_ticks(axes.yaxis, rows)
        _name_ticks(axes.xaxis, columns)
        axes.set(xlabel=labels.x, ylabel=labels.y)
        axes.set_title(labels.title)
        canvas.colorbar(drawn, ax=axes, pad=0.02).set_label(labels.colour)
    return Plot(canvas, labels.title or f"{labels.colour} per {labels.y} and {labels.x}")


def _mark_missing(axes: Axes, values: Float[np.ndarray, "rows columns"]) -> None:
    rows, columns = np.nonzero(~np.isfinite(values))
    axes.plot(columns, rows, linestyle="", marker="x", color="#98a2b3", markersize=4)


def _write_numbers(axes: Axes, values: Float[np.ndarray, "rows columns"], *, scale: Scale) -> None:
    """Write the values into the cells where there is room, all with the decimals that the scale's ends call for."""
    if values.size > 100 or max(values.shape) > 16:
        return
    decimals = max(0, 1 - math.floor(math.log10(max(abs(scale.low), abs(scale.high)) or 1)))
    for (row, column), value in np.ndenumerate(values):
        if np.isfinite(value):
            axes.text(
                column,
                row,
                f"{round(value, decimals) + 0.0:.{decimals}f}",
                ha="center",
                va="center",
                fontsize=8,
                color=scale.css(float(value))[1],
            )


def _name_ticks(axis: Axis, names: Sequence[str] | None) -> None:
    if names is None:
        axis.set_major_locator(MaxNLocator(integer=True, nbins=12))
        return
    step = max(1, len(names) // 40)
    axis.set_ticks(range(0, len(names), step), list(names)[::step])
    if isinstance(axis, XAxis) and sum(map(len, names)) > 60:
        axis.set_tick_params(rotation=60)
