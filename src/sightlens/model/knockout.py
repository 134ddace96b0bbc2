"""Removing attention edges on the fused path."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial

import numpy as np
import torch
from torch import Tensor

from sightlens.errors import InterventionError
from sightlens.interventions import Knockout, resolve_where
from sightlens.model.attention import kept_edges, refresh, taps_of
from sightlens.model.rows import Edit, Touched
from sightlens.model.sites import Sites
from sightlens.model.window import Window


@contextmanager
def knock_out(sites: Sites, knockouts: Mapping[int, Sequence[Edit]], touched: Touched) -> Iterator[None]:
    """Edit the masks of some layers while the context is open.

    Args:
        sites: of the model.
        knockouts: by layer.
        touched: counts the removed edges.

    Raises:
        InterventionError: for heads out of range or, during a pass, a query left without keys.
    """
    heads = [head for group in knockouts.values() for edit in group for head in _knockout(edit).heads or ()]
    if heads and max(heads) >= sites.n_heads:
        raise InterventionError(f"heads below {sites.n_heads}", f"{sorted(set(heads))}", "Heads count from 0.")
    blocks = _Blocks(sites.window, sites.n_heads, touched)
    with ExitStack() as stack:
        for layer, group in knockouts.items():
            module = sites.attention_module(layer)
            taps, edit = taps_of(module), partial(blocks.remove, group)
            taps.edits.append(edit)
            refresh(module)
            stack.callback(refresh, module)
            stack.callback(taps.edits.remove, edit)
        yield


def _knockout(edit: Edit) -> Knockout:
    assert isinstance(edit.intervention, Knockout)
    return edit.intervention


class _Blocks:
    """Removes edges, and remembers for the layers of one pass which edges a knockout names."""

    def __init__(self, window: Window, heads: int, touched: Touched) -> None:
        self._window, self._heads, self._touched = window, heads, touched
        self._pass, self._named = (0, 0), {}

    def remove(self, group: Sequence[Edit], mask: Tensor) -> Tensor:
        """Return the mask without the edges that the group's knockouts name, row by row."""
        active = [edit for edit in group if self._edges(edit).any()]
        if not active:
            return mask
        heads = self._heads if any(_knockout(edit).heads is not None for edit in active) else mask.shape[1]
        mask = mask.expand(len(self._window.layouts), heads, -1, -1).clone()
        for edit in active:
            self._remove(edit, mask)
        return mask

    def _remove(self, edit: Edit, mask: Tensor) -> None:
        knockout, rows = _knockout(edit), torch.tensor(edit.rows, device=mask.device)
        part, before = mask[rows], kept_edges(mask[rows])
        # a sliding layer's cache holds the last keys only
        named = self._edges(edit)[..., -mask.shape[-1] :].to(mask.device)[:, None]
        if knockout.heads is not None:
            chosen = torch.zeros(self._heads, dtype=torch.bool, device=mask.device)
            chosen[list(knockout.heads)] = True
            named = named & chosen[:, None, None]
        blocked = before & named
        _check_rows(before, blocked, knockout)
        for row, count in zip(edit.rows, blocked.flatten(1).sum(1).tolist(), strict=True):
            self._touched.add(knockout, self._window.examples[row], count)
        # exactly -inf, so that the softmax gives exactly 0; every row keeps a finite entry
        mask[rows] = part.masked_fill(blocked, float("-inf"))

    def _edges(self, edit: Edit) -> Tensor:
        """Return ``[row, query, key]``: the edges that the selectors name, whether they exist or not."""
        window = self._window
        if self._pass != (window.start, window.stop):
            self._pass, self._named = (window.start, window.stop), {}
        if edit not in self._named:
            knockout = _knockout(edit)
            named = np.zeros((len(edit.rows), window.stop - window.start, window.stop), dtype=bool)
            for index, row in enumerate(edit.rows):
                queries, _ = window.inside(resolve_where(knockout.queries, window.layouts[row]), knockout.phases)
                keys = window.keys(resolve_where(knockout.keys, window.layouts[row]), held=window.stop)
                named[index][np.ix_(queries - window.start, keys)] = True
            self._named[edit] = torch.as_tensor(named)
        return self._named[edit]


def _check_rows(before: Tensor, blocked: Tensor, knockout: Knockout) -> None:
    emptied = before.any(-1) & ~(before & ~blocked).any(-1)
    if emptied.any():
        raise InterventionError(
            "at least one key left for every query",
            f"{int(emptied.sum())} queries without any under {knockout}",
            "Leave a query's own position, or the first token, among its keys.",
        )
