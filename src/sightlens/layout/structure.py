"""The structure of one sequence: a partition of its positions, and the views its visual tokens come from."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TypeVar

import numpy as np

from sightlens._types import PositionMask
from sightlens.errors import LayoutError
from sightlens.layout.segments import Padding, Segment, Separator, Text, Visual
from sightlens.layout.sheets import PositionGrid, Sheet, stitch
from sightlens.layout.views import View

Array = TypeVar("Array", bound=np.ndarray)

VISUAL_TOKEN = np.dtype([(name, np.int64) for name in ("position", "image", "view", "row", "column", "patches")] + [("box", np.float64, 4)])
"""One row of `Structure.visual_tokens`: ``box`` is (x0, y0, x1, y1) in pixels of the original image."""


@dataclass(frozen=True)
class Features:
    """Which output of the projector each visual token carries, where they do not simply follow each other."""

    rows: int
    """Outputs that the projector returns for the example, those that no token carries included."""
    of: tuple[int, ...]
    """By position, the output of each visual token; -1 for a token that blends several."""


@dataclass(frozen=True)
class Structure:
    """A gapless partition of positions ``0..length`` into segments, and the views that the visual ones show.

    Raises:
        LayoutError: the segments leave a gap or overlap, padding lies inside, a view's cells are not covered exactly
            once, a view names an image that has no size, or the tiles of an image do not form a rectangle.
    """

    segments: tuple[Segment, ...]
    views: tuple[View, ...] = ()
    image_sizes: tuple[tuple[int, int], ...] = ()
    """(height, width) of each original image in pixels."""
    features: Features | None = field(default=None, repr=False)
    """None when the projector's outputs are the visual tokens, in order."""

    def __post_init__(self) -> None:
        """Check the partition, the views and the cells."""
        _check_partition(self.segments)
        _check_views(self.views, self.image_sizes)
        _check_cells(self.segments, self.views)
        stitch(self.views, self.grid_positions)
        if self.features is not None and len(self.features.of) != self.visual.sum():
            raise LayoutError(f"{int(self.visual.sum())} features", f"{len(self.features.of)}", "Give one per visual token.")

    @property
    def feature_rows(self) -> int:
        """How many outputs the projector returns for this example."""
        return int(self.visual.sum()) if self.features is None else self.features.rows

    @property
    def length(self) -> int:
        """The number of positions, padding included."""
        return self.segments[-1].stop

    @cached_property
    def grid_positions(self) -> tuple[PositionGrid, ...]:
        """The sequence position of each cell, per view ``[rows, columns]``."""
        flat = [np.zeros(view.count, dtype=np.int64) for view in self.views]
        for segment in self.segments:
            if isinstance(segment, Visual):
                cells = slice(segment.first, segment.first + segment.stop - segment.start)
                flat[segment.view][cells] = np.arange(segment.start, segment.stop)
        return tuple(frozen(grid.reshape(view.grid)) for grid, view in zip(flat, self.views, strict=True))

    @cached_property
    def sheets(self) -> tuple[Sheet, ...]:
        """The planes of neighbouring cells: each global view, and the stitched tiles of each image."""
        return stitch(self.views, self.grid_positions)

    @cached_property
    def visual(self) -> PositionMask:
        """Which positions are visual tokens."""
        return self.where(lambda segment: isinstance(segment, Visual))

    @cached_property
    def attended(self) -> PositionMask:
        """Which positions are not padding."""
        return self.where(lambda segment: not isinstance(segment, Padding))

    @property
    def separators(self) -> tuple[Separator, ...]:
        """The separators in sequence order; ``separator[k]`` is the k-th."""
        return tuple(segment for segment in self.segments if isinstance(segment, Separator))

    @property
    def prompt_stop(self) -> int:
        """The position after the last one of the prompt, which is where the answer starts."""
        answers = [s.start for s in self.segments if isinstance(s, Text) and s.role == "answer"]
        return min([*answers, 1 + int(np.flatnonzero(self.attended).max(initial=-1))])

    @cached_property
    def digest(self) -> str:
        """16 hexadecimal digits of all content, equal in every process."""
        return hashlib.sha256(repr(self).encode()).hexdigest()[:16]

    @property
    def summary(self) -> str:
        """The size of the sequence in words, for messages."""
        visual = int(self.visual.sum())
        return f"a layout of {self.length} positions with {visual} visual tokens in {len(self.views)} views"

    def where(self, test: Callable[[Segment], bool]) -> PositionMask:
        """Return which positions lie in a segment that passes the test."""
        mask = np.zeros(self.length, dtype=bool)
        for segment in self.segments:
            mask[segment.start : segment.stop] = test(segment)
        return frozen(mask)

    def visual_tokens(self) -> np.ndarray:
        """Return a table with one `VISUAL_TOKEN` row per visual token, by position."""
        return self._visual_table

    @cached_property
    def _visual_table(self) -> np.ndarray:
        parts = [np.zeros(0, dtype=VISUAL_TOKEN)]
        for index, (view, positions) in enumerate(zip(self.views, self.grid_positions, strict=True)):
            part = np.zeros(view.count, dtype=VISUAL_TOKEN)
            part["position"], part["image"], part["view"] = positions.ravel(), view.image, index
            part["row"], part["column"] = (axis.ravel() for axis in np.indices(view.grid))
            part["patches"], part["box"] = view.patches, view.cell_boxes().reshape(-1, 4)
            parts.append(part)
        table = np.concatenate(parts)
        return frozen(table[np.argsort(table["position"])])

    def pad(self, *, left: int = 0, right: int = 0) -> Structure:
        """Return this structure inside a padded batch.

        Raises:
            LayoutError: a negative amount.
        """
        if min(left, right) < 0:
            raise LayoutError("padding of 0 or more positions", f"left={left}, right={right}", "Slice the tensors instead.")
        inner = self._inner
        before = left + (inner[0].start if inner else self.length)
        after = right + (self.length - inner[-1].stop if inner else 0)
        moved = [replace(s, start=s.start + left, stop=s.stop + left) for s in inner]
        end = moved[-1].stop if moved else before
        ends = [Padding(0, before), *moved, Padding(end, end + after)]
        return replace(self, segments=tuple(s for s in ends if s.start < s.stop))

    def unpad(self) -> Structure:
        """Return this structure without its padding.

        Raises:
            LayoutError: everything is padding.
        """
        before = self.padding
        return replace(self, segments=tuple(replace(s, start=s.start - before, stop=s.stop - before) for s in self._inner))

    @property
    def padding(self) -> int:
        """How many positions of padding come before the first real one."""
        return self._inner[0].start if self._inner else 0

    @cached_property
    def _inner(self) -> tuple[Segment, ...]:
        return tuple(segment for segment in self.segments if not isinstance(segment, Padding))


def frozen(array: Array) -> Array:
    """Return the array itself, made read-only, since frozen data hand it out."""
    array.setflags(write=False)
    return array


def _check_partition(segments: tuple[Segment, ...]) -> None:
    if not segments:
        raise LayoutError("at least one position", "no segment", "Build layouts from the ids that the model receives.")
    expected = 0
    for index, segment in enumerate(segments):
        if segment.start != expected or segment.stop <= segment.start:
            raise LayoutError(f"a segment that starts at {expected} and is not empty", str(segment), "Leave no gap or overlap.")
        if isinstance(segment, Padding) and 0 < index < len(segments) - 1:
            raise LayoutError("padding only at the two ends", str(segment), "Check the attention mask of this example.")
        expected = segment.stop


def _check_views(views: tuple[View, ...], sizes: tuple[tuple[int, int], ...]) -> None:
    if any(min(size) < 1 for size in sizes):
        raise LayoutError("image sizes (height, width) of at least one pixel", str(sizes), "Give the original images' sizes.")
    if sorted({view.image for view in views}) != list(range(len(sizes))):
        raise LayoutError(
            f"views of each of {len(sizes)} images",
            f"views of the images {sorted({view.image for view in views})}",
            "Give one size per image, and at least one view of each.",
        )


def _check_cells(segments: tuple[Segment, ...], views: tuple[View, ...]) -> None:
    runs = [segment for segment in segments if isinstance(segment, Visual)]
    for run in runs:
        if not 0 <= run.view < len(views):
            raise LayoutError(f"one of {len(views)} views", str(run), "Number the views from 0.")
    for index, view in enumerate(views):
        cells = [run.first + k for run in runs if run.view == index for k in range(run.stop - run.start)]
        if sorted(cells) != list(range(view.count)):
            raise LayoutError(
                f"each of the {view.count} cells of view {index} ({view.name}, {view.grid[0]} × {view.grid[1]}) once",
                f"{len(cells)} visual positions for {len(set(cells))} different cells",
                "Compare the view's grid with the placeholders in the ids.",
            )
