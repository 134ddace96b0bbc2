"""Where the positions that an intervention names lie in a site's activations, pass by pass."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from sightlens._types import Positions
from sightlens.families.sites import Site
from sightlens.interventions import Phase
from sightlens.layout import Layout, TokenSet
from sightlens.model.patches import merged_patches
from sightlens.model.window import Carried, Window

PATCHES = ("patch", "query_patch")
VISUAL = ("token", *PATCHES)
PLACES = ("position", "query", "key", *VISUAL)
"""Dimensions along which an intervention finds the positions it names; the first of a site's own counts."""


@dataclass(frozen=True)
class SitePass:
    """A site in the pass in progress.

    Attributes:
        site: one with a dimension of places.
        window: of the pass.
        held: places that each entry of the site's first dimension holds in this pass; all of them where places come first.
    """

    site: Site
    window: Window
    held: int

    @classmethod
    def of(cls, value: Tensor, site: Site, window: Window) -> SitePass:
        """Describe the pass in which a site holds an activation."""
        return cls(site, window, value.shape[_axis(site)])

    @property
    def dim(self) -> str:
        """What a place is."""
        return self.site.dims[_axis(self.site)]

    def shown(self, positions: Positions, row: int, *, name: str) -> tuple[Int[np.ndarray, "token place"], Carried]:
        """Return where each visual token's outputs, or patches, lie, and its index among the row's visual tokens.

        Raises:
            SelectorError: for visual tokens that blend several outputs.
        """
        outputs, inside = self.window.features(positions, row, name=name)
        if self.dim == "token":
            return outputs[:, None], inside
        return merged_patches(outputs, self.window.layouts, self.window.grid, held=self.held), inside


@dataclass(frozen=True)
class Spot:
    """Some positions of one row that the pass in progress computes.

    Attributes:
        layout: of the row's example.
        example: its index in the prompt.
        places: index of each in the site's activations as :func:`flat_places` lays them out.
        positions: absolute, of each place.
        order: index of each in the whole selection, -1 for generated positions.
        whole: places that the whole selection has, in this pass or another.
        seeds: a number for each place that does not depend on its batch.
    """

    layout: Layout
    example: int
    places: Int[Tensor, " n"]
    positions: Int[np.ndarray, " n"]
    order: Int[np.ndarray, " n"]
    whole: int
    seeds: Int[np.ndarray, " n"]

    def without_visual(self) -> Spot:
        """Return the spot without visual tokens."""
        visual = self.layout.structure.visual
        keep = np.array([position >= len(visual) or not visual[position] for position in self.positions.tolist()], dtype=bool)
        kept = {name: array[keep] for name, array in (("positions", self.positions), ("order", self.order), ("seeds", self.seeds))}
        return replace(self, places=self.places[torch.as_tensor(keep)], **kept)


def _axis(site: Site) -> int:
    return next(axis for axis, dim in enumerate(site.dims) if dim in PLACES)


def _batched(site: Site) -> bool:
    return site.dims[0] in ("batch", "view")


def flat_places(value: Tensor, site: Site) -> Tensor:
    """Lay an activation out with one leading dimension, in which the places of a :class:`Spot` count."""
    moved = value.movedim(_axis(site), int(_batched(site)))
    return moved.flatten(0, 1) if _batched(site) else moved


def writable(value: Tensor, site: Site) -> Tensor:
    """Return a copy of an activation, of which :func:`flat_places` is a view."""
    axis, first = _axis(site), int(_batched(site))
    return value.movedim(axis, first).clone(memory_format=torch.contiguous_format).movedim(first, axis)


def find_spot(here: SitePass, tokens: TokenSet, row: int, *, phases: Sequence[Phase]) -> Spot:
    """Return where a row's positions lie in a site.

    Raises:
        SelectorError: in the tower, for visual tokens that blend several outputs of the projector.
    """
    window, layout = here.window, here.window.layouts[row]
    if here.dim in VISUAL:
        places, inside = here.shown(tokens.positions, row, name=tokens.name)
        each, count = places.shape[1], places.size
        positions = np.repeat(layout.visual_tokens()["position"][inside], each)
        seeds = (inside[:, None] * each + np.arange(each)).ravel()
        return Spot(layout, window.examples[row], torch.as_tensor(places.ravel()), positions, np.arange(count), count, seeds)
    first = window.stop - here.held if here.dim == "key" else window.start
    positions, order = window.inside(tokens, phases, first=first)
    places = torch.as_tensor(positions - first + row * here.held)
    seeds = positions - layout.structure.padding
    return Spot(layout, window.examples[row], places, positions, order, tokens.count, seeds)
