"""Where the positions that an intervention names lie in a site's activations, pass by pass."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from sightlens.families.sites import Site
from sightlens.interventions import Phase
from sightlens.layout import Layout, TokenSet
from sightlens.model.window import Window


@dataclass(frozen=True)
class Spot:
    """Some positions of one row that the pass in progress computes.

    Attributes:
        layout: of the row's example.
        example: its index in the prompt.
        places: index of each position in the site's first two dimensions, flattened.
        positions: absolute; at sites of the tower, index among the example's visual tokens.
        order: index of each in the token set, -1 for generated positions.
    """

    layout: Layout
    example: int
    places: Int[Tensor, " n"]
    positions: Int[np.ndarray, " n"]
    order: Int[np.ndarray, " n"]

    def without_visual(self) -> Spot:
        """Return the spot without visual tokens."""
        visual = self.layout.structure.visual
        keep = np.array([position >= len(visual) or not visual[position] for position in self.positions.tolist()], dtype=bool)
        return replace(self, places=self.places[torch.as_tensor(keep)], positions=self.positions[keep], order=self.order[keep])

    @property
    def real_positions(self) -> list[int]:
        """The positions counted from the example's first real token, so that they do not depend on its batch."""
        return (self.positions - self.layout.structure.padding).tolist()


def flat_places(value: Tensor, site: Site) -> Tensor:
    """Return a view of an activation with one leading dimension, in which the places of a :class:`Spot` count."""
    return value if site.dims[0] == "token" else value.flatten(0, 1)


def find_spot(site: Site, window: Window, tokens: TokenSet, row: int, *, phases: Sequence[Phase]) -> Spot:
    """Return where a row's positions lie in a site, for the pass that a window describes."""
    if "token" in site.dims:
        rows, inside = window.features(tokens, row)
        return Spot(window.layouts[row], window.examples[row], torch.as_tensor(rows), inside, np.arange(len(inside)))
    positions, order = window.inside(tokens, phases)
    places = torch.as_tensor(positions + row_offset(window, row))
    return Spot(window.layouts[row], window.examples[row], places, positions, order)


def row_offset(window: Window, row: int) -> int:
    """Return what to add to a position to find it in a flattened site of the decoder."""
    return row * (window.stop - window.start) - window.start
