"""Where the parts of each image's span came to stand in the tokenized sequence."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from jaxtyping import Int

from sightlens.errors import PromptError
from sightlens.families.family import Cells, Mark, ViewedImage
from sightlens.layout import Features, Separator


@dataclass(frozen=True)
class Located:
    """What a sequence holds of its images.

    Attributes:
        visual: position of every visual token, view by view in raster order.
        separators: delimiters and newlines.
        features: which projector output stands at each of the visual tokens, None when they simply follow each other.
    """

    visual: Int[np.ndarray, " token"]
    separators: tuple[Separator, ...]
    features: Features | None


def locate_parts(places: Int[np.ndarray, " placeholder"], images: Sequence[ViewedImage]) -> Located:
    """Give each part of each image's span its positions.

    Args:
        places: positions that hold the image placeholder.
        images: in the order of the sequence.

    Raises:
        PromptError: when there are more or fewer placeholders than the images need.
    """
    counts = [sum(_placeholders(part) for part in image.span) for image in images]
    if sum(counts) != len(places):
        raise PromptError(
            f"{sum(counts)} image tokens after tokenization",
            f"{len(places)}",
            "The text holds the image token, or the tokenizer splits it.",
        )
    walks = [_walk(image, own) for image, own in zip(images, np.split(places, np.cumsum(counts)[:-1]), strict=True)] if images else []
    visual = np.concatenate([np.zeros(0, dtype=np.int64), *(walk.visual for walk in walks)])
    return Located(visual, tuple(mark for walk in walks for mark in walk.separators), _features(images, visual))


def _placeholders(part: object) -> int:
    return part.count if isinstance(part, Cells) else int(isinstance(part, Mark) and part.token is None)


@dataclass
class _Walk:
    """The way through one span; ``after`` is the position that follows what was just placed, None when that is not known."""

    visual: np.ndarray
    separators: list[Separator] = field(default_factory=list)
    pending: list[Mark] = field(default_factory=list)
    after: int | None = None

    def mark(self, name: str, position: int) -> None:
        self.separators.append(Separator(position, position + 1, name))

    def reach(self, start: int, stop: int) -> None:
        """Place marks that wait for what follows them, and go on after ``stop``."""
        for back, mark in enumerate(reversed(self.pending), start=1):
            self.mark(mark.name, start - back)
        self.pending, self.after = [], stop


def _walk(image: ViewedImage, places: np.ndarray) -> _Walk:
    starts = np.cumsum([0, *(view.count for view in image.views)])
    walk, cursor = _Walk(np.zeros(starts[-1], dtype=np.int64)), 0
    for part in image.span:
        own = places[cursor : cursor + _placeholders(part)].tolist()
        cursor += len(own)
        match part:
            case Cells(view, first, count):
                walk.visual[starts[view] + first : starts[view] + first + count] = own
                walk.reach(own[0], own[-1] + 1)
            case Mark(name, None):
                walk.reach(own[0], own[0] + 1)
                walk.mark(name, own[0])
            case Mark(name, _) if walk.after is not None:
                walk.mark(name, walk.after)
                walk.after += 1
            case Mark():
                walk.pending.append(part)
            case _:
                walk.after = None
    return walk


def _features(images: Sequence[ViewedImage], visual: np.ndarray) -> Features | None:
    if all(image.features is None for image in images):
        return None
    rows, before = [], 0
    for image in images:
        own = np.arange(image.feature_rows) if image.features is None else np.asarray(image.features, dtype=np.int64)
        rows.append(np.where(own < 0, own, own + before))
        before += image.feature_rows
    ordered = np.concatenate(rows)[np.argsort(visual)]
    return Features(before, tuple(ordered.tolist()))
