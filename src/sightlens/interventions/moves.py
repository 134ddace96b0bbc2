"""Interventions that carry activations from some positions of a run to others: shuffles and containers."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import numpy as np
from jaxtyping import Int

from sightlens.errors import InterventionError, SelectorError
from sightlens.interventions.intervention import MERGED, Intervention, register
from sightlens.interventions.where import Where, resolve_where
from sightlens.layout import Layout, TokenSet

Scope = Literal["selection", "view", "image"]
Places = Int[np.ndarray, " move"]


@dataclass(frozen=True, eq=False)
class Moves:
    """Which activation goes where: position ``targets[k]`` gets what stood at ``sources[k]``; all are read before any is written."""

    targets: Places
    sources: Places


class Rearrangement(Intervention):
    """A change that only copies activations of the run between its own positions."""

    site: str

    @abstractmethod
    def moves(self, layout: Layout) -> Moves:
        """Return the copies to make in one example; they do not depend on the padding of its batch.

        Raises:
            SelectorError: when nothing can move.
        """

    def require(self, layout: Layout) -> None:
        """Refuse an example in which nothing can move."""
        super().require(layout)
        self.moves(layout)


@register
@dataclass(frozen=True)
class Shuffle(Rearrangement):
    """Permute activations among the selected positions; the positions themselves stay.

    Position ``p[i]`` gets the activation of ``p[π(i)]``. ``scope`` says among which positions: the whole ``"selection"``,
    each ``"view"`` by itself, or each ``"image"`` with all its views. π is uniform over the permutations that move
    something. A token that is alone in its scope stays; when all are, the shuffle is refused.

    Schaumlöffel et al. 2026 (arXiv 2605.19792), shuffles: object tokens (the scope is open for models with several views;
    within each view is the usual choice) and all visual tokens.
    """

    kind: ClassVar[str] = "shuffle"
    places: ClassVar[tuple[str, ...]] = ("at",)

    at: Where
    scope: Scope = "selection"
    seed: int = 0
    site: str = MERGED
    inverted: bool = False
    """Whether π⁻¹ takes the place of π."""

    def check(self) -> None:
        """Refuse a negative seed."""
        _check_seed(self.seed)

    def inverse(self) -> Shuffle:
        """Return the shuffle that undoes this one."""
        return replace(self, inverted=not self.inverted)

    def moves(self, layout: Layout) -> Moves:
        """Return where each activation goes, those that stay included.

        Raises:
            SelectorError: when every token is alone in its scope, or one outside the image has no view.
        """
        tokens, rng = resolve_where(self.at, layout), np.random.default_rng(self.seed)
        groups = [group for group in self._groups(tokens) if len(group)]
        if all(len(group) == 1 for group in groups):
            raise SelectorError(
                f"two or more tokens in one {self.scope} to shuffle", f"{len(groups)} alone, of `{tokens.name}`", "Leave this example out."
            )
        before = np.concatenate(groups)
        after = np.concatenate([group[_permutation(len(group), rng)] for group in groups])
        return Moves(after, before) if self.inverted else Moves(before, after)

    def fixed_points(self, layout: Layout) -> float:
        """Return the share of the selected tokens that stay where they are, 0 to 1; report it with a shuffle's effect.

        Raises:
            SelectorError: as for `moves`.
        """
        moves = self.moves(layout)
        return float((moves.targets == moves.sources).mean())

    def _groups(self, tokens: TokenSet) -> Iterator[Places]:
        chosen = np.flatnonzero(tokens.mask)
        if self.scope == "selection":
            yield chosen
            return
        table = tokens.structure.visual_tokens()
        if stray := sorted(set(chosen.tolist()) - set(table["position"].tolist())):
            raise SelectorError(f"visual tokens for scope {self.scope}", f"`{tokens.name}` with {stray[:8]}", "Restrict it: `(…) & image`.")
        inside = table[tokens.mask[table["position"]]]
        for index in np.unique(inside[self.scope]):
            yield inside["position"][inside[self.scope] == index]


@register
@dataclass(frozen=True)
class Containerize(Rearrangement):
    """Copy object tokens outward: each cell of the ring around them gets the activation of a randomly drawn one.

    The ring is what growing the selection by ``padding`` cells adds. It grows in each view, across the borders of tiles, and
    a ring cell draws (with replacement) from the selected tokens of its own plane: those of its global view, or those of all
    tiles of its image. The selected tokens keep their own activations.

    Schaumlöffel et al. 2026 (arXiv 2605.19792), containerization: paddings 1 and 2, ten seeds, scored against a true box
    grown by as many cells (`sightlens.metrics.expand_box` with `Layout.cell_size`).
    """

    kind: ClassVar[str] = "containerize"
    places: ClassVar[tuple[str, ...]] = ("at",)

    at: Where
    padding: int = 1
    seed: int = 0
    site: str = MERGED

    def check(self) -> None:
        """Refuse a padding below 1 and a negative seed."""
        if self.padding < 1:
            raise InterventionError("a padding of at least one cell", f"{self.padding}", "Padding 0 is the run without intervention.")
        _check_seed(self.seed)

    def moves(self, layout: Layout) -> Moves:
        """Return the object token that each ring cell receives.

        Raises:
            SelectorError: when a selected position is no visual token, or there is no ring because the selection fills its views.
        """
        tokens, rng = resolve_where(self.at, layout).require("at"), np.random.default_rng(self.seed)
        ring = tokens.ring(self.padding).require("a ring around the object")
        targets, sources = [], []
        for sheet in layout.structure.sheets:
            cells = np.sort(sheet.positions.ravel())
            inside = cells[tokens.mask[cells]]
            if len(inside):
                targets.append(cells[ring.mask[cells]])
                sources.append(rng.choice(inside, size=len(targets[-1])))
        return Moves(np.concatenate(targets), np.concatenate(sources))


def _permutation(count: int, rng: np.random.Generator) -> Places:
    """Return a permutation that moves something, uniformly; the identity of a single token."""
    still = np.arange(count)
    drawn = rng.permutation(count)
    while count > 1 and (drawn == still).all():
        drawn = rng.permutation(count)
    return drawn


def _check_seed(seed: int) -> None:
    if seed < 0:
        raise InterventionError("a seed of 0 or more", str(seed), "Choose another seed.")
