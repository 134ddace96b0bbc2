"""From old values to new ones: what ablations and patch-ins put in place of activations."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import Tensor

from sightlens.errors import InterventionError, listing
from sightlens.interventions import Ablate, AblateHeads, Mean, PatchIn, resolve_where
from sightlens.model.cache import Cache
from sightlens.model.sites import Sites
from sightlens.model.spots import SitePass, Spot, find_spot, flat_places

Donor = Cache | Mean | Tensor
Change = Callable[[Tensor, Spot], Tensor]
"""From the activations ``[n, …]`` of one spot to new ones of the same shape."""


def head_values(sites: Sites, intervention: AblateHeads, donors: Mapping[str, Donor], *, layer: int) -> Change:
    """Return what takes the place of a layer's heads.

    Raises:
        InterventionError: when the donor is missing or of another shape.
    """
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


def ablation(intervention: Ablate, name: str, donors: Mapping[str, Donor]) -> Change:
    """Return what takes the place of activations at a site.

    Raises:
        InterventionError: when the donor is missing, no vector, of another width, or measured elsewhere.
    """
    if intervention.value == "zero":
        return lambda old, spot: torch.zeros_like(old)
    if intervention.value == "noise":
        return partial(_noised, intervention)
    vector = _vector(intervention, donors) if name == intervention.site else _companion_vector(intervention, name, donors)

    mean = donors[intervention.value]

    def change(old: Tensor, spot: Spot) -> Tensor:
        if vector.ndim != 1 or vector.shape != old.shape[-1:]:
            raise InterventionError(f"a vector [{old.shape[-1]}]", f"{list(vector.shape)}", f"Measure it at {intervention.site}.")
        if isinstance(mean, Mean) and mean.by != "all":
            return mean.of(name, spot.layout, spot.positions).to(old)
        return vector.to(old).expand_as(old)

    return change


def _noised(intervention: Ablate, old: Tensor, spot: Spot) -> Tensor:
    generator, noise = torch.Generator(), torch.empty(old.shape)
    for index, seed in enumerate(spot.seeds.tolist()):
        # drawn per place, so that padding, the batch and passes over part of the sequence do not matter
        generator.manual_seed((intervention.seed * 1_000_003 + seed) % 2**63)
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


def patch(intervention: PatchIn, name: str, donors: Mapping[str, Donor]) -> Change:
    """Return what another run puts in place of activations at a site.

    Raises:
        InterventionError: when the donor is missing or lacks the site; at run time, when shapes differ.
    """
    cache = donors.get(intervention.donor)
    if not isinstance(cache, Cache) or name not in cache:
        got = f"a cache of {listing(list(cache), limit=6)}" if isinstance(cache, Cache) else f"donors {listing(sorted(donors)) or 'none'}"
        raise InterventionError(
            f"a donor {intervention.donor!r} that holds {name}", got, "Capture it with run_with_cache, pass it in donors=."
        )
    layouts, over_keys = cache.window.layouts, cache.sites[name].dims[-1] == "key"

    def change(old: Tensor, spot: Spot) -> Tensor:
        donor = spot.example if len(layouts) > 1 else 0
        given = _donor_values(cache, name, intervention, donor).to(old)
        if over_keys:
            given = _among_keys(given, old, (layouts[donor].structure.padding, spot.layout.structure.padding))
        if len(given) != spot.whole or given.shape[1:] != old.shape[1:]:
            got = f"{len(given)} of {list(given.shape[1:])}"
            raise InterventionError(f"{spot.whole} donor values of {list(old.shape[1:])}", got, "Make at= and source= select equally many.")
        given = given[torch.as_tensor(spot.order, device=given.device)]
        if intervention.mode == "add":
            return old + intervention.alpha * given
        return given if intervention.mode == "replace" else old + intervention.alpha * (given - old)

    return change


def _donor_values(cache: Cache, name: str, intervention: PatchIn, donor: int) -> Tensor:
    tokens, site, value = resolve_where(intervention.source, cache.window.layouts[donor]), cache.sites[name], cache[name]
    spot = find_spot(SitePass.of(value, site, cache.window), tokens, donor, phases=("prefill",))
    rows = flat_places(value, site)[spot.places.to(value.device)]
    return rows if intervention.heads is None else rows[:, list(intervention.heads)]


def _among_keys(given: Tensor, old: Tensor, padding: tuple[int, int]) -> Tensor:
    """Return the donor's rows over its real keys, moved to where the real keys of this run stand; what pads is this run's own."""
    keys = given[..., padding[0] :]
    if keys.shape[-1] != old.shape[-1] - padding[1]:
        got = f"rows over {keys.shape[-1]}"
        raise InterventionError(f"donor rows over {old.shape[-1] - padding[1]} keys", got, "Take a donor prompt of the same length.")
    # every query of a row leaves padding alone, so one of them says what stands there
    return torch.cat([old[:1, ..., : padding[1]].expand(*keys.shape[:-1], -1), keys], dim=-1)
