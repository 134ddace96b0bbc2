"""Hook points that reach into an HF model only while someone listens.

A :class:`LiveSite` is a TransformerLens ``HookPoint``. Adding the first hook installs a torch hook at the site's module;
removing the last one takes it away, so that an unhooked model runs exactly HF's own code.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
from einops import einsum, rearrange
from torch import Tensor, nn
from transformers import PreTrainedModel

from sightlens.errors import HookError
from sightlens.families.compat import HookPoint
from sightlens.families.sites import Attention, HeadResult, Input, Output, Site, Weight
from sightlens.model.attention import refresh, taps_of

PACKED = ("patch", "token", "query_patch", "key_patch")
"""Dimensions that a packed tower orders in its own way."""
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
        self._grids: Tensor | None = None

    def see(self, value: Tensor) -> Tensor:
        """Show hooks an activation in raster order, and return what they made of it in the model's own order.

        The very same tensor comes back when no hook replaced or edited it.
        """
        if self.site.order is None:
            return self(value)
        assert self._grids is not None
        there = self.site.order.indices(self._grids).to(value.device)
        back = there.argsort()
        axes = [axis for axis, dim in enumerate(self.site.dims) if dim in PACKED]
        shown = _permuted(value, there, axes)
        version = shown._version
        new = self(shown)
        return value if new is shown and shown._version == version else _permuted(new, back, axes)

    def follow(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Note the grids of the pictures that the tower is about to encode."""
        self._grids = kwargs["grid_thw"]

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
            try:
                self._remove = _install(self)
            except HookError:
                self.drop(handle)
                raise
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


def _permuted(value: Tensor, index: Tensor, axes: list[int]) -> Tensor:
    for axis in axes:
        value = value.index_select(axis, index)
    return value


def _install(point: LiveSite) -> Remove:
    order = point.site.order
    if order is None:
        return _install_tap(point)
    following = point._model[0].get_submodule(order.tower).register_forward_pre_hook(point.follow, with_kwargs=True)
    remove = _install_tap(point)

    def undo() -> None:
        remove()
        following.remove()

    return undo


def _install_tap(point: LiveSite) -> Remove:
    tap, module = point.site.tap, point.module
    if isinstance(tap, Attention):
        return _install_attention(point, tap, module)
    if isinstance(tap, Input):
        return module.register_forward_pre_hook(_input_hook(point, tap), with_kwargs=True, prepend=tap.first).remove
    if isinstance(tap, HeadResult):
        return _install_result(point, tap)
    if isinstance(tap, Weight):
        return _install_weight(point, tap, module)
    # prepended, so that HF's own recorders of hidden states see what we wrote
    return module.register_forward_hook(_output_hook(point, tap), prepend=not tap.last).remove


def _install_attention(point: LiveSite, tap: Attention, module: nn.Module) -> Remove:
    taps = taps_of(module)
    if tap.tensor in taps.points:
        raise HookError(f"one HookedVLM at a time that hooks {point.name} of an HF model", "a second one", "Reset the first one's hooks.")
    packed = point.site.order is not None
    if packed and not taps:
        taps.joining = module.register_forward_pre_hook(taps.join, with_kwargs=True)
    # a packed tower runs as a batch of one, which hooks do not see
    taps.points[tap.tensor] = (lambda value: point.see(value[0])[None]) if packed else point.see
    refresh(module)

    def remove() -> None:
        del taps.points[tap.tensor]
        if packed and not taps:
            taps.part()
        refresh(module)

    return remove


def _install_weight(point: LiveSite, tap: Weight, module: nn.Module) -> Remove:
    """Put what hooks make of a parameter in its place for the length of a pass; the parameter itself is not written."""

    def before(module: nn.Module, args: Any) -> None:
        parameter = module._parameters[tap.parameter]
        assert parameter is not None
        new = point.see(parameter.clone())
        module._parameters.pop(tap.parameter)
        module.__dict__[tap.parameter] = new
        held.append(parameter)

    def after(module: nn.Module, args: Any, output: Any) -> None:
        if held:  # nothing is held when a hook failed
            module.__dict__.pop(tap.parameter)
            module._parameters[tap.parameter] = held.pop()

    held: list[nn.Parameter] = []
    handles = [module.register_forward_pre_hook(before), module.register_forward_hook(after, always_call=True)]

    def remove() -> None:
        for handle in handles:
            handle.remove()

    return remove


def _split(value: Tensor, heads: int | None) -> Tensor:
    return value if heads is None else value.unflatten(-1, (heads, -1))


def _input_hook(point: LiveSite, tap: Input) -> Callable[..., Any]:
    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        by_name = tap.argument in kwargs
        value = kwargs[tap.argument] if by_name else args[0]
        seen = _split(value, tap.heads)
        new = point.see(seen)
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
        whole = output if tap.index is None else output[tap.index]
        value = whole if tap.part is None else whole.chunk(tap.part[1], dim=-1)[tap.part[0]]
        scale = None if tap.scale is None else point._model[0].get_parameter(tap.scale)
        seen = _split(value if scale is None else value * scale, tap.heads)
        before = seen._version
        new = point.see(seen)
        if new is seen and (scale is None or seen._version == before):
            return None
        new = new.flatten(-2) if tap.heads else new
        # the difference, so that writing back what was read changes nothing at all
        new = new if scale is None else value + (new - value * scale) / scale
        if tap.part is not None:
            pieces = list(whole.chunk(tap.part[1], dim=-1))
            pieces[tap.part[0]] = new
            new = torch.cat(pieces, dim=-1)
        return new if tap.index is None else (*output[: tap.index], new, *output[tap.index + 1 :])

    return hook


def _install_result(point: LiveSite, tap: HeadResult) -> Remove:
    projection = point.module

    def hook(module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> Tensor:
        return _with_results(point, tap, args[0], output)

    if tap.norm is None:
        return projection.register_forward_hook(hook, prepend=True).remove
    kept: dict[str, Tensor] = {}
    keeping = projection.register_forward_pre_hook(lambda module, args: kept.update(z=args[0]))

    def after(norm: Any, args: tuple[Tensor], output: Tensor) -> Tensor:
        total = args[0].float()
        gain = (1 + norm.weight.float()) * torch.rsqrt(total.pow(2).mean(-1, keepdim=True) + norm.eps)
        return _with_results(point, tap, kept.pop("z"), output, gain=gain)

    normed = point._model[0].get_submodule(tap.norm).register_forward_hook(after, prepend=True)

    def remove() -> None:
        keeping.remove()
        normed.remove()

    return remove


def _with_results(point: LiveSite, tap: HeadResult, z: Tensor, output: Tensor, *, gain: Tensor | None = None) -> Tensor:
    """Return an output to which hooks changed what single heads contribute; ``gain`` is what a norm multiplies them with."""
    whole: Any = point.module.weight
    weight = rearrange(whole, "d_model (head d_head) -> head d_head d_model", head=tap.heads)
    result: Tensor = einsum(_split(z, tap.heads), weight, "... head d_head, head d_head d_model -> ... head d_model")
    result = result if gain is None else (result.float() * gain[..., None, :]).to(output.dtype)
    kept = result.detach().clone()
    # the difference, so that writing back what was read changes nothing; gradients flow through the result alone
    return output.detach() + (point.see(result) - kept).sum(dim=-2)
