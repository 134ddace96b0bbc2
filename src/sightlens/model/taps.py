"""Hook points that reach into an HF model only while someone listens.

A :class:`LiveSite` is a TransformerLens ``HookPoint``. Adding the first hook installs a torch hook at the site's module;
removing the last one takes it away, so that an unhooked model runs exactly HF's own code.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

from einops import einsum, rearrange
from torch import Tensor, nn
from transformers import PreTrainedModel

from sightlens.errors import HookError
from sightlens.families.compat import HookPoint
from sightlens.families.sites import Attention, HeadResult, Input, Output, Site
from sightlens.model.attention import refresh, taps_of

Remove = Callable[[], None]
Direction = Literal["fwd", "bwd", "both"]


class LiveSite(HookPoint):
    """A hook point at one site of a model."""

    def __init__(self, site: Site, model: PreTrainedModel) -> None:
        """Bind a site to the module that carries it.

        Args:
            site: what is tapped.
            model: the HF model; the site's module must exist in it.
        """
        super().__init__()
        self.site, self.name = site, site.name
        self._model, self._remove = (model,), None  # a tuple keeps the model from becoming a submodule

    @property
    def module(self) -> nn.Module:
        """The HF module that carries this site."""
        return self._model[0].get_submodule(self.site.module)

    # the other options of TransformerLens go by keyword
    def add_hook(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, hook: Callable[..., Any], dir: Literal["fwd", "bwd"] = "fwd", **options: Any
    ) -> Any:
        """Add a hook as TransformerLens does, and start listening."""
        handle = super().add_hook(hook, dir=dir, **options)
        if self._remove is None:
            self._remove = _install(self)
        return handle

    def drop(self, handle: Any) -> None:
        """Remove one hook by the handle that :meth:`add_hook` returned."""
        handle.hook.remove()
        self.fwd_hooks = [other for other in self.fwd_hooks if other is not handle]
        self.bwd_hooks = [other for other in self.bwd_hooks if other is not handle]
        self._rest()

    def remove_hooks(self, dir: Direction = "fwd", including_permanent: bool = False, level: int | None = None) -> None:
        """Remove hooks as TransformerLens does, and stop listening after the last."""
        super().remove_hooks(dir, including_permanent, level)
        self._rest()

    def _rest(self) -> None:
        if self._remove is not None and not self.has_hooks():
            self._remove()
            self._remove = None


def _install(point: LiveSite) -> Remove:
    tap, module = point.site.tap, point.module
    if isinstance(tap, Attention):
        return _install_attention(point, tap, module)
    if isinstance(tap, Input):
        return module.register_forward_pre_hook(_input_hook(point, tap), with_kwargs=True).remove
    hook = _result_hook(point, tap) if isinstance(tap, HeadResult) else _output_hook(point, tap)
    # prepended, so that HF's own recorders of hidden states see what we wrote
    return module.register_forward_hook(hook, prepend=True).remove


def _install_attention(point: LiveSite, tap: Attention, module: nn.Module) -> Remove:
    taps = taps_of(module)
    if tap.tensor in taps.points:
        raise HookError(f"one HookedVLM at a time that hooks {point.name} of an HF model", "a second one", "Reset the first one's hooks.")
    taps.points[tap.tensor] = point
    refresh(module)

    def remove() -> None:
        del taps.points[tap.tensor]
        refresh(module)

    return remove


def _split(value: Tensor, heads: int | None) -> Tensor:
    return value if heads is None else value.unflatten(-1, (heads, -1))


def _input_hook(point: LiveSite, tap: Input) -> Callable[..., Any]:
    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        by_name = tap.argument in kwargs
        value = kwargs[tap.argument] if by_name else args[0]
        seen = _split(value, tap.heads)
        new = point(seen)
        if new is seen:
            return None
        new = new.flatten(-2) if tap.heads else new
        if tap.shared:
            value.copy_(new)
            return None
        return (args, {**kwargs, tap.argument: new}) if by_name else ((new, *args[1:]), kwargs)

    return hook


def _output_hook(point: LiveSite, tap: Output) -> Callable[..., Any]:
    def hook(module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        value = output if tap.index is None else output[tap.index]
        scale = None if tap.scale is None else point._model[0].get_parameter(tap.scale)
        seen = _split(value if scale is None else value * scale, tap.heads)
        before = seen._version
        new = point(seen)
        if new is seen and (scale is None or seen._version == before):
            return None
        new = new.flatten(-2) if tap.heads else new
        # the difference, so that writing back what was read changes nothing at all
        new = new if scale is None else value + (new - value * scale) / scale
        return new if tap.index is None else (*output[: tap.index], new, *output[tap.index + 1 :])

    return hook


def _result_hook(point: LiveSite, tap: HeadResult) -> Callable[..., Any]:
    def hook(module: Any, args: tuple[Any, ...], output: Tensor) -> Tensor | None:
        weight = rearrange(module.weight, "d_model (head d_head) -> head d_head d_model", head=tap.heads)
        z = rearrange(args[0], "batch position (head d_head) -> batch position head d_head", head=tap.heads)
        result = einsum(z, weight, "batch position head d_head, head d_head d_model -> batch position head d_model")
        kept = result.detach().clone()
        # the difference, so that writing back what was read changes nothing; gradients flow through the result alone
        return output.detach() + (point(result) - kept).sum(dim=2)

    return hook
