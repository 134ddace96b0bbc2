"""``hook@selector``: reading and writing an activation at the positions that a selector names."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from sightlens.errors import HookError, SelectorError
from sightlens.families.sites import Site
from sightlens.layout import Layout, Selector, TokenSet, parse
from sightlens.model.window import Window

ARROW = "->"


@dataclass(frozen=True)
class Address:
    """A hook name with, perhaps, positions: ``blocks.3.hook_resid_post@image``, ``…attn.hook_pattern@last -> image``."""

    name: str
    at: Selector | None = None
    keys: Selector | None = None

    def __str__(self) -> str:
        """Print the address so that it parses back."""
        if self.at is None:
            return self.name
        return f"{self.name}@{self.at}" + (f" {ARROW} {self.keys}" if self.keys is not None else "")


def parse_address(text: str) -> Address:
    """Parse ``name``, ``name@selector`` or, for attention, ``name@queries -> keys``.

    Raises:
        SelectorError: when a selector does not parse.
    """
    name, at, where = text.partition("@")
    if not at:
        return Address(name.strip())
    queries, arrow, keys = where.partition(ARROW)
    return Address(name.strip(), parse(queries.strip()), parse(keys.strip()) if arrow else None)


@dataclass(frozen=True)
class Selection:
    """Positions along one dimension of a batched activation.

    Attributes:
        dim: which dimension.
        index: ``[batch, n]`` positions along it.
        grid: ``(rows, columns)`` when the positions fill a grid, else None.
    """

    dim: int
    index: Tensor
    grid: tuple[int, int] | None

    def gather(self, value: Tensor) -> Tensor:
        """Return a copy of the selected part, ``n`` (or ``rows, columns``) in place of the dimension."""
        moved = value.movedim(self.dim, 1)
        batch = torch.arange(moved.shape[0], device=value.device)[:, None]
        part = moved[batch, self.index.to(value.device)].movedim(1, self.dim)
        return part if self.grid is None else part.unflatten(self.dim, self.grid)

    def scatter(self, value: Tensor, part: Tensor) -> Tensor:
        """Return a copy of ``value`` with the selected part replaced."""
        flat = part if self.grid is None else part.flatten(self.dim, self.dim + 1)
        result = value.clone().movedim(self.dim, 1)
        batch = torch.arange(result.shape[0], device=value.device)[:, None]
        result[batch, self.index.to(value.device)] = flat.movedim(self.dim, 1).to(value.dtype)
        return result.movedim(1, self.dim).contiguous()


def select(address: Address, site: Site, window: Window) -> tuple[Selection, ...] | None:
    """Resolve an address for the forward pass in progress; keys first, so that gathering in order keeps dimensions valid.

    Returns:
        None when the window holds none of the positions (a decoding step past them).

    Raises:
        HookError: when the site has no positions to select.
        SelectorError: when examples of the batch select different numbers of positions.
    """
    assert address.at is not None
    if not site.positional:
        raise HookError(
            "a site whose dimensions are positions or visual tokens", f"{site.name} {list(site.dims)}", "Read it without a selector."
        )
    if address.keys is not None and "query" not in site.dims:
        raise HookError("an attention site for `queries -> keys`", site.name, "Use one selector.")
    chosen = tuple(layout.select(address.at) for layout in window.layouts)
    if "token" in site.dims:
        return (_visual(chosen, address),)
    dim = site.dims.index("query" if "query" in site.dims else "position" if "position" in site.dims else "key")
    found = _along(dim, chosen, address, window.queries if "key" not in site.dims[dim] else window.keys)
    if found is None or address.keys is None:
        return None if found is None else (found,)
    keys = _along(site.dims.index("key"), tuple(layout.select(address.keys) for layout in window.layouts), address, window.keys)
    return None if keys is None else (keys, found)


def _along(dim: int, chosen: Sequence[TokenSet], address: Address, positions: Callable[[TokenSet], np.ndarray]) -> Selection | None:
    rows = [positions(tokens) for tokens in chosen]
    if not any(len(row) for row in rows):
        return None
    shapes = {tokens.grid_shape for tokens in chosen}
    whole = all(len(row) == tokens.count for row, tokens in zip(rows, chosen, strict=True))
    return Selection(dim, _stack(rows, address), shapes.pop() if len(shapes) == 1 and whole else None)


def _visual(chosen: Sequence[TokenSet], address: Address) -> Selection:
    """Select along ``[batch, all visual tokens of the example]``, which is how :func:`by_example` lays out visual sites."""
    rows = []
    for tokens in chosen:
        table = tokens.structure.visual_tokens()["position"]
        tokens.require(f"{address}")
        rows.append(np.searchsorted(table, tokens.positions))
        if len(set(tokens.positions) - set(table)):
            raise SelectorError("visual tokens only at a site of the vision tower", f"`{tokens.name}`", "Restrict it: `(…) & image`.")
    shapes = {tokens.grid_shape for tokens in chosen}
    return Selection(1, _stack(rows, address), shapes.pop() if len(shapes) == 1 else None)


def by_example(value: Tensor, layouts: Sequence[Layout]) -> Tensor:
    """Lay out ``[all views, token, …]`` as ``[batch, visual tokens of the example, …]``.

    Raises:
        SelectorError: when examples have different numbers of visual tokens.
    """
    counts = {len(layout.visual_tokens()) for layout in layouts}
    if len(counts) > 1:
        raise SelectorError("examples with equally many visual tokens", f"{sorted(counts)}", "Run them one by one.")
    return value.flatten(0, 1).unflatten(0, (len(layouts), -1))


def _stack(rows: Sequence[np.ndarray], address: Address) -> Tensor:
    counts = [len(row) for row in rows]
    if len(set(counts)) > 1:
        raise SelectorError(
            f"equally many positions in every example for `{address}`", f"{counts}", "Run the examples one by one, or read the whole site."
        )
    return torch.as_tensor(np.stack(rows), dtype=torch.long)


def read(value: Tensor, address: Address, site: Site, window: Window) -> Tensor | None:
    """Return the addressed part of an activation, grid-shaped where the selection is; None when the window holds none of it."""
    if address.at is None:
        return value
    found = select(address, site, window)
    if found is None:
        return None
    part = by_example(value, window.layouts) if "token" in site.dims else value
    for selection in found:
        part = selection.gather(part)
    return part


def write(value: Tensor, part: Tensor, address: Address, *, site: Site, window: Window) -> Tensor:
    """Return a copy of an activation with its addressed part replaced."""
    found = select(address, site, window)
    assert found is not None
    whole = by_example(value, window.layouts) if "token" in site.dims else value
    if len(found) == 1:
        return found[0].scatter(whole, part).reshape(value.shape)
    keys, queries = found
    inner = queries.gather(whole) if queries.grid is None else Selection(queries.dim, queries.index, None).gather(whole)
    flat = part if queries.grid is None else part.flatten(queries.dim, queries.dim + 1)
    return Selection(queries.dim, queries.index, None).scatter(whole, keys.scatter(inner, flat))
