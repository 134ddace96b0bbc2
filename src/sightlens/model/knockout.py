"""Removing attention edges on the fused path."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import torch
from torch import Tensor

from sightlens.errors import InterventionError
from sightlens.interventions import Knockout, resolve_where
from sightlens.model.attention import MaskEdit, kept_edges, refresh, taps_of
from sightlens.model.sites import Sites
from sightlens.model.window import Window


def knock_out(sites: Sites, intervention: Knockout, count: Callable[[int], None]) -> Iterator[Callable[[], None]]:
    """Edit the masks of the chosen layers, and yield what undoes it."""
    if intervention.heads is not None and max(intervention.heads) >= sites.n_heads:
        raise InterventionError(f"heads below {sites.n_heads}", f"{intervention.heads}", "Heads count from 0.")
    edit = _mask_edit(sites.window, intervention, heads=sites.n_heads, count=count)
    for layer in sites.layers(intervention.layers):
        module = sites.attention_module(layer)
        taps = taps_of(module)
        taps.edits.append(edit)
        refresh(module)

        def remove(taps=taps, module=module) -> None:
            taps.edits.remove(edit)
            refresh(module)

        yield remove


def _mask_edit(window: Window, intervention: Knockout, *, heads: int, count: Callable[[int], None]) -> MaskEdit:
    chosen = list(range(heads)) if intervention.heads is None else list(intervention.heads)

    def edit(mask: Tensor) -> Tensor:
        if ("decode" if window.decoding else "prefill") not in intervention.phases:
            return mask
        before = kept_edges(mask)
        wanted = _wanted(window, intervention, before)[:, None]
        if intervention.heads is not None:
            mask, before = (x.expand(-1, heads, -1, -1) for x in (mask, before))
            wanted = wanted & torch.isin(torch.arange(heads, device=mask.device), torch.tensor(chosen, device=mask.device))[:, None, None]
        blocked = before & wanted
        _check_rows(before, blocked, intervention)
        count(int(blocked.sum()))
        # exactly -inf, so that the softmax gives exactly 0; every row keeps a finite entry
        return mask.masked_fill(wanted.expand_as(mask), float("-inf")) if blocked.any() else mask

    return edit


def _wanted(window: Window, intervention: Knockout, edges: Tensor) -> Tensor:
    """Return ``[batch, query, key]``: the edges the selectors name, that exist or not."""
    wanted = np.zeros((edges.shape[0], *edges.shape[2:]), dtype=bool)
    for example, layout in enumerate(window.layouts):
        queries = window.queries(resolve_where(intervention.queries, layout))
        keys = window.keys(resolve_where(intervention.keys, layout))
        wanted[example][np.ix_(queries, keys)] = True
    return torch.as_tensor(wanted, device=edges.device)


def _check_rows(before: Tensor, blocked: Tensor, intervention: Knockout) -> None:
    emptied = before.any(-1) & ~(before & ~blocked).any(-1)
    if emptied.any():
        raise InterventionError(
            "at least one key left for every query",
            f"{int(emptied.sum())} queries without any under {intervention}",
            "Leave a query's own position, or the first token, among its keys.",
        )
