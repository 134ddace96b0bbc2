"""Nothing but interventions may act while a plan runs: hooks would act on the clean run, and again on what rows take from it."""

from __future__ import annotations

from collections.abc import Iterator

from sightlens.errors import EngineError, listing
from sightlens.model import HookedVLM

KNOWN = ("sightlens.model.window", "transformers.")
"""Where hooks come from that only watch: the window that follows passes, and HF's recorders of hidden states."""


def check_unhooked(model: HookedVLM) -> None:
    """Refuse hooks at the model's hook points, and torch hooks on the decoder or on what calls it.

    What wraps a module's ``forward``, as accelerate does, may stay, and so may hooks on the tower, the projector and the
    unembedding, which are never stepped over.

    Raises:
        EngineError: naming the hook points or the modules.
    """
    if hooked := [name for name, point in model.sites.points.items() if point.has_hooks()]:
        do = "Run it outside of model.hooks(…); to change activations, use interventions."
        raise EngineError("a model without hooks of one's own while a plan runs", listing(hooked), do)
    if foreign := list(_foreign(model)):
        do = "Remove them while the plan runs; layers that it steps over would fire them all the same."
        raise EngineError("no torch forward hooks on the language model while a plan runs", f"some on {listing(foreign)}", do)


def _foreign(model: HookedVLM) -> Iterator[str]:
    inside = set(model.sites.decoder.modules())
    for name, module in model.hf.named_modules():
        concerned = module in inside or any(part is model.sites.decoder for part in module.modules())
        hooks = [*module._forward_hooks.values(), *module._forward_pre_hooks.values()] if concerned else []
        if any(not _owner(hook).startswith(KNOWN) for hook in hooks):
            yield name or type(module).__name__


def _owner(hook: object) -> str:
    return str(hook.__module__)
