"""The clean run, kept: what every row of a plan starts from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from transformers.cache_utils import Cache as KeyValueCache

from sightlens._types import Logits
from sightlens.engine.rowcache import KeptLayer, KeysValues
from sightlens.errors import EngineError, FamilyError
from sightlens.families import Prompt
from sightlens.families.compat import cache_keyword
from sightlens.model import HookedVLM

NOT_KEPT = ("inputs_embeds", "input_ids", "use_cache", "logits_to_keep", "visual_pos_masks", "deepstack_visual_embeds")
"""What a decoder is given that a pass over part of it replaces, or that the engine makes for its rows."""


@dataclass(frozen=True)
class Keep:
    """How the clean run is kept.

    Attributes:
        dtype: of keys, values and states, such as ``torch.bfloat16``; the model's own when None. A smaller one changes
            results by its rounding.
        device: where they lie between passes, such as ``"cpu"``; the model's own when None.
    """

    dtype: torch.dtype | None = None
    device: torch.device | str | None = None

    def __post_init__(self) -> None:
        """Refuse what cannot hold activations.

        Raises:
            EngineError: for a dtype without fractions.
        """
        if self.dtype is not None and not self.dtype.is_floating_point:
            raise EngineError("a floating-point dtype", f"{self.dtype}", "Keep the clean run in torch.bfloat16, say.")

    def __call__(self, value: Tensor) -> Tensor:
        """Store a tensor."""
        return value.detach().to(device=self.device, dtype=self.dtype)


@dataclass(frozen=True)
class Prefix:
    """What the clean run left.

    Attributes:
        logits: at the positions that are read.
        keys_values: per layer, all positions of the prompt.
        states: by hook name.
        arguments: what the decoder was called with, beside embeddings and cache.
    """

    logits: Logits
    keys_values: tuple[KeysValues, ...]
    states: Mapping[str, Tensor]
    arguments: Mapping[str, Any]

    def state(self, name: str, examples: Tensor, *, span: slice, like: nn.Parameter) -> Float[Tensor, "row position ..."]:
        """Return a kept state of some rows and positions, in the dtype and on the device of a parameter."""
        value = self.states[name][:, span]
        part = value.expand(len(examples), *value.shape[1:]) if len(value) == 1 else value[examples.to(value.device)]
        return part.to(like)

    @property
    def nbytes(self) -> int:
        """Memory held."""
        pairs = [tensor for pair in self.keys_values for tensor in pair]
        return sum(tensor.nbytes for tensor in (*pairs, *self.states.values(), self.logits))


def run_clean(model: HookedVLM, prompt: Prompt, names: Sequence[str], *, keep: Keep, read: Tensor) -> Prefix:
    """Run a prompt once and keep keys, values and the named states.

    Args:
        model: without hooks of its own on the language model.
        prompt: one example or a batch.
        names: hook names.
        keep: how they are kept.
        read: positions whose logits are kept.
    """
    decoder = model.sites.decoder
    states: dict[str, Tensor] = {}
    seen: dict[str, Any] = {}

    def note(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        seen.update(kwargs)

    def keeper(value: Tensor, hook: Any) -> None:
        states[hook.name] = keep(value)

    cache = KeyValueCache(layers=[KeptLayer(keep) for _ in range(model.sites.n_layers)])
    handle = decoder.register_forward_pre_hook(note, with_kwargs=True)
    try:
        with model.sites.window.showing(prompt.layouts, range(len(prompt))), model.hooks(fwd_hooks=[(name, keeper) for name in names]):
            output = model.hf(**prompt.tensors, use_cache=True, logits_to_keep=read, **{cache_keyword(): cache})
    finally:
        handle.remove()
    left_out = (*NOT_KEPT, cache_keyword())
    arguments = {name: value for name, value in seen.items() if name not in left_out}
    pairs = tuple(layer.held for layer in cache.layers if isinstance(layer, KeptLayer))
    return Prefix(output.logits.detach(), pairs, states, arguments)


def window_arguments(arguments: Mapping[str, Any], examples: Tensor, *, start: int, stop: int) -> dict[str, Any]:
    """Return a decoder's arguments for rows of a batch and the positions ``start .. stop``.

    Args:
        arguments: of the clean run.
        examples: which example each row is.
        start: the first position that is computed.
        stop: behind the last.

    Raises:
        FamilyError: for an argument whose batch and position dimensions are unknown.
    """
    return {name: _windowed(name, value, examples, span=slice(start, stop)) for name, value in arguments.items()}


def _windowed(name: str, value: Any, examples: Tensor, *, span: slice) -> Any:
    if isinstance(value, Mapping):
        return {key: _windowed(name, item, examples, span=span) for key, item in value.items()}
    if not isinstance(value, Tensor):
        return value
    if name == "attention_mask" and value.ndim == 2:
        return value[examples, : span.stop]
    if name == "attention_mask" and value.ndim == 4:
        return (value.expand(len(examples), -1, -1, -1) if len(value) == 1 else value[examples])[:, :, span, : span.stop]
    if name == "position_ids":
        return (value.expand(*value.shape[:-2], len(examples), -1) if value.shape[-2] == 1 else value[..., examples, :])[..., span]
    raise FamilyError(
        "decoder arguments that the engine can cut into rows", f"{name} {list(value.shape)}", "Run the cells without the engine."
    )
