"""What stands between a user's hook function and a hook point: selectors, shape checks, and keeping activations."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from fnmatch import fnmatchcase
from typing import Any, Literal

from torch import Tensor

from sightlens.errors import HookError
from sightlens.families.sites import HeadResult, Input
from sightlens.model.address import Address, parse_address, read, write
from sightlens.model.sites import Sites
from sightlens.model.taps import LiveSite
from sightlens.model.window import Window

HookFunction = Callable[..., Tensor | None]
"""``fn(activation, hook)``; what it returns, or edits in place, replaces what it saw."""
HookName = str | Callable[[str], bool]
"""A name, a pattern, an address, or a function of the name that chooses some."""
Hooks = Sequence[tuple[HookName, HookFunction]]
NameFilter = str | Sequence[str] | Callable[[str], bool] | None


def shown(function: HookFunction, address: Address, point: LiveSite, *, window: Window) -> HookFunction:
    """Show a hook function only the addressed part, and write back what it returns or edits in place.

    Raises:
        HookError: at run time, when it returns another shape, or when the pass has no layouts to select from.
    """

    def whole(value: Any, hook: LiveSite) -> Tensor | None:
        new = function(value, hook=hook)
        if new is not None and isinstance(value, Tensor):
            _check_shape(new, value, str(address))
        return new

    def part_only(value: Tensor, hook: LiveSite) -> Tensor | None:
        if not window.layouts:
            raise HookError("a forward pass of a Prompt", "one without layouts", f"Call model(prompt); {address} needs its positions.")
        part = read(value, address, point.site, window)
        if part is None:
            return None
        before = part._version
        new = function(part, hook=hook)
        if new is None and part._version == before:
            return None
        new = part if new is None else new
        _check_shape(new, part, str(address))
        return write(value, new, address, site=point.site, window=window)

    return whole if address.at is None else part_only


def _check_shape(new: Any, old: Tensor, name: str) -> None:
    if not isinstance(new, Tensor) or new.shape != old.shape:
        got = list(new.shape) if isinstance(new, Tensor) else type(new).__name__
        raise HookError(f"a hook at {name} that returns None or shape {list(old.shape)}", f"{got}", "Return the shape it was given.")


def find_addresses(sites: Sites, names: NameFilter) -> list[Address]:
    """Expand a name filter: None (all but ``hook_result``), a function of the name, names, patterns, or addresses.

    Raises:
        HookError: for a name, or a function, that matches nothing.
        SelectorError: for a selector that does not parse.
    """
    if names is None:
        return [Address(name) for name, point in sites.points.items() if not isinstance(point.site.tap, HeadResult)]
    if callable(names):
        chosen = [Address(name) for name in sites.points if names(name)]
        if not chosen:
            raise HookError("a filter that some hook name passes", "one that none does", "model.hook_dict lists all of them.")
        return chosen
    texts = [names] if isinstance(names, str) else names
    if not isinstance(texts, Sequence) or not all(isinstance(text, str) for text in texts):
        raise HookError("hook names, patterns, addresses or a function of the name", repr(names)[:200], "model.hook_dict lists all names.")
    found: list[Address] = []
    for text in texts:
        address = parse_address(text)
        matching = [name for name in sites.points if fnmatchcase(name, address.name)] or [sites.point(address.name).site.name]
        found += [Address(name, address.at, address.keys) for name in matching]
    return list(dict.fromkeys(found))


def add_hooks(sites: Sites, name: HookName, function: HookFunction, direction: Literal["fwd", "bwd"]) -> Iterator[tuple[LiveSite, Any]]:
    """Add a hook function wherever a name says; yield each hook point, and the handle that removes it, as soon as it is added.

    Raises:
        HookError: for a name that matches nothing, and for a backward hook with a selector.
    """
    addresses = find_addresses(sites, name)
    if direction == "bwd" and any(address.at is not None for address in addresses):
        raise HookError("a backward hook without a selector", str(name), "Select inside the function.")
    for address in addresses:
        point = sites.point(address.name)
        yield point, point.add_hook(shown(function, address, point, window=sites.window), dir=direction)


@contextmanager
def listening(sites: Sites, *, fwd_hooks: Hooks, bwd_hooks: Hooks) -> Iterator[None]:
    """Keep hooks on while the context is open; they are removed whatever happens."""
    given: tuple[tuple[Literal["fwd", "bwd"], Hooks], ...] = (("fwd", fwd_hooks), ("bwd", bwd_hooks))
    with ExitStack() as stack:
        for direction, hooks in given:
            for name, function in hooks:
                for point, handle in add_hooks(sites, name, function, direction):
                    stack.callback(point.drop, handle)
        yield


def keeper(address: Address, point: LiveSite, kept: dict[str, Tensor]) -> HookFunction:
    """Return a hook function that keeps what it sees, and writes nothing."""
    tap = point.site.tap
    shared = isinstance(tap, Input) and tap.shared

    def keep(value: Tensor, hook: LiveSite) -> None:
        # a shared tensor may be written in place later in the same pass
        kept[str(address)] = value.clone() if shared else value

    return keep


def check_kept(addresses: Sequence[Address], kept: Mapping[str, Tensor], *, images: bool) -> None:
    """Refuse a pass that did not reach everything that was asked for; without images the tower may stay silent.

    Raises:
        HookError: naming what was not reached.
    """
    missing = [str(address) for address in addresses if str(address) not in kept]
    if not images:
        missing = [name for name in missing if not name.startswith(("vision_", "hook_visual", "hook_deepstack"))]
    if missing:
        raise HookError(
            "every asked-for site to be reached", f"{missing} were not", "Check that the selector chooses positions of this prompt."
        )
