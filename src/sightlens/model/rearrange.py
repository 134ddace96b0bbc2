"""Carrying activations from some positions of a run to others."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from sightlens._types import Positions
from sightlens.errors import InterventionError
from sightlens.families.sites import Site
from sightlens.interventions import Rearrangement
from sightlens.model.sites import Sites
from sightlens.model.window import Window


def rearrange(sites: Sites, intervention: Rearrangement, count: Callable[[int], None]) -> Callable[[], None]:
    """Make the intervention's copies at its site, and return what undoes that.

    Raises:
        InterventionError: at a site without positions, and at run time when a copy starts outside of the pass in progress.
    """
    point = sites.point(intervention.site)
    if "position" not in point.site.dims and "token" not in point.site.dims:
        got = f"{point.site.name} {list(point.site.dims)}"
        raise InterventionError("a site with positions or visual tokens", got, "Rearrange hook_merged_embed or a residual.")
    change = _Copies(sites.window, intervention, point.site, count)
    handle = point.add_hook(lambda value, hook: change(value))
    return lambda: point.drop(handle)


@dataclass(frozen=True)
class _Copies:
    window: Window
    intervention: Rearrangement
    site: Site
    count: Callable[[int], None]

    def __call__(self, value: Tensor) -> Tensor | None:
        """Return a changed copy, or None when the pass in progress holds none of the positions."""
        targets, sources = self._rows()
        if len(targets) == 0:
            return None
        new = value.clone()
        new.flatten(0, 1)[targets.to(value.device)] = value.flatten(0, 1)[sources.to(value.device)]
        self.count(int((targets != sources).sum()))
        return new

    def _rows(self) -> tuple[Tensor, Tensor]:
        """Return where the copies end and start in the site's first two dimensions, flattened, over the batch."""
        ends, starts = [], []
        for example, layout in enumerate(self.window.layouts):
            moves = self.intervention.moves(layout)
            targets, sources = (self._locate(places, example) for places in (moves.targets, moves.sources))
            inside = targets >= 0
            if (sources[inside] < 0).any():
                raise InterventionError(
                    "a pass that computes every position to copy from",
                    f"one of positions {self.window.start}–{self.window.stop - 1}",
                    "Run the whole prompt at once.",
                )
            ends.append(targets[inside])
            starts.append(sources[inside])
        return torch.as_tensor(np.concatenate(ends)), torch.as_tensor(np.concatenate(starts))

    def _locate(self, places: Positions, example: int) -> np.ndarray:
        """Return the flat row of each absolute position, -1 where the pass does not compute it."""
        layout, window = self.window.layouts[example], self.window
        if "token" not in self.site.dims:
            inside = (places >= window.start) & (places < window.stop)
            return np.where(inside, places - window.start + example * (window.stop - window.start), -1)
        visual = layout.visual_tokens()["position"]
        if not np.isin(places, visual).all():
            raise InterventionError(f"visual tokens at {self.site.name}", f"{self.intervention}", "Restrict it: `(…) & image`.")
        return np.searchsorted(visual, places) + sum(len(before.visual_tokens()) for before in window.layouts[:example])
