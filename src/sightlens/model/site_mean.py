"""The mean of a site over visual tokens, which a mean ablation puts in their place."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from sightlens.errors import InterventionError
from sightlens.interventions import Mean, MeanMeter
from sightlens.model.cache import Cache
from sightlens.model.spots import PLACES, SitePass, find_spot, flat_places


def mean_over(caches: Iterable[Cache], names: Sequence[str], *, source: str) -> Mean:
    """Average sites over the visual tokens of runs.

    Args:
        caches: of the runs, one at a time in memory.
        names: the site, then its companions.
        source: what was shown, for provenance.

    Raises:
        InterventionError: for a site without visual tokens, or with heads, or when no run has a visual token.
    """
    meters = {name: MeanMeter(name, source) for name in names}
    for cache in caches:
        for name, meter in meters.items():
            _measure(meter, cache, name)
    first, *others = (meter.result() for meter in meters.values())
    return replace(first, companions={other.site: other.vector for other in others})


def _measure(meter: MeanMeter, cache: Cache, name: str) -> None:
    dims = cache.sites[name].dims
    if not set(PLACES) & set(dims) or {"head", "query"} & set(dims):
        hint = "Means of heads are fit_head_mean's."
        raise InterventionError("a site with one vector per position, visual token or patch", f"{name} {list(dims)}", hint)
    for row, layout in enumerate(cache.window.layouts):
        if layout.views:
            here = SitePass.of(cache[name], cache.sites[name], cache.window)
            spot = find_spot(here, layout.select("image"), row, phases=("prefill",))
            meter.add(flat_places(cache[name], here.site)[spot.places.to(cache[name].device)])
