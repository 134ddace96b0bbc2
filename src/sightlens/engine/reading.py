"""One pass, many readers: probes, lenses and caches consume the same forward pass."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol, runtime_checkable

import torch

from sightlens.engine.replay import stopping_after
from sightlens.errors import EngineError
from sightlens.families import Prompt
from sightlens.model import Cache, HookedVLM
from sightlens.model.hooking import find_addresses


@runtime_checkable
class Reader(Protocol):
    """Something that looks at activations."""

    @property
    def names(self) -> Sequence[str]:
        """Names, patterns or addresses of what it looks at."""
        ...

    def read(self, prompt: Prompt, cache: Cache) -> None:
        """Look at the activations of one prompt; nothing of them is kept afterwards."""
        ...


@torch.no_grad()
def read_states(model: HookedVLM, prompt: Prompt, names: str | Sequence[str]) -> Cache:
    """Return activations of a pass that ends with the last layer asked for, and makes no logits but the last position's.

    Args:
        model: that runs.
        prompt: one example or a batch.
        names: names, patterns or addresses, as for ``run_with_cache``.

    Raises:
        HookError, SelectorError: for names that the model does not have, or selectors that do not fit.
    """
    addresses = find_addresses(model.sites, names)
    layers = [model.sites.point(address.name).site.layer for address in addresses]
    beyond = any(address.name.startswith("ln_final") for address in addresses)
    deepest = model.sites.n_layers - 1 if beyond else max((layer for layer in layers if layer is not None), default=-1)
    with stopping_after(model.sites, deepest):
        return model.run_with_cache(prompt, names_filter=names, keep="last")[1]


def share_passes(model: HookedVLM, prompts: Iterable[Prompt], readers: Sequence[Reader]) -> int:
    """Run each prompt once for all readers, which see only what they asked for.

    Args:
        model: that runs.
        prompts: may be a stream; one at a time is in memory.
        readers: called in order.

    Returns:
        How many prompts ran.

    Raises:
        EngineError: without readers.
    """
    if not readers:
        raise EngineError("at least one reader", "none", "Give objects with names and read(prompt, cache).")
    names = list(dict.fromkeys(name for reader in readers for name in reader.names))
    count = 0
    for prompt in prompts:
        count += 1
        cache = read_states(model, prompt, names)
        for reader in readers:
            reader.read(prompt, cache.only([str(address) for address in find_addresses(model.sites, list(reader.names))]))
    return count
