"""Build a layout from what a processor produced: tokens, placeholders, views, and the marks a family knows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import SupportsIndex

import numpy as np
from jaxtyping import Int

from sightlens.errors import LayoutError
from sightlens.layout.layout import Layout
from sightlens.layout.segments import Role, Segment, Separator, Special, Text, Visual
from sightlens.layout.structure import Structure
from sightlens.layout.views import View

Visuals = Sequence[SupportsIndex] | Int[np.ndarray, " token"]


def build_layout(
    tokens: Sequence[str],
    *,
    visual: Visuals = (),
    views: Sequence[View] = (),
    image_sizes: Sequence[tuple[int, int]] = (),
    known: Sequence[Segment] = (),
) -> Layout:
    """Return the layout of one example.

    Args:
        tokens: the token string at each position, padding included.
        visual: the position of every visual token, view by view, each view in raster order. Most families give the
            placeholders' positions as they come; one whose rows run across tiles sorts them by view first.
        views: the views, in the order of ``visual``.
        image_sizes: (height, width) of each original image.
        known: the other segments the family knows, in any order: `Padding`, `Special`, `Separator`, and `Text` spans
            with a role. A `Text` span may run across special tokens, which stay special. Every position left over is
            text with the role ``template``.

    Raises:
        LayoutError: the views have more or fewer cells than there are visual positions, two segments claim one
            position, or the result is no valid `Structure`.

    >>> view = View("global", 0, (2, 2), (0, 0, 64, 48))
    >>> layout = build_layout(["<s>", *["<image>"] * 4, "where"], visual=range(1, 5), views=[view], image_sizes=[(48, 64)],
    ...                       known=[Special(0, 1, "bos"), Text(5, 6, "question")])
    >>> layout, layout.select("row[1] | question").positions.tolist()
    (<s> image(2×2) text[1], [3, 4, 5])
    """
    _check_count(visual, views)
    texts = [segment for segment in known if isinstance(segment, Text)]
    marks = [segment for segment in known if not isinstance(segment, Text)]
    marks += _runs(visual, views)
    owned = _owned(marks, len(tokens))
    segments = sorted([*marks, *_texts(texts, owned)], key=lambda segment: segment.start)
    return Layout(Structure(tuple(segments), tuple(views), tuple(image_sizes)), tuple(tokens))


def mark_ids(
    ids: Sequence[SupportsIndex] | Int[np.ndarray, " position"],
    *,
    specials: Mapping[int, str] | None = None,
    separators: Mapping[int, str] | None = None,
) -> tuple[Special | Separator, ...]:
    """Return a one-position segment wherever an id is in one of the tables from ids to names."""
    marks: dict[int, Special | Separator] = {token: Special(0, 1, name) for token, name in (specials or {}).items()}
    marks |= {token: Separator(0, 1, name) for token, name in (separators or {}).items()}
    found = ((position, int(token)) for position, token in enumerate(ids) if int(token) in marks)
    return tuple(replace(marks[token], start=position, stop=position + 1) for position, token in found)


def _check_count(visual: Visuals, views: Sequence[View]) -> None:
    cells = sum(view.count for view in views)
    if cells != len(visual):
        shown = " + ".join(f"{view.name} {view.grid[0]}×{view.grid[1]}" for view in views) or "no views"
        raise LayoutError(
            f"{cells} visual positions ({shown})",
            f"{len(visual)} visual positions",
            "Check that the processor expanded the placeholder, and that no truncation cut the image.",
        )


def _runs(visual: Visuals, views: Sequence[View]) -> list[Visual]:
    cells = [(index, cell) for index, view in enumerate(views) for cell in range(view.count)]
    runs: list[Visual] = []
    for position, (view, cell) in sorted(zip(map(int, visual), cells, strict=True)):
        last = runs[-1] if runs else Visual(-1, -1, -1)
        if (position, view, cell) == (last.stop, last.view, last.first + last.stop - last.start):
            runs[-1] = Visual(last.start, position + 1, view, last.first)
        else:
            runs.append(Visual(position, position + 1, view, cell))
    return runs


def _owned(marks: Sequence[Segment], length: int) -> np.ndarray:
    owner = np.full(length, -1)
    for index, mark in enumerate(marks):
        if not 0 <= mark.start < mark.stop <= length:
            raise LayoutError(f"segments inside {length} positions", str(mark), "Check start and stop.")
        if (owner[mark.start : mark.stop] >= 0).any():
            other = marks[int(owner[mark.start : mark.stop].max())]
            raise LayoutError("one segment per position", f"{mark} over {other}", "Check the ids and the padding.")
        owner[mark.start : mark.stop] = index
    return owner >= 0


def _texts(texts: Sequence[Text], owned: np.ndarray) -> list[Text]:
    roles: list[Role | None] = [None if mark else "template" for mark in owned]
    for text in texts:
        if not 0 <= text.start < text.stop <= len(owned):
            raise LayoutError(f"texts inside {len(owned)} positions", str(text), "Check start and stop.")
        for position in range(text.start, text.stop):
            roles[position] = None if owned[position] else text.role
    changes = [0, *(k for k in range(1, len(roles)) if roles[k] != roles[k - 1]), len(roles)]
    return [Text(start, stop, role) for start, stop in pairwise(changes) if (role := roles[start]) is not None]
