"""The one place that turns interventions into hooks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase

import torch
from torch import Tensor

from sightlens.errors import InterventionError, listing
from sightlens.families.sites import Attention, Site
from sightlens.interventions import Ablate, AblateHeads, Intervention, Knockout, Mean, PatchIn, Phase, Rearrangement, Where, resolve_where
from sightlens.layout import TokenSet
from sightlens.model.cache import Cache
from sightlens.model.knockout import knock_out
from sightlens.model.rearrange import rearrange
from sightlens.model.sites import Sites
from sightlens.model.taps import LiveSite
from sightlens.model.window import Window

Donor = Cache | Mean | Tensor
Remove = Callable[[], None]
Change = Callable[[Tensor, int], Tensor]
"""From the activations ``[n, …]`` of one example and its index to new ones of the same shape."""


@contextmanager
def applied(sites: Sites, interventions: Sequence[Intervention], donors: Mapping[str, Donor]) -> Iterator[None]:
    """Apply interventions in order while the context is open; afterwards check that each touched something.

    Hooks are removed whatever happens.

    Raises:
        InterventionError: when one cannot be applied, or touched nothing.
    """
    touched = [0] * len(interventions)

    def counter(index: int) -> Callable[[int], None]:
        def count(positions: int) -> None:
            touched[index] += positions

        return count

    removers: list[Remove] = []
    try:
        for index, intervention in enumerate(interventions):
            removers.extend(_install(sites, intervention, donors, count=counter(index)))
        yield
    finally:
        for remove in reversed(removers):
            remove()
    for intervention, count in zip(interventions, touched, strict=True):
        if count == 0:
            raise InterventionError(
                "an intervention that touches at least one position",
                f"{intervention}, which touched none",
                "Check its selectors with prompt.layout.select(…), its layers and its phases.",
            )


def _install(sites: Sites, intervention: Intervention, donors: Mapping[str, Donor], *, count: Callable[[int], None]) -> Iterator[Remove]:
    if isinstance(intervention, Knockout):
        yield from knock_out(sites, intervention, count)
    elif isinstance(intervention, Ablate):
        point = sites.point(intervention.site)
        yield _rewrite(point, _Rewrite(sites.window, intervention.at, intervention.heads, _ablation(intervention, donors), count))
    elif isinstance(intervention, PatchIn):
        for name in _matching(sites, intervention):
            change = _patch(intervention, name, donors)
            yield _rewrite(sites.point(name), _Rewrite(sites.window, intervention.at, intervention.heads, change, count))
    elif isinstance(intervention, Rearrangement):
        yield rearrange(sites, intervention, count)
    elif isinstance(intervention, AblateHeads):
        yield from _silence(sites, intervention, donors, count=count)
    else:
        raise InterventionError("a kind that sightlens.interventions offers", type(intervention).__name__, "Use one of those.")


def _silence(sites: Sites, intervention: AblateHeads, donors: Mapping[str, Donor], *, count: Callable[[int], None]) -> Iterator[Remove]:
    sites.layers(list(intervention.by_layer()))
    for layer, heads in intervention.by_layer().items():
        change = _head_values(sites, intervention, donors, layer=layer)
        rewrite = _Rewrite(sites.window, intervention.at, heads, change, count, intervention.phases)
        yield _rewrite(sites.point(f"blocks.{layer}.attn.hook_z"), rewrite)


def _head_values(sites: Sites, intervention: AblateHeads, donors: Mapping[str, Donor], *, layer: int) -> Change:
    if intervention.value == "zero":
        return lambda old, example: torch.zeros_like(old)
    means, shape = donors.get("head_mean"), (sites.n_layers, sites.n_heads)
    if not isinstance(means, Tensor) or means.shape[:2] != shape:
        got = f"donors {listing(sorted(donors)) or 'none'}" if means is None else f"{type(means).__name__} of another shape"
        raise InterventionError(f"a donor 'head_mean' [{shape[0]}, {shape[1]}, d_head]", got, "Call fit_head_mean(model, prompts) first.")
    return lambda old, example: means[layer, list(intervention.by_layer()[layer])].to(old).expand_as(old)


def _matching(sites: Sites, intervention: PatchIn) -> list[str]:
    layers = sites.layers(intervention.layers)
    names = [
        name
        for name, point in sites.points.items()
        if fnmatchcase(name, intervention.site) and (intervention.layers is None or point.site.layer in layers)
    ]
    if not names:
        sites.point(intervention.site)
    return names


@dataclass(frozen=True)
class _Rewrite:
    """A change to the selected positions (and heads) of every example of a batch."""

    window: Window
    at: Where
    heads: tuple[int, ...] | None
    change: Change
    count: Callable[[int], None]
    phases: tuple[Phase, ...] = ("prefill", "decode")

    def __call__(self, value: Tensor, site: Site) -> Tensor | None:
        """Return a changed copy, or None when the pass in progress holds none of the positions."""
        if ("decode" if self.window.decoding else "prefill") not in self.phases:
            return None
        new: Tensor | None = None
        for example, layout in enumerate(self.window.layouts):
            rows = site_rows(site, self.window, resolve_where(self.at, layout), example).to(value.device)
            if len(rows) == 0:
                continue
            new = value.clone() if new is None else new
            self._change_rows(new.flatten(0, 1), rows, example)
            self.count(len(rows))
        return new

    def _change_rows(self, flat: Tensor, rows: Tensor, example: int) -> None:
        where = (rows,) if self.heads is None else (rows[:, None], torch.tensor(self.heads, device=rows.device))
        flat[where] = self.change(flat[where], example).to(flat.dtype)


def _rewrite(point: LiveSite, rewrite: _Rewrite) -> Remove:
    site, heads = point.site, rewrite.heads
    if "position" not in site.dims and "token" not in site.dims:
        raise InterventionError("a site with positions or visual tokens", f"{site.name} {list(site.dims)}", "Use Knockout for attention.")
    if heads is not None and "head" not in site.dims:
        raise InterventionError("a site with heads (hook_q, hook_k, hook_v, hook_z, hook_result)", site.name, "Leave out heads=.")
    if heads is not None and not isinstance(site.tap, Attention) and max(heads) >= (site.tap.heads or 0):
        raise InterventionError(f"heads below {site.tap.heads} at {site.name}", f"{heads}", "Heads count from 0.")
    handle = point.add_hook(lambda value, hook: rewrite(value, site))
    return lambda: point.drop(handle)


def site_rows(site: Site, window: Window, tokens: TokenSet, example: int) -> Tensor:
    """Return where an example's positions lie in a site's first two dimensions, flattened."""
    if "token" in site.dims:
        before = sum(len(layout.visual_tokens()) for layout in window.layouts[:example])
        inside = tokens.mask[window.layouts[example].visual_tokens()["position"]]
        return torch.as_tensor(inside.nonzero()[0] + before)
    return torch.as_tensor(window.queries(tokens) + example * (window.stop - window.start))


def _ablation(intervention: Ablate, donors: Mapping[str, Donor]) -> Change:
    if intervention.value == "zero":
        return lambda old, example: torch.zeros_like(old)
    if intervention.value == "noise":
        return lambda old, example: _noised(old, intervention, example)
    vector = _vector(intervention, donors)

    def change(old: Tensor, example: int) -> Tensor:
        if vector.shape[-1:] != old.shape[-1:] or vector.ndim > 1:
            raise InterventionError(f"a vector [{old.shape[-1]}]", f"{list(vector.shape)}", f"Measure it at {intervention.site}.")
        return vector.to(old).expand_as(old)

    return change


def _noised(old: Tensor, intervention: Ablate, example: int) -> Tensor:
    generator = torch.Generator().manual_seed(intervention.seed * 1_000_003 + example)
    noise = torch.randn(old.shape, generator=generator).to(old)
    return old + intervention.scale * old.float().std(unbiased=False).to(old) * noise


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


def _patch(intervention: PatchIn, name: str, donors: Mapping[str, Donor]) -> Change:
    cache = donors.get(intervention.donor)
    if not isinstance(cache, Cache) or name not in cache:
        got = f"a cache of {listing(list(cache), limit=6)}" if isinstance(cache, Cache) else f"donors {listing(sorted(donors)) or 'none'}"
        raise InterventionError(
            f"a donor {intervention.donor!r} that holds {name}", got, "Capture it with run_with_cache, pass it in donors=."
        )
    layouts = cache.window.layouts

    def change(old: Tensor, example: int) -> Tensor:
        donor = example if len(layouts) > 1 else 0
        if donor >= len(layouts):
            raise InterventionError(
                "one donor example, or as many as the batch has", f"{len(layouts)}", "Capture the donor on as many prompts."
            )
        given = _donor_values(cache, name, intervention, donor).to(old)
        if given.shape != old.shape:
            raise InterventionError(
                f"donor values of shape {list(old.shape)}", f"{list(given.shape)}", "Make at= and source= select equally many."
            )
        if intervention.mode == "add":
            return old + intervention.alpha * given
        return given if intervention.mode == "replace" else old + intervention.alpha * (given - old)

    return change


def _donor_values(cache: Cache, name: str, intervention: PatchIn, donor: int) -> Tensor:
    tokens = resolve_where(intervention.source, cache.window.layouts[donor])
    value, site = cache[name], cache.sites[name]
    rows = site_rows(site, cache.window, tokens, donor).to(value.device)
    return value.flatten(0, 1)[rows] if intervention.heads is None else value.flatten(0, 1)[rows][:, list(intervention.heads)]
