"""The one place that turns interventions into hooks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial

import numpy as np
import torch
from torch import Tensor

from sightlens._types import Positions
from sightlens.errors import InterventionError, listing
from sightlens.families.sites import Site
from sightlens.interventions import (
    Ablate,
    AblateHeads,
    Knockout,
    Mean,
    Moves,
    PatchIn,
    Phase,
    Rearrangement,
    Where,
    resolve_where,
)
from sightlens.layout import Layout
from sightlens.model.cache import Cache
from sightlens.model.knockout import knock_out
from sightlens.model.rows import Edit, Row, Touched, edits
from sightlens.model.sites import Sites
from sightlens.model.spots import Spot, find_spot, flat_places, row_offset
from sightlens.model.taps import LiveSite
from sightlens.model.window import Window

Donor = Cache | Mean | Tensor


Change = Callable[[Tensor, Spot], Tensor]
"""From the activations ``[n, …]`` of one spot to new ones of the same shape."""


class Write(ABC):
    """What one intervention does to a site."""

    edit: Edit

    @abstractmethod
    def __call__(self, flat: Tensor | None, site: Site, window: Window, row: int) -> int:
        """Change a row in place and return how many positions that touches; with None only tell whether it would.

        Args:
            flat: the site's activations, their first two dimensions flattened.
            site: where.
            window: of the pass in progress.
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

    def __call__(self, flat: Tensor | None, site: Site, window: Window, row: int) -> int:
        """Write what ``change`` makes of the old values."""
        spot = find_spot(site, window, resolve_where(self.at, window.layouts[row]), row, phases=self.phases)
        spot = spot.without_visual() if site.name == "hook_embed" else spot  # image features replace what stands there
        if flat is not None and len(spot.places):
            places = spot.places.to(flat.device)
            where = (places,) if self.heads is None else (places[:, None], torch.tensor(self.heads, device=places.device))
            flat[where] = self.change(flat[where], spot).to(flat.dtype)
        return len(spot.places)

    def delta(self, value: Tensor, site: Site, window: Window, row: int) -> Tensor:
        """Return what the write would add to a site's activations in one row."""
        new = value.clone()
        self(flat_places(new, site), site, window, row)
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
        new: Tensor | None = None
        for write in self.writes:
            for row in write.edit.rows:
                if new is None and write(None, self.site, self.window, row):
                    new = value.clone()
                if new is not None:
                    count = write(flat_places(new, self.site), self.site, self.window, row)
                    self.touched.add(write.edit.intervention, self.window.examples[row], count)
        return new


def _writes(sites: Sites, edit: Edit, donors: Mapping[str, Donor]) -> Iterator[tuple[str, Write]]:
    intervention, pictures = edit.intervention, any(layout.views for layout in sites.window.layouts)
    if isinstance(intervention, Ablate):
        for name in with_companions(sites, [intervention.site], follow=pictures and intervention.reinjected):
            _check_writable(sites, name, intervention.heads)
            yield name, Values(edit, intervention.at, intervention.heads, _ablation(intervention, name, donors))
    elif isinstance(intervention, PatchIn):
        for name in with_companions(sites, matching(sites, intervention), follow=pictures and intervention.reinjected):
            _check_writable(sites, name, intervention.heads)
            yield name, Values(edit, intervention.at, intervention.heads, _patch(intervention, name, donors), ("prefill",))
    elif isinstance(intervention, Rearrangement):
        for name in with_companions(sites, [intervention.site], follow=pictures):
            _check_writable(sites, name, None)
            yield name, Copies(edit, intervention)
    elif isinstance(intervention, AblateHeads):
        sites.layers(list(intervention.by_layer()))
        for layer, heads in intervention.by_layer().items():
            name, change = f"blocks.{layer}.attn.hook_z", _head_values(sites, intervention, donors, layer=layer)
            _check_writable(sites, name, heads)
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


def _check_writable(sites: Sites, name: str, heads: tuple[int, ...] | None) -> None:
    site = sites.point(name).site
    if "position" not in site.dims and "token" not in site.dims:
        raise InterventionError("a site with positions or visual tokens", f"{site.name} {list(site.dims)}", "Use Knockout for attention.")
    if heads is not None and "head" not in site.dims:
        raise InterventionError("a site with heads (hook_q, hook_k, hook_v, hook_z, hook_result)", site.name, "Leave out heads=.")
    if heads is not None and max(heads) >= sites.heads(name):
        raise InterventionError(f"heads below {sites.heads(name)} at {name}", f"{heads}", "Heads count from 0.")


@dataclass(frozen=True)
class Copies(Write):
    """Activations of the row itself, carried to other positions."""

    edit: Edit
    intervention: Rearrangement

    def __call__(self, flat: Tensor | None, site: Site, window: Window, row: int) -> int:
        """Make the copies; all are read before any is written.

        Raises:
            InterventionError: when a copy starts outside of the pass, or a position has no activation at the site.
        """
        moves = self._moves(site, window.layouts[row])
        targets, sources = (self._locate(places, site, window, row) for places in (moves.targets, moves.sources))
        targets, sources = targets[targets >= 0], sources[targets >= 0]
        if (sources < 0).any():
            got = f"one of positions {window.start}–{window.stop - 1}"
            raise InterventionError("a pass that computes every position to copy from", got, "Run the whole prompt at once.")
        if flat is not None:
            flat[torch.as_tensor(targets, device=flat.device)] = flat[torch.as_tensor(sources, device=flat.device)]
        return int((targets != sources).sum())

    def _locate(self, places: Positions, site: Site, window: Window, row: int) -> np.ndarray:
        """Return the flat place of each absolute position, -1 where the pass does not compute it."""
        if "token" not in site.dims:
            return np.where((places >= window.start) & (places < window.stop), places + row_offset(window, row), -1)
        layout = window.layouts[row]
        if not layout.structure.visual[places].all():
            raise InterventionError(f"visual tokens at {site.name}", f"{self.intervention}", "Restrict it: `(…) & image`.")
        alone = [window.features(layout.at([place]), row)[0] for place in places.tolist()]
        return np.concatenate([np.zeros(0, dtype=np.int64), *alone])

    def _moves(self, site: Site, layout: Layout) -> Moves:
        """Return the copies; where visual features come in again, those of other positions are nothing to copy."""
        moves = self.intervention.moves(layout)
        if site.name == self.intervention.site:
            return moves
        held = layout.structure.visual[moves.targets]
        return Moves(moves.targets[held], moves.sources[held])


def _head_values(sites: Sites, intervention: AblateHeads, donors: Mapping[str, Donor], *, layer: int) -> Change:
    if intervention.value == "zero":
        return lambda old, spot: torch.zeros_like(old)
    means, shape = donors.get("head_mean"), (sites.n_layers, sites.n_heads)
    if not isinstance(means, Tensor) or means.shape[:2] != shape:
        got = f"donors {listing(sorted(donors)) or 'none'}" if means is None else f"{type(means).__name__} of another shape"
        raise InterventionError(f"a donor 'head_mean' [{shape[0]}, {shape[1]}, d_head]", got, "Call fit_head_mean(model, prompts) first.")

    def change(old: Tensor, spot: Spot) -> Tensor:
        values = means[layer, list(intervention.by_layer()[layer])].to(old)
        if values.shape != old.shape[1:]:
            raise InterventionError(f"head means of {list(old.shape[1:])}", f"{list(values.shape)}", "Call fit_head_mean(model, prompts).")
        return values.expand_as(old)

    return change


def _ablation(intervention: Ablate, name: str, donors: Mapping[str, Donor]) -> Change:
    if intervention.value == "zero":
        return lambda old, spot: torch.zeros_like(old)
    if intervention.value == "noise":
        return partial(_noised, intervention)
    vector = _vector(intervention, donors) if name == intervention.site else _companion_vector(intervention, name, donors)

    def change(old: Tensor, spot: Spot) -> Tensor:
        if vector.ndim != 1 or vector.shape != old.shape[-1:]:
            raise InterventionError(f"a vector [{old.shape[-1]}]", f"{list(vector.shape)}", f"Measure it at {intervention.site}.")
        return vector.to(old).expand_as(old)

    return change


def _noised(intervention: Ablate, old: Tensor, spot: Spot) -> Tensor:
    generator, noise = torch.Generator(), torch.empty(old.shape)
    for index, position in enumerate(spot.real_positions):
        # drawn per position, so that padding, the batch and passes over part of the sequence do not matter
        generator.manual_seed((intervention.seed * 1_000_003 + position) % 2**63)
        noise[index] = torch.randn(old.shape[1:], generator=generator)
    spread = old.float().flatten(1).std(dim=1, unbiased=False)
    return old + intervention.scale * spread.view(-1, *[1] * (old.ndim - 1)).to(old) * noise.to(old)


def _vector(intervention: Ablate, donors: Mapping[str, Donor]) -> Tensor:
    donor = donors.get(intervention.value)
    if donor is None:
        hint = "Call model.fit_mean(prompts) first." if intervention.value == "mean" else "Pass donors={name: vector}."
        raise InterventionError(f"a donor named {intervention.value!r}", f"donors {listing(sorted(donors)) or 'none'}", hint)
    if isinstance(donor, Cache):
        raise InterventionError("a vector or a Mean", "a cache", "Use PatchIn to put in another run's activations.")
    if isinstance(donor, Mean) and donor.site != intervention.site:
        raise InterventionError(f"a mean measured at {intervention.site}", f"one of {donor.site}", "Measure the mean at that site.")
    return donor.vector if isinstance(donor, Mean) else donor


def _companion_vector(intervention: Ablate, name: str, donors: Mapping[str, Donor]) -> Tensor:
    vector, donor = _vector(intervention, donors), donors[intervention.value]
    if not isinstance(donor, Mean):
        return torch.zeros_like(vector)
    if name not in donor.companions:
        raise InterventionError(
            f"a mean that holds {name} too",
            f"one of {listing([donor.site, *donor.companions])}",
            "Measure it with model.fit_mean, or say reinjected=False.",
        )
    return donor.companions[name]


def _patch(intervention: PatchIn, name: str, donors: Mapping[str, Donor]) -> Change:
    cache = donors.get(intervention.donor)
    if not isinstance(cache, Cache) or name not in cache:
        got = f"a cache of {listing(list(cache), limit=6)}" if isinstance(cache, Cache) else f"donors {listing(sorted(donors)) or 'none'}"
        raise InterventionError(
            f"a donor {intervention.donor!r} that holds {name}", got, "Capture it with run_with_cache, pass it in donors=."
        )
    layouts = cache.window.layouts

    def change(old: Tensor, spot: Spot) -> Tensor:
        donor = spot.example if len(layouts) > 1 else 0
        given = _donor_values(cache, name, intervention, donor).to(old)
        chosen = resolve_where(intervention.at, spot.layout)
        wanted = int((chosen.mask & chosen.structure.visual).sum()) if "token" in cache.sites[name].dims else chosen.count
        if len(given) != wanted or given.shape[1:] != old.shape[1:]:
            got = f"{len(given)} of {list(given.shape[1:])}"
            raise InterventionError(f"{wanted} donor values of {list(old.shape[1:])}", got, "Make at= and source= select equally many.")
        given = given[torch.as_tensor(spot.order, device=given.device)]
        if intervention.mode == "add":
            return old + intervention.alpha * given
        return given if intervention.mode == "replace" else old + intervention.alpha * (given - old)

    return change


def _donor_values(cache: Cache, name: str, intervention: PatchIn, donor: int) -> Tensor:
    tokens = resolve_where(intervention.source, cache.window.layouts[donor])
    value, spot = cache[name], find_spot(cache.sites[name], cache.window, tokens, donor, phases=("prefill",))
    rows = flat_places(value, cache.sites[name])[spot.places.to(value.device)]
    return rows if intervention.heads is None else rows[:, list(intervention.heads)]
