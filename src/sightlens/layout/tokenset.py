"""A set of positions of one sequence, with set algebra, growth on the picture, and control sets."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from jaxtyping import Float

from sightlens._types import BoolGrid, PositionMask, Positions
from sightlens.errors import LayoutError, SelectorError
from sightlens.layout.controls import draw_positions, move_shape
from sightlens.layout.morphology import Border, Connectivity, dilate_grid, erode_grid
from sightlens.layout.overlap import inside_image
from sightlens.layout.structure import Structure, frozen
from sightlens.layout.views import ViewKind


@dataclass(frozen=True, eq=False, repr=False)
class TokenSet:
    """Some positions of one sequence; ``|``, ``&``, ``-``, ``~`` and ``<=`` work as on sets.

    Padding is never a member: ``~`` complements within the other positions. Two sets are equal when they have the same
    structure, positions and ``generated``; how they were named or found does not matter.

    Raises:
        LayoutError: the mask has another length than the sequence, or holds padding.
    """

    structure: Structure
    mask: PositionMask
    generated: bool = False
    """Whether positions that decoding adds later belong to the set."""
    regular: bool = False
    """Whether the layout alone decides the set (no mask, norm or seed), so that tensors may take its grid's shape."""
    name: str = "tokens"
    """The selector that found the set, for messages."""

    def __post_init__(self) -> None:
        """Check the mask and keep a read-only copy."""
        if len(self.mask) != self.structure.length or (self.mask & ~self.structure.attended).any():
            raise LayoutError(
                f"a mask of {self.structure.length} positions without padding",
                f"{len(self.mask)} positions, {np.flatnonzero(self.mask).tolist()[:8]}… chosen",
                "Build sets with `layout.select` or `layout.at`.",
            )
        object.__setattr__(self, "mask", frozen(self.mask.copy()))

    def __eq__(self, other: object) -> bool:
        """Compare structure, members and ``generated``."""
        return isinstance(other, TokenSet) and self._key() == other._key()

    def __hash__(self) -> int:
        """Hash what is compared."""
        return hash(self._key())

    def __repr__(self) -> str:
        """Name, size and the first positions."""
        more = "…" if self.count > 8 else ""
        later = ", generated" if self.generated else ""
        return f"TokenSet({self.name}: {self.count} at {self.positions[:8].tolist()}{more}{later})"

    def _key(self) -> tuple[Structure, bytes, bool]:
        return self.structure, self.mask.tobytes(), self.generated

    @cached_property
    def grid_shape(self) -> tuple[int, int] | None:
        """(rows, columns) of a regular set that is a full rectangle of one sheet, else None."""
        return None if self._grid is None else (self._grid.shape[0], self._grid.shape[1])

    @property
    def positions(self) -> Positions:
        """The members: ascending, or row by row when the set has a grid shape; an array of the caller's own, to index tensors with."""
        return np.flatnonzero(self.mask) if self._grid is None else self._grid.flatten()

    @property
    def count(self) -> int:
        """The number of members in the layout."""
        return int(self.mask.sum())

    @property
    def share(self) -> float:
        """The share of the sequence's visual tokens that are members, 0 to 1.

        Raises:
            SelectorError: the sequence has no visual token.
        """
        if not self.structure.visual.any():
            raise SelectorError("a sequence with an image", "only text", "A share of visual tokens needs visual tokens.")
        return float((self.mask & self.structure.visual).sum() / self.structure.visual.sum())

    @property
    def boxes(self) -> Float[np.ndarray, "token 4"]:
        """The (x0, y0, x1, y1) boxes of the members in original pixels, in the order of ``positions``."""
        self._check_visual("boxes")
        table = self.structure.visual_tokens()
        return table["box"][np.searchsorted(table["position"], self.positions)]

    def extended(self, length: int) -> PositionMask:
        """Return the mask over ``length`` positions; those past the layout are members when ``generated`` is true.

        Raises:
            LayoutError: ``length`` is shorter than the layout.
        """
        if length < self.structure.length:
            raise LayoutError(f"at least {self.structure.length} positions", str(length), "Give the length with the prompt.")
        return np.pad(self.mask, (0, length - self.structure.length), constant_values=self.generated)

    def require(self, what: str) -> TokenSet:
        """Return the set itself, unless it is empty; ``what`` says what it is needed for.

        Raises:
            SelectorError: the set is empty.
        """
        if self.count or self.generated:
            return self
        raise SelectorError(
            f"{what} with at least one token",
            f"the selector `{self.name}`, which selects nothing in {self.structure.summary}",
            "Leave this example out and record its count as 0, or choose a wider selector.",
        )

    def __or__(self, other: TokenSet) -> TokenSet:
        """Return the members of either set."""
        mask = self.mask | self._fitting(other).mask
        return self._joined(other, mask, "|", generated=self.generated or other.generated)

    def __and__(self, other: TokenSet) -> TokenSet:
        """Return the members of both sets."""
        mask = self.mask & self._fitting(other).mask
        return self._joined(other, mask, "&", generated=self.generated and other.generated)

    def __sub__(self, other: TokenSet) -> TokenSet:
        """Return the members that the other set lacks."""
        return self & ~other

    def __invert__(self) -> TokenSet:
        """Return the other positions, padding excluded."""
        mask = ~self.mask & self.structure.attended
        return replace(self, mask=mask, generated=not self.generated, name=f"~{self.name}")

    def __le__(self, other: TokenSet) -> bool:
        """Say whether the other set holds every member."""
        return (self - other) == replace(self, mask=np.zeros_like(self.mask), generated=False)

    def views(self, kind: ViewKind) -> TokenSet:
        """Return the members in views of one kind, ``global`` or ``tile``."""
        chosen = [index for index, view in enumerate(self.structure.views) if view.kind == kind]
        return self._in_views(chosen, f"views({kind})")

    def by_view(self) -> dict[int, TokenSet]:
        """Return the members in each view that has any, by the view's index in the layout."""
        parts = {index: self._in_views([index], view.name) for index, view in enumerate(self.structure.views)}
        return {index: part for index, part in parts.items() if part.count}

    def dilate(self, p: int, *, connectivity: Connectivity = 8) -> TokenSet:
        """Return the set grown by ``p`` cells on each sheet, across tile borders; a negative ``p`` erodes.

        Source: Schaumlöffel et al. 2026 (arXiv 2605.19792), padding p; that tiles are stitched and that diagonal
        neighbours count are our choices where the paper is silent.

        Raises:
            SelectorError: a member is not a visual token.
        """
        if p < 0:
            return self.erode(-p, connectivity=connectivity)
        return self._reshaped(lambda grid: dilate_grid(grid, p, connectivity), f"dilate({p})")

    def erode(self, p: int, *, connectivity: Connectivity = 8, border: Border = "object") -> TokenSet:
        """Return the set shrunk by ``p`` cells on each sheet; what lies outside a sheet counts as ``border``.

        Raises:
            SelectorError: a member is not a visual token.
        """
        if p < 0:
            return self.dilate(-p, connectivity=connectivity)
        return self._reshaped(lambda grid: erode_grid(grid, p, connectivity, border), f"erode({p})")

    def ring(self, p: int, *, connectivity: Connectivity = 8) -> TokenSet:
        """Return the cells that growing by ``p`` adds.

        Raises:
            SelectorError: ``p`` is below 1, or a member is not a visual token.
        """
        if p < 1:
            raise SelectorError("a ring of at least one cell", str(p), "Use `.erode` to shrink a set.")
        return replace(self.dilate(p, connectivity=connectivity) - self, name=f"{self.name}.ring({p})")

    def random_like(self, seed: int, *, pool: TokenSet | None = None, exclude: TokenSet | None = None) -> TokenSet:
        """Return as many tokens, uniformly from the pool (all visual tokens unless given) without ``exclude``.

        Raises:
            SelectorError: the pool is too small.
        """
        source = self._like(self.structure.visual, "image") if pool is None else pool
        source = self._fitting(source if exclude is None else source - exclude)
        return self._like(draw_positions(source.mask, self.count, seed=seed), f"random({self.name}, {seed})")

    def translate(self, seed: int, *, pool: TokenSet | None = None) -> TokenSet:
        """Return the same shape elsewhere: in the pool, clear of the set itself, the same move in every view.

        The pool is every cell that shows some of the original image, unless given. See `move_shape` for the draw.

        Raises:
            SelectorError: the set is empty, a member is not a visual token, or no place fits.
        """
        self.require("a shape to move")._check_visual("translate")
        free = inside_image(self.structure) if pool is None else self._fitting(pool).mask
        moved = move_shape(self.structure.sheets, self.mask, pool=free, seed=seed)
        if moved is None:
            raise SelectorError(
                f"a place for the {self.count} tokens of `{self.name}` beside themselves",
                f"a shape that fits nowhere else among {int(free.sum())} tokens",
                "Leave this example out of the control, or use `random_like`.",
            )
        return self._like(moved, f"translate({self.name}, {seed})")

    @cached_property
    def _grid(self) -> np.ndarray | None:
        touched = [sheet for sheet in self.structure.sheets if self.mask[sheet.positions].any()]
        if not self.regular or len(touched) != 1:
            return None
        inside = self.mask[touched[0].positions]
        block = touched[0].positions[_span(np.any(inside, axis=1)), _span(np.any(inside, axis=0))]
        return block if block.size == self.count and self.mask[block].all() else None

    def _joined(self, other: TokenSet, mask: PositionMask, sign: str, *, generated: bool) -> TokenSet:
        name = f"({self.name} {sign} {other.name})"
        return TokenSet(self.structure, mask, generated, self.regular and other.regular, name)

    def _fitting(self, other: TokenSet) -> TokenSet:
        if self.structure is not other.structure and self.structure != other.structure:
            raise LayoutError(
                f"two sets of one layout, as `{self.name}` of {self.structure.summary}",
                f"`{other.name}` of {other.structure.summary}",
                "Select both from the same layout, in the same padded batch.",
            )
        return other

    def _like(self, mask: PositionMask, name: str) -> TokenSet:
        return TokenSet(self.structure, mask, name=name)

    def _in_views(self, chosen: Sequence[int], name: str) -> TokenSet:
        keep = np.zeros_like(self.mask)
        for index in chosen:
            keep[self.structure.grid_positions[index]] = True
        return replace(self, mask=self.mask & keep, generated=False, name=f"{self.name}.{name}")

    def _reshaped(self, change: Callable[[BoolGrid], BoolGrid], name: str) -> TokenSet:
        self._check_visual(name)
        mask = np.zeros_like(self.mask)
        for sheet in self.structure.sheets:
            mask[sheet.positions] = change(self.mask[sheet.positions])
        return replace(self, mask=mask, name=f"{self.name}.{name}")

    def _check_visual(self, what: str) -> None:
        stray = np.flatnonzero(self.mask & ~self.structure.visual)
        if len(stray) or self.generated:
            raise SelectorError(
                f"only visual tokens in `{self.name}` for {what}",
                f"{len(stray)} other positions{' and generated ones' if self.generated else ''}",
                "Restrict it first: `(…) & image`.",
            )


def _span(flags: np.ndarray) -> slice:
    places = np.flatnonzero(flags)
    return slice(int(places[0]), int(places[-1]) + 1)
