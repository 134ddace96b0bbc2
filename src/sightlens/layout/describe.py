"""Write a layout in one line: ``<bos> text[4] image(8×8) text[9]``."""

from __future__ import annotations

from collections.abc import Sequence

from sightlens.layout.segments import Item, Padding, Segment, Separator, Special, Text, Visual
from sightlens.layout.structure import Structure


def describe(structure: Structure, tokens: Sequence[str]) -> str:
    """Return the segments in order: marks by their token, texts and padding by length, views by grid.

    Texts of all roles but ``answer`` are one text. A view that separators cut into rows is written once, without them;
    of more than two tiles in a row only the first and the last are.
    """
    parts: list[tuple[str, int]] = []
    for segment in _outline(structure):
        name, count = _part(segment, structure, tokens)
        if count and parts and parts[-1][0] == name:
            parts[-1] = name, parts[-1][1] + count
        else:
            parts.append((name, count))
    return " ".join(_elided([f"{name}[{count}]" if count else name for name, count in parts]))


def _outline(structure: Structure) -> list[Segment]:
    runs = [segment for segment in structure.segments if isinstance(segment, Visual)]
    ends = {run.view: run.stop for run in runs}
    starts = {run.view: run.start for run in reversed(runs)}
    cuts = [(starts[view], ends[view]) for view in starts]
    return [
        segment
        for segment in structure.segments
        if not (isinstance(segment, Visual) and segment.start != starts[segment.view])
        and not (isinstance(segment, Separator) and any(start < segment.start < stop for start, stop in cuts))
    ]


def _part(segment: Segment, structure: Structure, tokens: Sequence[str]) -> tuple[str, int]:
    match segment:
        case Padding():
            return "pad", segment.stop - segment.start
        case Text(role=role):
            return "answer" if role == "answer" else "text", segment.stop - segment.start
        case Item():
            return "text", segment.stop - segment.start
        case Separator(name="list"):
            return "text", segment.stop - segment.start
        case Special() | Separator():
            return "".join(tokens[segment.start : segment.stop]), 0
        case Visual(view=view):
            return _view(structure, view), 0


def _view(structure: Structure, index: int) -> str:
    view = structure.views[index]
    alone = sum(other.image == view.image for other in structure.views) == 1
    place = f"[{view.image}]" if len(structure.image_sizes) > 1 else ""
    name = f"image{place}" if alone else f"image{place}.{view.name}" if place else view.name
    return f"{name}({view.grid[0]}×{view.grid[1]})"


def _elided(parts: Sequence[str]) -> list[str]:
    tiles = [".tile[" in f".{part}" for part in parts] + [False]
    shown: list[str] = []
    for index, part in enumerate(parts):
        if tiles[index] and index and tiles[index - 1] and tiles[index + 1]:
            shown += [] if shown[-1] == "…" else ["…"]
        else:
            shown.append(part)
    return shown
