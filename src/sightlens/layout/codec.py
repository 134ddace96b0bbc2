"""Write a structure as plain JSON data, and read it back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from sightlens.errors import LayoutError
from sightlens.layout.segments import Item, Padding, Segment, Separator, Special, Text, Visual
from sightlens.layout.structure import Features, Structure
from sightlens.layout.views import View

KINDS: Mapping[str, type[Segment]] = {
    "padding": Padding,
    "special": Special,
    "text": Text,
    "item": Item,
    "visual": Visual,
    "separator": Separator,
}
NAMES = {kind: name for name, kind in KINDS.items()}


def encode(structure: Structure) -> dict[str, Any]:
    """Return the structure as dicts, lists, numbers and strings."""
    return {
        "segments": [{"is": NAMES[type(segment)], **asdict(segment)} for segment in structure.segments],
        "views": [{name: _listed(value) for name, value in asdict(view).items()} for view in structure.views],
        "image_sizes": [list(size) for size in structure.image_sizes],
        **({} if structure.features is None else {"features": [structure.features.rows, list(structure.features.of)]}),
    }


def decode(data: Mapping[str, Any]) -> Structure:
    """Return the structure that `encode` wrote.

    Raises:
        LayoutError: the data are of another shape, or describe no valid structure.
    """
    try:
        segments = tuple(_segment(entry) for entry in data["segments"])
        views = tuple(View(**{name: _tupled(value) for name, value in entry.items()}) for entry in data["views"])
        sizes = tuple((int(height), int(width)) for height, width in data["image_sizes"])
        features = Features(int(data["features"][0]), tuple(map(int, data["features"][1]))) if "features" in data else None
    except (KeyError, TypeError, ValueError) as error:
        raise LayoutError("data written by `Layout.to_dict`", f"{type(error).__name__}: {error}", "Prepare the prompt again.") from error
    return Structure(segments, views, sizes, features)


def _segment(entry: Mapping[str, Any]) -> Segment:
    return KINDS[entry["is"]](**{name: value for name, value in entry.items() if name != "is"})


def _listed(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def _tupled(value: Any) -> Any:
    return tuple(value) if isinstance(value, Sequence) and not isinstance(value, str) else value
