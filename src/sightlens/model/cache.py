"""The activations of one forward pass, addressed by ``hook@selector``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from sightlens.errors import HookError, listing
from sightlens.families.sites import Site
from sightlens.model.address import full_name, parse_address, read
from sightlens.model.window import Window

Key = str | tuple[str | int | None, ...]


class Cache(Mapping[str, Tensor]):
    """Activations by hook name; a key may carry a selector: ``cache["blocks.3.hook_resid_post@image"]``.

    TransformerLens' short form ``cache["resid_post", 3]`` works too.
    A grid-shaped selection comes as ``[batch, rows, columns, …]``, any other as ``[batch, n, …]``.
    """

    def __init__(self, values: Mapping[str, Tensor], sites: Mapping[str, Site], window: Window) -> None:
        """Keep activations as they were measured.

        Args:
            values: by hook name or address, as captured.
            sites: of the model.
            window: of the pass that measured them.
        """
        self._values, self.sites, self.window = dict(values), sites, window

    def __getitem__(self, key: Key) -> Tensor:
        """Return an activation, or the part that a selector names.

        Raises:
            HookError: when the pass did not capture it.
            SelectorError: when the selector does not fit.
        """
        key = self._named(key)
        if key in self._values:
            return self._values[key]
        address = parse_address(key)
        if address.name not in self._values:
            raise HookError(f"a captured name ({listing(list(self._values))})", repr(key), "Add it to names_filter.")
        part = read(self._values[address.name], address, self.sites[address.name], self.window)
        if part is None:
            raise HookError(f"positions inside the pass for {key!r}", "none", "Check the selector with prompt.layout.select(…).")
        return part

    def __contains__(self, key: object) -> bool:
        """Say whether a name, or the name of an address, was captured."""
        if not isinstance(key, str | tuple):
            return False
        name = self._named(key)
        return name in self._values or parse_address(name).name in self._values

    def _named(self, key: Key) -> str:
        if isinstance(key, str):
            return key
        return full_name(key, layers=1 + max(site.layer for site in self.sites.values() if site.layer is not None))

    def __iter__(self) -> Iterator[str]:
        """Iterate over the captured names."""
        return iter(self._values)

    def __len__(self) -> int:
        """Count the captured names."""
        return len(self._values)

    def __repr__(self) -> str:
        """Names, shapes and memory."""
        megabytes = sum(value.nbytes for value in self._values.values()) / 2**20
        return f"Cache({listing(list(self._values), limit=6)}; {megabytes:.1f} MiB)"

    def only(self, names: Sequence[str]) -> Cache:
        """Return a cache of some of the captured names, which share their memory with this one."""
        return Cache({name: self._values[name] for name in names}, self.sites, self.window)

    def to(self, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> Cache:
        """Return a copy on another device or in another dtype."""
        return Cache({name: value.to(device=device, dtype=dtype) for name, value in self._values.items()}, self.sites, self.window)
