"""A layout drawn on its image, with the sequence below."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from jaxtyping import Float, Int
from matplotlib.axes import Axes
from matplotlib.figure import Figure as Canvas
from matplotlib.patches import Patch, Rectangle

from sightlens.errors import LayoutError
from sightlens.layout import Item, Layout, Padding, Segment, Separator, Special, Text, TokenSet, Visual
from sightlens.render.figure import Plot
from sightlens.render.panels import Panel, Picture, draw_cells, draw_grid, draw_picture, panel_sizes, panels_of
from sightlens.render.style import INK, QUIET, house_style

CHOSEN = "#f000b8"
_COLOURS = {"image": "#56b4e9", "text": "#a6d8b9", "special": "#c9b6e4", "separator": "#ffb000", "padding": "#e4e7ec"}


def draw_layout(image: Picture | Sequence[Picture], layout: Layout, *, tokens: TokenSet | None = None) -> Plot:
    """Draw where each visual token lies in the image and in the sequence.

    Views are drawn once per kind: the global view, and the tiles side by side. Small numbers are the sequence positions of
    a view's first and last token. Hatching marks padding, darkness what a crop left out. The strip below is the sequence;
    its blocks are drawn shorter the longer they are, so that text stays visible beside thousands of visual tokens.

    Args:
        image: the original image, or a list of them.
        layout: of the prompt.
        tokens: positions to tint.

    Raises:
        LayoutError: when the images or the tokens belong to another layout.
    """
    if tokens is not None and tokens.structure != layout.structure:
        raise LayoutError("tokens selected from this layout", f"tokens {tokens.name!r} of another", "Select them from this layout.")
    panels = panels_of(image, layout)
    width, height = panel_sizes(panels)
    with house_style():
        canvas = Canvas(figsize=(max(width, 7.0), height + 2.0))
        parts = canvas.add_gridspec(2, 1, height_ratios=[height + 0.3, 1.7])
        above, below = canvas.add_subfigure(parts[0]), canvas.add_subfigure(parts[1])
        ratios = [panel.aspect for panel in panels]
        grid = above.subplots(1, len(panels), width_ratios=ratios, squeeze=False)
        for axes, panel in zip(grid[0], panels, strict=True):
            _draw_panel(axes, panel, layout=layout, tokens=tokens)
        _draw_sequence(below.subplots(), layout, tokens=tokens)
        title = f"Layout of {layout.length} positions, {int(layout.structure.visual.sum())} visual tokens"
        chosen = "" if tokens is None else f"; {tokens.count} chosen: {tokens.name}"
        canvas.suptitle(title + chosen, x=0.01, ha="left", fontsize=11, fontweight="bold")
    return Plot(canvas, title + chosen)


def _draw_panel(axes: Axes, panel: Panel, *, layout: Layout, tokens: TokenSet | None) -> None:
    draw_picture(axes, panel, grey=False)
    dense = sum(view.count for _, view in panel.views) > 1500
    draw_grid(axes, panel, lines=not dense)
    for index, view in panel.views:
        positions = layout.positions(index)
        if tokens is not None:
            draw_cells(axes, view, chosen=tokens.mask[positions], colour=CHOSEN)
        _number_ends(axes, view.cell_boxes(), positions=positions)
        if view.kind == "tile":
            _stamp(axes, ((view.box[0] + view.box[2]) / 2, (view.box[1] + view.box[3]) / 2), text=view.name, size=9.0)


def _number_ends(axes: Axes, boxes: Float[np.ndarray, "rows columns 4"], *, positions: Int[np.ndarray, "rows columns"]) -> None:
    """Write the sequence position in the first and the last cell of a view."""
    (x0, y0), (x1, y1) = boxes[0, 0, :2], boxes[-1, -1, 2:]
    _stamp(axes, (x0, y0), text=str(positions[0, 0]), size=7.0, align=("left", "top"))
    _stamp(axes, (x1, y1), text=str(positions[-1, -1]), size=7.0, align=("right", "bottom"))


def _stamp(axes: Axes, place: tuple[float, float], *, text: str, size: float, align: tuple[str, str] = ("center", "center")) -> None:
    frame = {"facecolor": "white", "alpha": 0.8, "edgecolor": "none", "pad": 1.0}
    axes.text(*place, text, fontsize=size, color=INK, ha=align[0], va=align[1], bbox=frame, clip_on=True)


def _draw_sequence(axes: Axes, layout: Layout, *, tokens: TokenSet | None) -> None:
    """Draw the segments as blocks in a row, and ticks under the chosen positions."""
    segments = layout.segments
    widths = np.sqrt([segment.stop - segment.start for segment in segments]) + 0.8
    starts, room = np.concatenate([[0.0], np.cumsum(widths)]), axes.figure.figure.get_figwidth()
    for segment, start, width in zip(segments, starts, widths, strict=False):
        kind, name = _described(segment, layout)
        axes.add_patch(Rectangle((start, 0), width, 1, facecolor=_COLOURS[kind], edgecolor="white", linewidth=1))
        _name_block(axes, name, centre=start + width / 2, inches=width / starts[-1] * room)
        if width / starts[-1] > 0.04:
            axes.text(start, -0.12, str(segment.start), ha="left", va="top", fontsize=7.0, color=QUIET)
        if tokens is not None:
            chosen = np.flatnonzero(tokens.mask[segment.start : segment.stop]) + 0.5
            places = start + chosen / (segment.stop - segment.start) * width
            axes.vlines(places, 1.06, 1.3, color=CHOSEN, linewidth=0.8)
    axes.text(starts[-1], -0.12, str(layout.length), ha="right", va="top", fontsize=7.0, color=QUIET)
    axes.set(xlim=(0, starts[-1]), ylim=(-0.7, 1.4))
    axes.axis("off")
    kinds = dict.fromkeys(_described(segment, layout)[0] for segment in segments)
    handles = [Patch(facecolor=_COLOURS[kind], label=kind) for kind in kinds]
    handles += [] if tokens is None else [Patch(facecolor=CHOSEN, label="chosen")]
    axes.legend(handles=handles, loc="upper left", bbox_to_anchor=(0, 0.12), ncols=6, fontsize=8, borderpad=0, handlelength=1)


def _name_block(axes: Axes, name: str, *, centre: float, inches: float) -> None:
    """Write a name on its block, upright where it is narrow, not at all where even that has no room."""
    if inches > 0.075 * len(name) + 0.06:
        axes.text(centre, 0.5, name, ha="center", va="center", fontsize=8)
    elif inches > 0.13:
        axes.text(centre, 0.5, name, ha="center", va="center", fontsize=7.0, rotation=90)


def _described(segment: Segment, layout: Layout) -> tuple[str, str]:
    """Return the kind of a segment and the words on its block."""
    match segment:
        case Padding():
            return "padding", "pad"
        case Special():
            return "special", segment.name
        case Separator():
            return "separator", segment.name
        case Text():
            return "text", segment.role
        case Item():
            return "text", "item"
        case Visual():
            return "image", layout.views[segment.view].name
