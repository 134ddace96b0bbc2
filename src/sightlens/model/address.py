"""``hook@selector``: reading and writing an activation at the positions that a selector names."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from sightlens.errors import HookError, SelectorError
from sightlens.families.compat import get_act_name
from sightlens.families.sites import Site
from sightlens.layout import Selector, TokenSet, parse
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


def full_name(key: tuple[str | int | None, ...], *, layers: int) -> str:
    """Return the hook name that TransformerLens' short form stands for: ``("resid_post", 3)``, ``("pattern", -1)``, ``("k", 0, "attn")``.

    Args:
        key: name, layer, kind of layer; the last two may be missing.
        layers: of the language model, from which negative ones count back.

    Raises:
        HookError: for a tuple of another form.
    """
    match key:
        case (str(name),) | (str(name), None):
            return get_act_name(name)
        case (str(name), int(layer), *rest) if -layers <= layer < layers and [type(kind) for kind in rest] in ([], [str]):
            return get_act_name(name, layer % layers, *map(str, rest))
    raise HookError(f'(name, layer) or (name, layer, kind), like ("resid_post", {layers - 1})', repr(key), "Or write the whole name.")


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


def select(address: Address, site: Site, window: Window, *, shape: Sequence[int]) -> tuple[Selection, ...] | None:
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
        return (_visual(chosen, address, window),)
    dim = site.dims.index("query" if "query" in site.dims else "position" if "position" in site.dims else "key")
    found = _along(dim, chosen, address, window.queries if site.dims[dim] != "key" else _keys(window, shape[dim]))
    if found is None or address.keys is None:
        return None if found is None else (found,)
    dim = site.dims.index("key")
    keys = _along(dim, tuple(layout.select(address.keys) for layout in window.layouts), address, _keys(window, shape[dim]))
    return None if keys is None else (keys, found)


def _keys(window: Window, held: int) -> Callable[[TokenSet], np.ndarray]:
    return lambda tokens: window.keys(tokens, held=held)


def _along(dim: int, chosen: Sequence[TokenSet], address: Address, positions: Callable[[TokenSet], np.ndarray]) -> Selection | None:
    rows = [positions(tokens) for tokens in chosen]
    if not any(len(row) for row in rows):
        return None
    shapes = {tokens.grid_shape for tokens in chosen}
    whole = all(len(row) == tokens.count for row, tokens in zip(rows, chosen, strict=True))
    return Selection(dim, _stack(rows, address), shapes.pop() if len(shapes) == 1 and whole else None)


def _visual(chosen: Sequence[TokenSet], address: Address, window: Window) -> Selection:
    """Select along the outputs of the projector over the whole batch, which is how :func:`_one_row` lays out visual sites."""
    rows = []
    for row, tokens in enumerate(chosen):
        tokens.require(f"{address}")
        if not tokens.structure.visual[tokens.positions].all():
            raise SelectorError("visual tokens only at a site of the vision tower", f"`{tokens.name}`", "Restrict it: `(…) & image`.")
        rows.append(window.features(tokens.positions, row, name=tokens.name)[0])
    shapes = {tokens.grid_shape for tokens in chosen}
    return Selection(1, _stack(rows, address), shapes.pop() if len(shapes) == 1 else None)


def _one_row(value: Tensor, site: Site, window: Window) -> Tensor:
    """Lay out a visual site as ``[batch, all outputs of the projector, …]``, the same for every example."""
    flat = value if site.dims[0] == "token" else value.flatten(0, 1)
    return flat.expand(len(window.layouts), *flat.shape)


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
    found = select(address, site, window, shape=value.shape)
    if found is None:
        return None
    part = _one_row(value, site, window) if "token" in site.dims else value
    for selection in found:
        part = selection.gather(part)
    return part


def write(value: Tensor, part: Tensor, address: Address, *, site: Site, window: Window) -> Tensor:
    """Return a copy of an activation with its addressed part replaced."""
    found = select(address, site, window, shape=value.shape)
    assert found is not None
    if "token" in site.dims:
        return _write_features(value, part, found[0])
    if len(found) == 1:
        return found[0].scatter(value, part)
    keys, queries = found
    inner = Selection(queries.dim, queries.index, None).gather(value)
    flat = part if queries.grid is None else part.flatten(queries.dim, queries.dim + 1)
    return Selection(queries.dim, queries.index, None).scatter(value, keys.scatter(inner, flat))


def _write_features(value: Tensor, part: Tensor, where: Selection) -> Tensor:
    flat = part if where.grid is None else part.flatten(1, 2)
    result = value.clone(memory_format=torch.contiguous_format)
    rows = result.view(-1, result.shape[-1])
    rows[where.index.flatten().to(value.device)] = flat.flatten(0, 1).to(value.dtype)
    return result
