"""The one place that turns interventions into hooks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase

import numpy as np
import torch
from torch import Tensor

from sightlens._types import Positions
from sightlens.errors import InterventionError
from sightlens.families.sites import Attention, Site
from sightlens.interventions import (
    Ablate,
    AblateHeads,
    Knockout,
    Moves,
    PatchIn,
    Phase,
    Rearrangement,
    Where,
    resolve_where,
)
from sightlens.layout import Layout
from sightlens.model.knockout import knock_out
from sightlens.model.rows import Edit, Row, Touched, edits
from sightlens.model.sites import Sites
from sightlens.model.spots import PLACES, VISUAL, SitePass, find_spot, flat_places, writable
from sightlens.model.taps import LiveSite
from sightlens.model.values import Change, Donor, ablation, head_values, patch
from sightlens.model.window import Window

EDGES = {"query", "query_patch"}
"""Dimensions of sites that hold attention edges."""


class Write(ABC):
    """What one intervention does to a site."""

    edit: Edit

    @abstractmethod
    def __call__(self, flat: Tensor | None, here: SitePass, row: int) -> int:
        """Change a row in place and return how many places that touches; with None only tell whether it would.

        Args:
            flat: the site's activations, laid out by `flat_places`.
            here: the site in the pass in progress.
            row: of the batch.
        """


@dataclass(frozen=True)
class Values(Write):
    """New values at the selected positions (and heads)."""

    edit: Edit
    at: Where
    heads: tuple[int, ...] | None
    change: Change
    phases: Sequence[Phase] = ("prefill", "decode")

    def __call__(self, flat: Tensor | None, here: SitePass, row: int) -> int:
        """Write what ``change`` makes of the old values."""
        spot = find_spot(here, resolve_where(self.at, here.window.layouts[row]), row, phases=self.phases)
        spot = spot.without_visual() if here.site.name == "hook_embed" else spot  # image features replace what stands there
        if flat is not None and len(spot.places):
            places = spot.places.to(flat.device)
            where = (places,) if self.heads is None else (places[:, None], torch.tensor(self.heads, device=places.device))
            flat[where] = self.change(flat[where], spot).to(flat.dtype)
        return len(spot.places)

    def delta(self, value: Tensor, site: Site, window: Window, row: int) -> Tensor:
        """Return what the write would add to a site's activations in one row."""
        new = writable(value, site)
        self(flat_places(new, site), SitePass.of(value, site, window), row)
        return new - value


@contextmanager
def applied(sites: Sites, rows: Sequence[Row], donors: Mapping[str, Donor], *, touched: Touched) -> Iterator[None]:
    """Apply each row's interventions, in order, to that row of every pass while the context is open.

    Hooks are removed whatever happens.

    Args:
        sites: of the model.
        rows: one per row of the batch; ``sites.window`` holds the layout of each.
        donors: values that interventions take by name.
        touched: counts what was changed.

    Raises:
        InterventionError: when one cannot be applied.
    """
    writes: dict[str, list[Write]] = {}
    knockouts: dict[int, list[Edit]] = {}
    for edit in edits(rows):
        if isinstance(edit.intervention, Knockout):
            for layer in sites.layers(edit.intervention.layers):
                knockouts.setdefault(layer, []).append(edit)
        else:
            for name, write in _writes(sites, edit, donors):
                writes.setdefault(name, []).append(write)
    with ExitStack() as stack:
        for name, group in writes.items():
            point = sites.point(name)
            handle = point.add_hook(_Rewriter(group, point.site, sites.window, touched))
            stack.callback(point.drop, handle)
        stack.enter_context(knock_out(sites, knockouts, touched))
        yield


def changes(sites: Sites, rows: Sequence[Row], donors: Mapping[str, Donor]) -> Iterator[tuple[str, Values]]:
    """Yield the hook names and new values of all interventions that write values; others are left out."""
    for edit in edits(rows):
        if not isinstance(edit.intervention, Knockout):
            yield from ((name, write) for name, write in _writes(sites, edit, donors) if isinstance(write, Values))


@dataclass(frozen=True)
class _Rewriter:
    """Everything that is done to one site, in order."""

    writes: Sequence[Write]
    site: Site
    window: Window
    touched: Touched

    def __call__(self, value: Tensor, hook: LiveSite) -> Tensor | None:
        """Return a changed copy, or None when the pass in progress holds none of the positions."""
        new, here = None, SitePass.of(value, self.site, self.window)
        for write in self.writes:
            for row in write.edit.rows:
                if new is None and write(None, here, row):
                    new = writable(value, self.site)
                if new is not None:
                    count = write(flat_places(new, self.site), here, row)
                    self.touched.add(write.edit.intervention, self.window.examples[row], count)
        return new


def _writes(sites: Sites, edit: Edit, donors: Mapping[str, Donor]) -> Iterator[tuple[str, Write]]:
    intervention, pictures = edit.intervention, any(layout.views for layout in sites.window.layouts)
    if isinstance(intervention, Ablate):
        for name in with_companions(sites, [intervention.site], follow=pictures and intervention.reinjected):
            _check_writable(sites, name, intervention)
            yield name, Values(edit, intervention.at, intervention.heads, ablation(intervention, name, donors))
    elif isinstance(intervention, PatchIn):
        for name in with_companions(sites, matching(sites, intervention), follow=pictures and intervention.reinjected):
            _check_writable(sites, name, intervention)
            yield name, Values(edit, intervention.at, intervention.heads, patch(intervention, name, donors), ("prefill",))
    elif isinstance(intervention, Rearrangement):
        for name in with_companions(sites, [intervention.site], follow=pictures):
            _check_writable(sites, name, intervention)
            yield name, Copies(edit, intervention)
    elif isinstance(intervention, AblateHeads):
        sites.layers(list(intervention.by_layer()))
        for layer, heads in intervention.by_layer().items():
            name, change = f"blocks.{layer}.attn.hook_z", head_values(sites, intervention, donors, layer=layer)
            _check_heads(sites, name, heads)
            yield name, Values(edit, intervention.at, heads, change, intervention.phases)
    else:
        raise InterventionError("a kind that sightlens.interventions offers", type(intervention).__name__, "Use one of those.")


def with_companions(sites: Sites, names: Sequence[str], *, follow: bool) -> list[str]:
    """Add the sites at which what the named ones hold comes in again, if the intervention follows it there."""
    return [*names, *(other for name in names if follow for other in sites.point(name).site.companions)]


def matching(sites: Sites, intervention: PatchIn) -> list[str]:
    """Return the hook names that a patch-in writes.

    Raises:
        HookError: when there is none.
    """
    layers = sites.layers(intervention.layers)
    names = [
        name
        for name, point in sites.points.items()
        if fnmatchcase(name, intervention.site) and (intervention.layers is None or point.site.layer in layers)
    ]
    if not names:
        sites.point(intervention.site)
    return names


def _check_writable(sites: Sites, name: str, intervention: Ablate | PatchIn | Rearrangement) -> None:
    site = sites.point(name).site
    got = f"{site.name} {list(site.dims)}"
    if not set(PLACES) & set(site.dims):
        raise InterventionError("a site with positions, visual tokens or patches", got, "Use a hook function there.")
    if site.tap == Attention("attn_mask") or (EDGES & set(site.dims) and not isinstance(intervention, PatchIn)):
        raise InterventionError("a site with positions or visual tokens", got, "Use Knockout for attention.")
    if EDGES & set(site.dims) and site.order is not None:
        raise InterventionError("attention over the keys of one picture", got, "Patch hook_z: here all pictures' patches are keys.")
    if site.dims[1] == "key" and isinstance(intervention, Rearrangement):
        raise InterventionError(
            "a site with positions or visual tokens", got, "Rearrange hook_k: these are keys, kept from earlier passes too."
        )
    if not isinstance(intervention, Rearrangement) and intervention.heads is not None:
        _check_heads(sites, name, intervention.heads)


def _check_heads(sites: Sites, name: str, heads: tuple[int, ...]) -> None:
    if "head" not in sites.point(name).site.dims:
        raise InterventionError("a site with heads (hook_q, hook_k, hook_v, hook_z, hook_result)", name, "Leave out heads=.")
    if max(heads) >= sites.heads(name):
        raise InterventionError(f"heads below {sites.heads(name)} at {name}", f"{heads}", "Heads count from 0.")


@dataclass(frozen=True)
class Copies(Write):
    """Activations of the row itself, carried to other positions."""

    edit: Edit
    intervention: Rearrangement

    def __call__(self, flat: Tensor | None, here: SitePass, row: int) -> int:
        """Make the copies; all are read before any is written.

        Raises:
            InterventionError: when a copy starts outside of the pass, or a position has no activation at the site.
        """
        moves, window = self._moves(here.site, here.window.layouts[row]), here.window
        targets, sources = (self._locate(positions, here, row) for positions in (moves.targets, moves.sources))
        targets, sources = targets[targets >= 0], sources[targets >= 0]
        if (sources < 0).any():
            got = f"one of positions {window.start}–{window.stop - 1}"
            raise InterventionError("a pass that computes every position to copy from", got, "Run the whole prompt at once.")
        if flat is not None:
            flat[torch.as_tensor(targets, device=flat.device)] = flat[torch.as_tensor(sources, device=flat.device)]
        return int((targets != sources).sum())

    def _locate(self, positions: Positions, here: SitePass, row: int) -> np.ndarray:
        """Return the flat places of each absolute position, -1 where the pass does not compute it."""
        window = here.window
        if here.dim not in VISUAL:
            inside = (positions >= window.start) & (positions < window.stop)
            return np.where(inside, positions - window.start + row * here.held, -1)
        if not window.layouts[row].structure.visual[positions].all():
            raise InterventionError(f"visual tokens at {here.site.name}", f"{self.intervention}", "Restrict it: `(…) & image`.")
        return here.shown(positions, row, name=str(self.intervention))[0].ravel()

    def _moves(self, site: Site, layout: Layout) -> Moves:
        """Return the copies; where visual features come in again, those of other positions are nothing to copy."""
        moves = self.intervention.moves(layout)
        if site.name == self.intervention.site:
            return moves
        held = layout.structure.visual[moves.targets]
        return Moves(moves.targets[held], moves.sources[held])
