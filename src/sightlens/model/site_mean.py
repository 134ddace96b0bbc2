"""The mean of a site over visual tokens, which a mean ablation puts in their place."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import get_args

from sightlens.errors import InterventionError
from sightlens.interventions import Mean, MeanMeter
from sightlens.interventions.means import Parts, part_names
from sightlens.model.cache import Cache
from sightlens.model.spots import PLACES, SitePass, find_spot, flat_places


def mean_over(caches: Iterable[Cache], names: Sequence[str], *, source: str, by: Parts) -> Mean:
    """Average sites over the visual tokens of runs.

    Args:
        caches: of the runs, one at a time in memory.
        names: the site, then its companions.
        source: what was shown, for provenance.
        by: which visual tokens are averaged apart.

    Raises:
        InterventionError: for a site without visual tokens, or with heads, or when no run has a visual token.
    """
    if by not in get_args(Parts):
        raise InterventionError(f"by among {', '.join(get_args(Parts))}", repr(by), "Check the spelling.")
    meters = {name: MeanMeter(name) for name in names}
    for cache in caches:
        for meter in meters.values():
            _measure(meter, cache, by)
    found = {name: meter.result() for name, meter in meters.items()}
    vector, tokens, _ = found[names[0]]
    parts = {} if by == "all" else {name: held for name, (_, _, held) in found.items()}
    return Mean(vector, names[0], source, tokens, {name: found[name][0] for name in names[1:]}, by, parts)


def _measure(meter: MeanMeter, cache: Cache, by: Parts) -> None:
    name = meter.site
    dims = cache.sites[name].dims
    if not set(PLACES) & set(dims) or {"head", "query"} & set(dims):
        hint = "Means of heads are fit_head_mean's."
        raise InterventionError("a site with one vector per position, visual token or patch", f"{name} {list(dims)}", hint)
    for row, layout in enumerate(cache.window.layouts):
        if layout.views:
            here = SitePass.of(cache[name], cache.sites[name], cache.window)
            spot = find_spot(here, layout.select("image"), row, phases=("prefill",))
            values = flat_places(cache[name], here.site)[spot.places.to(cache[name].device)]
            meter.add(values, part_names(layout, spot.positions, by))
