"""Numbers per visual token, drawn as heat on the image."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from jaxtyping import Float, Int
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.figure import Figure as Canvas

from sightlens.errors import LayoutError
from sightlens.layout import Layout
from sightlens.render.figure import Plot
from sightlens.render.panels import Panel, Picture, draw_grid, draw_picture, panel_sizes, panels_of
from sightlens.render.style import Labels, Scale, house_style

PER_TOKEN = Labels(title="Value per visual token", colour="value")

_VEIL = 0.72
"""How opaque the colours are, on the image as on the colour bar."""


def draw_values(
    image: Picture | Sequence[Picture],
    layout: Layout,
    *,
    values: Float[np.ndarray, " token"] | Int[np.ndarray, " token"],
    labels: Labels = PER_TOKEN,
    scale: Scale | None = None,
) -> Plot:
    """Draw one number per visual token over the image, a panel per kind of view.

    The image is shown in grey so that colour means value alone. With negative numbers the scale is blue to red around
    0. NaN leaves the image bare.

    Args:
        image: the original image, or a list of them.
        layout: of the prompt.
        values: one per visual token in order of the sequence, or one per position (those elsewhere are not drawn).
        labels: title, and what the colour means with its unit.
        scale: colours and their range; None spans the values. Give the same one to pictures to be compared.

    Raises:
        LayoutError: when the images or the number of values do not fit the layout.
    """
    panels, grids = panels_of(image, layout), view_values(layout, np.asarray(values, dtype=np.float64))
    scale = Scale.of(np.concatenate([grid.ravel() for grid in grids])) if scale is None else scale
    width, height = panel_sizes(panels)
    with house_style():
        canvas = Canvas(figsize=(width + 1.0, height + 0.8))
        axes = canvas.subplots(1, len(panels), width_ratios=[panel.aspect for panel in panels], squeeze=False)[0]
        for place, panel in zip(axes, panels, strict=True):
            _draw_heat(place, panel, grids=grids, scale=scale)
        bar = canvas.colorbar(ScalarMappable(scale.norm, scale.colours), ax=list(axes), shrink=0.85, pad=0.02, alpha=_VEIL)
        bar.set_label(labels.colour)
        canvas.suptitle(labels.title, x=0.01, ha="left", fontsize=11, fontweight="bold")
    return Plot(canvas, labels.title)


def view_values(layout: Layout, values: Float[np.ndarray, "*lead token"]) -> list[np.ndarray]:
    """Return the values as one grid [*lead, rows, columns] per view.

    Raises:
        LayoutError: when there is neither one value per visual token nor one per position.
    """
    visual = np.asarray(layout.structure.visual)
    count = int(visual.sum())
    if values.shape[-1] not in (count, layout.length):
        got, do = f"{values.shape[-1]}", "Give the values of this prompt's own positions."
        raise LayoutError(f"{count} values (visual tokens) or {layout.length} (positions)", got, do)
    rank = np.cumsum(visual) - 1 if values.shape[-1] == count else np.arange(layout.length)
    return [values[..., rank[layout.positions(index)]] for index in range(len(layout.views))]


def _draw_heat(axes: Axes, panel: Panel, *, grids: list[np.ndarray], scale: Scale) -> None:
    draw_picture(axes, panel, grey=True)
    limits = axes.get_xlim(), axes.get_ylim()
    for index, view in panel.views:
        x0, y0, x1, y1 = view.box
        heat = np.ma.masked_invalid(grids[index])
        style = {"cmap": scale.colours, "norm": scale.norm, "alpha": _VEIL, "interpolation": "nearest"}
        axes.imshow(heat, extent=(x0, x1, y1, y0), **style)
    axes.set(xlim=limits[0], ylim=limits[1])
    draw_grid(axes, panel, lines=False)
