"""Images with the views of a layout on them; the ground every image picture is drawn on."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Bool, Float
from matplotlib.axes import Axes
from matplotlib.patches import Rectangle
from PIL import Image

from sightlens._types import Box, PILImage
from sightlens.errors import LayoutError
from sightlens.layout import Layout, View
from sightlens.render.style import INK, QUIET

Picture = PILImage | np.ndarray
TILE_EDGE = "#ffb000"
_LINE: dict[str, Any] = {"colors": "white", "linewidth": 0.5, "alpha": 0.75}
_HALO: dict[str, Any] = {"colors": INK, "linewidth": 1.1, "alpha": 0.35}
"""Under the lines between cells, so that they are seen on white too."""


@dataclasses.dataclass(frozen=True)
class Panel:
    """One image with either its global view or all its tiles.

    Attributes:
        picture: the original image.
        views: (index in the layout, view) of each view shown.
        name: what the panel shows.
    """

    picture: PILImage
    views: tuple[tuple[int, View], ...]
    name: str

    @property
    def extent(self) -> Box:
        """The rectangle that holds the image and its views, in pixels of the original image."""
        boxes = np.array([(0, 0, *self.picture.size), *(view.box for _, view in self.views)], dtype=float)
        low, high = boxes[:, :2].min(axis=0), boxes[:, 2:].max(axis=0)
        return float(low[0]), float(low[1]), float(high[0]), float(high[1])

    @property
    def aspect(self) -> float:
        """Width divided by height."""
        x0, y0, x1, y1 = self.extent
        return (x1 - x0) / (y1 - y0)


def panels_of(image: Picture | Sequence[Picture], layout: Layout) -> list[Panel]:
    """Return a panel per image and kind of view, in the order of the sequence.

    Raises:
        LayoutError: when the images are not those of the layout, by number or size.
    """
    given: Sequence[Picture] = [image] if isinstance(image, Image.Image | np.ndarray) else image
    pictures = [_rgb(picture) for picture in given]
    sizes = [(picture.height, picture.width) for picture in pictures]
    if tuple(sizes) != tuple(map(tuple, layout.image_sizes)):
        do = "Give the original images that the prompt was prepared from."
        raise LayoutError(f"images of height and width {list(layout.image_sizes)}", f"{sizes}", do)
    groups: dict[tuple[int, str], list[tuple[int, View]]] = {}
    for index, view in enumerate(layout.views):
        groups.setdefault((view.image, view.kind), []).append((index, view))
    prefix = "image {} " if len(pictures) > 1 else ""
    return [
        Panel(pictures[number], tuple(views), prefix.format(number) + ("global" if kind == "global" else "tiles"))
        for (number, kind), views in groups.items()
    ]


def _rgb(picture: Picture) -> PILImage:
    return (Image.fromarray(picture) if isinstance(picture, np.ndarray) else picture).convert("RGB")


def panel_sizes(panels: Sequence[Panel], *, width: float = 10.0, height: float = 4.6) -> tuple[float, float]:
    """Return the width and height in inches at which panels side by side are no larger than asked."""
    total = sum(panel.aspect for panel in panels)
    tall = min(height, width / total)
    return max(tall * total, 3.2), tall


def draw_picture(axes: Axes, panel: Panel, *, grey: bool) -> None:
    """Show the panel's image, what padding adds to it (hatched) and what a crop leaves out (dark)."""
    x0, y0, x1, y1 = panel.extent
    width, height = panel.picture.size
    axes.add_patch(Rectangle((x0, y0), x1 - x0, y1 - y0, facecolor="#eef0f3", edgecolor="#c4cad4", hatch="////", linewidth=0, zorder=-1))
    picture = np.asarray(panel.picture, dtype=np.float64) / 255
    if grey:
        picture = 0.3 + 0.7 * np.repeat(picture.mean(axis=2, keepdims=True), 3, axis=2)
    axes.imshow(_thinned(picture), extent=(0, width, height, 0), interpolation="auto")
    if len(panel.views) == 1:
        _darken_outside(axes, panel)
    axes.set(xlim=(x0, x1), ylim=(y1, y0), xticks=[], yticks=[])
    axes.set_aspect("equal")
    for spine in axes.spines.values():
        spine.set_visible(False)
    axes.set_title(panel.name, fontsize=10)


def _thinned(picture: Float[np.ndarray, "height width 3"]) -> Float[np.ndarray, "rows columns 3"]:
    """Keep a large photograph from dominating the file: no more than about 900 pixels a side are shown anyway."""
    step = max(1, math.ceil(max(picture.shape[:2]) / 900))
    return picture[::step, ::step]


def _darken_outside(axes: Axes, panel: Panel) -> None:
    """Darken the image outside its only view."""
    (x0, y0, x1, y1), (width, height) = panel.views[0][1].box, panel.picture.size
    for left, top, right, bottom in ((0, 0, x0, height), (x1, 0, width, height), (0, 0, width, y0), (0, y1, width, height)):
        if right > left and bottom > top:
            axes.add_patch(Rectangle((left, top), right - left, bottom - top, facecolor="black", alpha=0.55, linewidth=0))


def draw_grid(axes: Axes, panel: Panel, *, lines: bool) -> None:
    """Draw the border of each view, and the lines between its cells."""
    for _, view in panel.views:
        x0, y0, x1, y1 = view.box
        if lines:
            rows, columns = view.edges()
            for style in (_HALO, _LINE):
                axes.hlines(rows, x0, x1, **style)
                axes.vlines(columns, y0, y1, **style)
        edge = TILE_EDGE if view.kind == "tile" else QUIET
        axes.add_patch(Rectangle((x0, y0), x1 - x0, y1 - y0, fill=False, edgecolor=edge, linewidth=1.6))


def draw_cells(axes: Axes, view: View, *, chosen: Bool[np.ndarray, "rows columns"], colour: str) -> None:
    """Tint the chosen cells of a view."""
    for x0, y0, x1, y1 in view.cell_boxes()[chosen]:
        axes.add_patch(Rectangle((x0, y0), x1 - x0, y1 - y0, facecolor=colour, edgecolor=colour, alpha=0.5, linewidth=0.6))
