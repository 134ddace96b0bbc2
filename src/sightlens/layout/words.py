"""The words of the selector language: one table, one rule each.

Numbers that no view, segment or image has are an error; a word whose things the prompt merely lacks (``tile[*]`` on an
image that is encoded once, ``separator`` in a layout without) selects nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float

from sightlens._types import PositionMask
from sightlens.errors import SelectorError, listing
from sightlens.layout.indices import Index, Span, pick
from sightlens.layout.overlap import inside_image
from sightlens.layout.segments import Item, Segment, Separator, Special, Text, Visual
from sightlens.layout.structure import Structure
from sightlens.layout.views import View

Indices = tuple[Index, ...]


@dataclass(frozen=True, eq=False)
class Bound:
    """What a selector may need beside the structure."""

    objects: tuple[tuple[int, ...], ...] = ()
    """The positions of each bound object."""
    norms: Float[np.ndarray, " token"] | None = None
    """The norm of each visual token, by position."""
    scores: Float[np.ndarray, " token"] | None = None
    """A score of each visual token, by position."""


@dataclass(frozen=True, eq=False)
class Asked:
    """One word with its indices, asked of one structure."""

    structure: Structure
    indices: Indices
    objects: tuple[tuple[int, ...], ...]

    def picked(self, count: int) -> Sequence[int]:
        """Return which of ``count`` things the only index means, or all without an index."""
        return pick(self.indices[0], count) if self.indices else range(count)


Find = Callable[[Asked], PositionMask]


@dataclass(frozen=True)
class Rule:
    """How one word finds its positions."""

    find: Find
    arities: tuple[int, ...] = (0,)
    """How many indices the word may have."""
    generated: bool = False
    """Whether positions that decoding adds belong to the set."""
    regular: bool = True
    """Whether the layout alone decides."""


def _all(asked: Asked) -> PositionMask:
    return asked.structure.attended


def _of_views(structure: Structure, chosen: Sequence[bool]) -> PositionMask:
    return structure.where(lambda segment: isinstance(segment, Visual) and chosen[segment.view])


def _image(asked: Asked) -> PositionMask:
    images = asked.picked(len(asked.structure.image_sizes))
    return _of_views(asked.structure, [view.image in images for view in asked.structure.views])


def _global(asked: Asked) -> PositionMask:
    return _of_views(asked.structure, [view.kind == "global" for view in asked.structure.views])


def _tile(asked: Asked) -> PositionMask:
    sizes: dict[int, tuple[int, int]] = {}
    for view in asked.structure.views:
        row, column = view.tile or (-1, -1)
        rows, columns = sizes.get(view.image, (0, 0))
        sizes[view.image] = max(rows, row + 1), max(columns, column + 1)

    def chosen(view: View) -> bool:
        return view.tile is not None and all(
            place in pick(index, size) for place, index, size in zip(view.tile, asked.indices or view.tile, sizes[view.image], strict=True)
        )

    return _of_views(asked.structure, [chosen(view) for view in asked.structure.views])


def _cells(structure: Structure, rows: Index, columns: Index) -> PositionMask:
    mask = np.zeros(structure.length, dtype=bool)
    for positions in structure.grid_positions:
        height, width = positions.shape
        mask[positions[np.ix_(pick(rows, height), pick(columns, width))]] = True
    return mask


def _row(asked: Asked) -> PositionMask:
    return _cells(asked.structure, asked.indices[0], Span())


def _column(asked: Asked) -> PositionMask:
    return _cells(asked.structure, Span(), asked.indices[0])


def _cell(asked: Asked) -> PositionMask:
    return _cells(asked.structure, asked.indices[0], asked.indices[1])


def _border(asked: Asked) -> PositionMask:
    mask = asked.structure.visual.copy()
    for sheet in asked.structure.sheets:
        mask[sheet.positions[1:-1, 1:-1]] = False
    return mask


def _padding_area(asked: Asked) -> PositionMask:
    return asked.structure.visual & ~inside_image(asked.structure)


def _marks(kind: type[Separator | Special]) -> Find:
    def find(asked: Asked) -> PositionMask:
        marks = [segment for segment in asked.structure.segments if isinstance(segment, kind)]
        names = [mark.name for mark in marks]
        if asked.indices and isinstance(asked.indices[0], str):
            chosen = [k for k, name in enumerate(names) if name == asked.indices[0]]
        else:
            chosen = asked.picked(len(marks))
        starts = {marks[k].start for k in chosen}
        return asked.structure.where(lambda segment: segment.start in starts)

    return find


def _text(*roles: str) -> Find:
    return lambda asked: asked.structure.where(lambda segment: isinstance(segment, Text) and segment.role in roles)


def _all_text(asked: Asked) -> PositionMask:
    return asked.structure.where(lambda segment: isinstance(segment, Text | Item) or _between_items(segment))


def _between_items(segment: Segment) -> bool:
    return isinstance(segment, Separator) and segment.name == "list"


def _item(asked: Asked) -> PositionMask:
    ends = [segment.stop - 1 for segment in asked.structure.segments if isinstance(segment, Item)]
    return _at(asked.structure, [ends[k] for k in asked.picked(len(ends))])


def _context(asked: Asked) -> PositionMask:
    return asked.structure.where(
        lambda segment: isinstance(segment, Item) or _between_items(segment) or (isinstance(segment, Text) and segment.role == "context")
    )


def _beside_image(*, after: bool) -> Find:
    def find(asked: Asked) -> PositionMask:
        span = np.flatnonzero(
            asked.structure.where(lambda segment: isinstance(segment, Visual | Separator) and not _between_items(segment))
        )
        if not len(span):
            raise SelectorError("a layout with an image", "only text", "Use `text`, or give the prompt an image.")
        place = np.arange(asked.structure.length)
        return asked.structure.attended & (place > span[-1] if after else place < span[0])

    return find


def _position(asked: Asked) -> PositionMask:
    attended = np.flatnonzero(asked.structure.attended)
    return _at(asked.structure, attended[list(asked.picked(len(attended)))])


def _last(asked: Asked) -> PositionMask:
    return _at(asked.structure, [asked.structure.prompt_stop - 1]) & asked.structure.attended


def _object(asked: Asked) -> PositionMask:
    if not asked.objects:
        raise SelectorError(
            "a layout with a bound object for `object` and `background`",
            "a layout without objects",
            "Bind a mask first: `layout = layout.with_object(mask)`.",
        )
    chosen = [position for k in asked.picked(len(asked.objects)) for position in asked.objects[k]]
    return _at(asked.structure, chosen)


def _background(asked: Asked) -> PositionMask:
    return asked.structure.visual & ~_object(asked)


def _at(structure: Structure, positions: Sequence[int] | np.ndarray) -> PositionMask:
    mask = np.zeros(structure.length, dtype=bool)
    mask[np.asarray(positions, dtype=np.int64)] = True
    return mask


WORDS: Mapping[str, Rule] = {
    "all": Rule(_all, generated=True),
    "image": Rule(_image, arities=(0, 1)),
    "global": Rule(_global),
    "tile": Rule(_tile, arities=(0, 2)),
    "row": Rule(_row, arities=(1,)),
    "column": Rule(_column, arities=(1,)),
    "cell": Rule(_cell, arities=(2,)),
    "border": Rule(_border),
    "padding_area": Rule(_padding_area),
    "separator": Rule(_marks(Separator), arities=(0, 1)),
    "special": Rule(_marks(Special), arities=(0, 1)),
    "text": Rule(_all_text, generated=True),
    "system": Rule(_text("system")),
    "question": Rule(_text("question")),
    "context": Rule(_context),
    "item": Rule(_item, arities=(0, 1)),
    "template": Rule(_text("template")),
    "answer": Rule(_text("answer"), generated=True),
    "pre_image": Rule(_beside_image(after=False)),
    "post_image": Rule(_beside_image(after=True), generated=True),
    "last": Rule(_last),
    "position": Rule(_position, arities=(1,)),
    "object": Rule(_object, arities=(0, 1), regular=False),
    "background": Rule(_background, regular=False),
}


def find_word(name: str, indices: Indices, *, structure: Structure, bound: Bound) -> PositionMask:
    """Return the positions of one word.

    Raises:
        SelectorError: an index is outside what the layout has, or the word needs an image or an object that is missing.
    """
    mask = WORDS[name].find(Asked(structure, indices, bound.objects))
    exact = any(isinstance(index, int | str) for index in indices)
    bound_empty = name == "object" and indices and pick(indices[0], len(bound.objects))
    if exact and not mask.any() and not bound_empty:
        raise SelectorError(
            _offer(name, structure, bound),
            f"`{name}[{','.join(map(str, indices))}]`",
            "Count from 0, or from the end with negative numbers.",
        )
    return mask


def _offer(name: str, structure: Structure, bound: Bound) -> str:
    match name:
        case "separator" | "special":
            marks = [s.name for s in structure.segments if isinstance(s, Separator if name == "separator" else Special)]
            return f"one of {len(marks)} {name} segments ({listing(list(dict.fromkeys(marks)))})"
        case "item":
            return f"one of {sum(isinstance(s, Item) for s in structure.segments)} items"
        case "object":
            return f"one of {len(bound.objects)} bound objects"
        case "position":
            return f"one of {int(structure.attended.sum())} positions that are not padding"
        case "image":
            return f"one of {len(structure.image_sizes)} images"
        case _:
            views = [f"{view.name} ({view.grid[0]}×{view.grid[1]})" for view in structure.views]
            return f"a {name} of the views {listing(views)}" if views else f"an image for `{name}`"
