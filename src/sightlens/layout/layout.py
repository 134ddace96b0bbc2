"""Layout: what every position of one example's sequence is, with its tokens and bound objects."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, SupportsIndex

import numpy as np
from jaxtyping import Float, Int

from sightlens.errors import LayoutError, SelectorError
from sightlens.layout.codec import decode, encode
from sightlens.layout.describe import describe
from sightlens.layout.evaluation import evaluate
from sightlens.layout.overlap import touched_positions
from sightlens.layout.parser import parse
from sightlens.layout.segments import Padding, Segment, Text
from sightlens.layout.selector import Selector
from sightlens.layout.sheets import PositionGrid
from sightlens.layout.structure import Structure
from sightlens.layout.tokenset import TokenSet
from sightlens.layout.views import View, ViewKind
from sightlens.layout.words import Bound


@dataclass(frozen=True, repr=False)
class Layout:
    """What each position of one example is, also inside a padded batch; frozen, comparable, hashable, JSON-able.

    Raises:
        LayoutError: the number of tokens differs from the structure's length, or an object holds a foreign position.
    """

    structure: Structure
    tokens: tuple[str, ...]
    """The token string at each position, padding included."""
    objects: tuple[tuple[int, ...], ...] = ()
    """The positions of each bound object, which the words ``object`` and ``background`` mean."""
    norms: tuple[float, ...] | None = field(default=None, compare=False)
    """The norm of each visual token by position, which ``register`` reads; measured, so no part of the layout's identity."""
    scores: tuple[float, ...] | None = field(default=None, compare=False)
    """A score of each visual token by position, which ``top`` reads; no part of the layout's identity either."""

    def __post_init__(self) -> None:
        """Check the lengths."""
        if len(self.tokens) != self.structure.length:
            raise LayoutError(
                f"one token for each of {self.structure.length} positions",
                f"{len(self.tokens)} tokens",
                "Build the layout from the ids that the model receives.",
            )
        for positions in self.objects:
            self.at(positions)

    def __repr__(self) -> str:
        """One line, such as ``<bos> text[4] image(8×8) text[9]``."""
        return describe(self.structure, self.tokens)

    @property
    def segments(self) -> tuple[Segment, ...]:
        """The partition of the positions, in order."""
        return self.structure.segments

    @property
    def views(self) -> tuple[View, ...]:
        """The views, in the order in which ``Visual.view`` counts them."""
        return self.structure.views

    @property
    def image_sizes(self) -> tuple[tuple[int, int], ...]:
        """(height, width) of each original image in pixels."""
        return self.structure.image_sizes

    @property
    def length(self) -> int:
        """The number of positions, padding included."""
        return self.structure.length

    @property
    def prompt_stop(self) -> int:
        """The position at which the answer starts."""
        return self.structure.prompt_stop

    @property
    def grid_positions(self) -> tuple[PositionGrid, ...]:
        """The sequence position of each cell, per view ``[rows, columns]``."""
        return self.structure.grid_positions

    @property
    def hash(self) -> str:
        """A hash of all content (16 hexadecimal digits), equal in every process, for provenance."""
        return hashlib.sha256(repr((self.structure.digest, self.tokens, self.objects)).encode()).hexdigest()[:16]

    def positions(self, view: int) -> PositionGrid:
        """Return the sequence position of each cell of one view, ``[rows, columns]``.

        Raises:
            LayoutError: there is no such view.
        """
        if not 0 <= view < len(self.views):
            raise LayoutError(f"the index of one of {len(self.views)} views", str(view), "Count from 0; see `layout.views`.")
        return self.grid_positions[view]

    def cell_size(self, kind: ViewKind = "global", *, image: int = 0) -> tuple[float, float]:
        """Return the (height, width), in original pixels, of one cell of an image's global view or of its tiles.

        Raises:
            LayoutError: the image has no such view.
        """
        for sheet in self.structure.sheets:
            if sheet.kind == kind and sheet.image == image:
                return sheet.cell_size
        raise LayoutError(f"an image with a {kind} view", f"image {image} of {self!r}", "An image of one tile has a global view only.")

    def visual_tokens(self) -> np.ndarray:
        """Return a table with one row per visual token, by position; its columns are those of `VISUAL_TOKEN`."""
        return self.structure.visual_tokens()

    def select(self, selector: str | Selector) -> TokenSet:
        """Return the positions that a selector describes.

        Args:
            selector: text of the selector language, or what `parse` made of it.

        Raises:
            SelectorError: the text cannot be parsed, or does not fit this layout.
        """
        if not isinstance(selector, str | Selector):
            raise SelectorError("a selector, or its text", repr(selector), "Write `row[3]`; absolute positions are `layout.at([…])`.")
        parsed = parse(selector) if isinstance(selector, str) else selector
        if parsed not in self._selected:
            norms, scores = (None if values is None else np.array(values) for values in (self.norms, self.scores))
            self._selected[parsed] = evaluate(parsed, self.structure, bound=Bound(self.objects, norms, scores))
        return self._selected[parsed]

    @cached_property
    def _selected(self) -> dict[Selector, TokenSet]:
        """What was selected before: every row of every pass asks again."""
        return {}

    def at(self, positions: Sequence[SupportsIndex] | Int[np.ndarray, " selected"], *, name: str = "tokens") -> TokenSet:
        """Return a set of absolute positions, such as a ranking's first ``k``.

        Raises:
            LayoutError: a position is negative, past the end, or padding.
        """
        places = np.asarray(positions, dtype=np.int64)
        if places.size and not (places.min() >= 0 and places.max() < self.length):
            raise LayoutError(
                f"positions from 0 to {self.length - 1}",
                str(places.tolist()[:8]),
                "Count from the start, padding included.",
            )
        mask = np.zeros(self.length, dtype=bool)
        mask[places] = True
        return TokenSet(self.structure, mask, name=name)

    def object(self, mask: np.ndarray, p: int = 0, *, image: int = 0, min_overlap: int = 1) -> TokenSet:
        """Return the visual tokens, in all views, whose cell meets the mask, grown by ``p`` cells (shrunk if negative).

        Args:
            mask: bool ``[height, width]`` in pixels of the original image.
            p: cells to grow or, negative, to shrink; see `TokenSet.dilate`.
            image: which image of the prompt the mask belongs to.
            min_overlap: how many mask pixels a cell must meet; see `touched_positions`.

        Raises:
            MaskError: the mask is not bool, has another size than the image, or is all False.
        """
        touched = touched_positions(self.structure, mask, image=image, min_overlap=min_overlap)
        return TokenSet(self.structure, touched, name="object").dilate(p)

    def with_object(self, what: np.ndarray | TokenSet, *, image: int = 0) -> Layout:
        """Return this layout with one more object, so that ``object``, ``object[k]`` and ``background`` work.

        Args:
            what: a bool mask ``[height, width]`` of the original image, or a token set of this layout.
            image: which image a mask belongs to.

        Raises:
            MaskError: see `object`.
        """
        chosen = what if isinstance(what, TokenSet) else self.object(what, image=image)
        return replace(self, objects=(*self.objects, tuple(np.flatnonzero(chosen.mask).tolist())))

    def with_norms(self, norms: Sequence[float] | Float[np.ndarray, " token"]) -> Layout:
        """Return this layout with the norm of each visual token, by position, so that ``register(…)`` works.

        Raises:
            LayoutError: when there are not as many finite numbers as visual tokens.
        """
        return replace(self, norms=self._numbers(norms))

    def with_scores(self, scores: Sequence[float] | Float[np.ndarray, " token"]) -> Layout:
        """Return this layout with a score of each visual token, by position, so that ``top(…)`` works.

        Raises:
            LayoutError: when there are not as many finite numbers as visual tokens.
        """
        return replace(self, scores=self._numbers(scores))

    def _numbers(self, values: Sequence[float] | np.ndarray) -> tuple[float, ...]:
        numbers, count = np.asarray(values, dtype=np.float64), int(self.structure.visual.sum())
        if numbers.shape != (count,) or not np.isfinite(numbers).all():
            got = f"{int(np.isfinite(numbers).sum())} of shape {numbers.shape}"
            raise LayoutError(f"a finite number for each of {count} visual tokens", got, "Give them in the order of positions.")
        return tuple(numbers.tolist())

    def with_answer(self, tokens: Sequence[str]) -> Layout:
        """Return this layout with a teacher-forced answer appended; it becomes the selector ``answer``.

        Raises:
            LayoutError: the sequence is padded on the right.
        """
        if self.segments and isinstance(self.segments[-1], Padding):
            raise LayoutError("a layout without padding on the right", repr(self), "Append the answer before padding.")
        answer = [Text(self.length, self.length + len(tokens), "answer")] if tokens else []
        structure = replace(self.structure, segments=(*self.segments, *answer))
        return replace(self, structure=structure, tokens=(*self.tokens, *tokens))

    def pad(self, *, left: int = 0, right: int = 0, token: str = "<pad>") -> Layout:
        """Return this layout inside a padded batch, all positions moved by ``left``.

        Raises:
            LayoutError: a negative amount.
        """
        objects = tuple(tuple(position + left for position in positions) for positions in self.objects)
        structure, tokens = self.structure.pad(left=left, right=right), (token,) * left + self.tokens + (token,) * right
        return replace(self, structure=structure, tokens=tokens, objects=objects)

    def unpad(self) -> Layout:
        """Return this layout as it was before padding.

        Raises:
            LayoutError: everything is padding.
        """
        real = np.flatnonzero(self.structure.attended)
        structure, start = self.structure.unpad(), int(real[0])
        objects = tuple(tuple(position - start for position in positions) for positions in self.objects)
        return replace(self, structure=structure, tokens=self.tokens[start : start + structure.length], objects=objects)

    def to_dict(self) -> dict[str, Any]:
        """Return the layout as plain JSON data."""
        return {
            **encode(self.structure),
            "tokens": list(self.tokens),
            "objects": [list(places) for places in self.objects],
            **{name: list(values) for name, values in (("norms", self.norms), ("scores", self.scores)) if values is not None},
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Layout:
        """Return the layout that `to_dict` wrote.

        Raises:
            LayoutError: the data are of another shape, or describe no valid layout.
        """
        structure = decode(data)
        objects = tuple(tuple(places) for places in data.get("objects", ()))
        numbers = {name: tuple(map(float, data[name])) for name in ("norms", "scores") if name in data}
        return cls(structure, tuple(data.get("tokens", ())), objects, **numbers)
