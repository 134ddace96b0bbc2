"""Pictures at any resolution, as LLaVA-NeXT and LLaVA-OneVision cut them.

The base view comes first: the whole picture, squashed. Beside it the picture is scaled to fit, without changing its aspect
ratio, on a canvas of whole tiles, the rest of which is padding. The tokens of all tiles form one grid; rows and columns that
hold padding alone are dropped, and the rest follows row by row across the tiles, a newline vector after each row.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise, product
from math import ceil
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedConfig

from sightlens.errors import FamilyError
from sightlens.families.family import Cells, Family, Grid, Mark, Part, Place, ViewedImage
from sightlens.families.llava import llava_sites, patch_grid
from sightlens.families.sites import Site, Weight
from sightlens.layout import Layout, View

NEWLINE = Mark("newline")
COUNTS = "batch_num_images"
NEWLINE_SITE = Site("hook_newline", "model", Weight("image_newline"), ("d_model",), "image_newline")


class AnyresFamily(Family):
    """What families with tiles on a canvas share: LLaVA's towers and decoders, one token per patch, a newline vector."""

    def check_processor(self, config: PreTrainedConfig, processor: Any) -> None:
        """Compare canvases and tile sizes."""
        check_pinpoints(config, processor)

    def token_grid(self, config: PreTrainedConfig) -> Grid:
        """One token per patch."""
        return patch_grid(config)

    def sites(self, config: PreTrainedConfig) -> tuple[Site, ...]:
        """List the hook names."""
        return (*llava_sites(config), NEWLINE_SITE)

    def image_rows(self, tensors: Mapping[str, Tensor], layouts: Sequence[Layout]) -> dict[str, list[int]]:
        """One row per image, which holds all of its crops; images are counted once per example that has some."""
        images = [len(layout.structure.image_sizes) for layout in layouts]
        return {name: [int(count > 0) for count in images] if name == COUNTS else images for name in tensors}


@dataclass(frozen=True)
class Canvas:
    """A picture on its canvas of tiles.

    Attributes:
        size: ``(height, width)`` of the picture in pixels.
        tiles: rows and columns of tiles.
        side: pixels per side of a tile.
        cells: visual tokens per side of a tile.
    """

    size: tuple[int, int]
    tiles: tuple[int, int]
    side: int
    cells: int

    def kept(self) -> tuple[range, range]:
        """Return the rows and the columns of the tiles' common grid that survive un-padding, by HF's own arithmetic."""
        (height, width), (rows, columns) = self.size, (count * self.cells for count in self.tiles)
        if width / height > columns / rows:
            cut = (rows - int(round(height * (columns / width), 7))) // 2
            return range(cut, rows - cut), range(columns)
        cut = (columns - int(round(width * (rows / height), 7))) // 2
        return range(rows), range(cut, columns - cut)

    def box(self, rows: range, columns: range) -> tuple[float, float, float, float]:
        """Return what a block of the common grid shows, in pixels of the picture."""
        (top, y), (left, x) = (self._axis(axis) for axis in (0, 1))
        step = self.side / self.cells
        return (
            (columns.start * step - left) * x,
            (rows.start * step - top) * y,
            (columns.stop * step - left) * x,
            (rows.stop * step - top) * y,
        )

    def _axis(self, axis: int) -> tuple[int, float]:
        """Return where along an axis the picture starts on the canvas, and how many of its own pixels one there is."""
        room = [count * self.side for count in self.tiles]
        scale = min(room[0] / self.size[0], room[1] / self.size[1])
        scaled = room[axis] if scale == room[axis] / self.size[axis] else min(ceil(self.size[axis] * scale), room[axis])
        return (room[axis] - scaled) // 2, self.size[axis] / scaled


def view_anyres(pixels: Tensor, canvas: Canvas, place: Place, *, most_tiles: int | None = None) -> ViewedImage:
    """Describe a picture that was cut into its base view and the tiles of a canvas.

    Args:
        pixels: base view and tiles, ``[crop, channel, height, width]``.
        canvas: of the tiles.
        place: which image this is.
        most_tiles: LLaVA-OneVision: tokens beyond so many tiles' worth are scaled down, each blending up to four.
    """
    grid, (height, width) = place.grid, canvas.size
    base = View("global", place.index, (grid.rows, grid.columns), (0, 0, width, height))
    rows, columns = canvas.kept()
    scaled = None if most_tiles is None else _scaled(len(rows), len(columns), most_tiles * grid.count)
    if scaled is None:
        tiles, features = _tiles(canvas, place, rows, columns)
        lines = _lines(tiles, len(rows))
    else:
        tiles = [View("tile", place.index, scaled, canvas.box(rows, columns), tile=(0, 0))] if min(scaled) else []
        features, lines = [-1] * (scaled[0] * scaled[1]), _lines(tiles, scaled[0])
    span = (Cells(0, 0, grid.count), *lines)
    return ViewedImage(
        pixels,
        (base, *tiles),
        span,
        extras={"image_sizes": torch.tensor([canvas.size])},
        features=(*range(grid.count), *features),
        rows=grid.count * pixels.shape[0],
    )


def _scaled(rows: int, columns: int, most: int) -> tuple[int, int] | None:
    ratio = (rows * columns / most) ** 0.5
    return (int(rows // ratio), int(columns // ratio)) if ratio > 1.1 else None


def _tiles(canvas: Canvas, place: Place, rows: range, columns: range) -> tuple[list[View], list[int]]:
    """Return the views of all tiles of which something is kept, row by row, and the projector output of each of their cells."""
    views, features, n = [], [], canvas.cells
    across, down = _cuts(columns, n), _cuts(rows, n)
    for (r, part), (c, section) in product(enumerate(down), enumerate(across)):
        views.append(View("tile", place.index, (len(part), len(section)), canvas.box(part, section), tile=(r, c)))
        crop = 1 + part.start // n * canvas.tiles[1] + section.start // n
        cells = np.add.outer(np.asarray(part) % n * n, np.asarray(section) % n)
        features += (crop * n * n + cells).ravel().tolist()
    return views, features


def _cuts(kept: range, n: int) -> list[range]:
    """Cut a range of cells at the edges of tiles of ``n``."""
    edges = sorted({kept.start, kept.stop, *(edge for edge in range(0, kept.stop, n) if edge > kept.start)})
    return [range(start, stop) for start, stop in pairwise(edges)]


def _lines(tiles: Sequence[View], rows: int) -> list[Part]:
    """Return the rows of the tiles' common grid, each closed by a newline; view 0 is the base."""
    if not tiles:  # HF writes the newlines of an empty grid all the same
        return [NEWLINE] * rows
    span: list[Part] = []
    for row in sorted({view.tile[0] for view in tiles if view.tile}):
        line = [(index, view) for index, view in enumerate(tiles, start=1) if view.tile and view.tile[0] == row]
        for r in range(line[0][1].grid[0]):
            span += [*(Cells(index, r * view.grid[1], view.grid[1]) for index, view in line), NEWLINE]
    return span


def padded_crops(examples: Sequence[Sequence[ViewedImage]]) -> Tensor:
    """Return the crops of all images as HF's processors pad them, ``[image, most crops, channel, height, width]``."""
    crops = [image.pixels for example in examples for image in example]
    return torch.nn.utils.rnn.pad_sequence(crops, batch_first=True)


def check_pinpoints(config: PreTrainedConfig, processor: object) -> None:
    """Refuse an image processor that may choose other canvases, or cuts other tiles, than the model expects.

    Raises:
        FamilyError: naming what differs.
    """
    settings = processor.to_dict()  # type: ignore[attr-defined]
    wanted, given = (sorted(map(tuple, grid)) for grid in (config.image_grid_pinpoints, settings["image_grid_pinpoints"]))
    if wanted != given:
        raise FamilyError(f"the image_grid_pinpoints of config.json, {wanted[:3]}…", f"{given[:3]}…", "Use the checkpoint's own processor.")
    if tile_side(settings) != config.vision_config.image_size:
        raise FamilyError(
            f"tiles of {config.vision_config.image_size} pixels", f"{tile_side(settings)}", "Use the checkpoint's own processor."
        )


def tile_side(settings: dict) -> int:
    """Return the pixels per side of a tile that an image processor cuts."""
    size, crop = settings["size"], settings.get("crop_size")
    return crop["height"] if crop else size.get("height") or size["shortest_edge"]


def make_canvas(size: tuple[int, int], resolution: tuple[int, int], grid: Grid, *, side: int) -> Canvas:
    """Return the canvas of a picture for the resolution ``(height, width)`` that was chosen for it."""
    return Canvas(size, (resolution[0] // side, resolution[1] // side), side, grid.rows)
