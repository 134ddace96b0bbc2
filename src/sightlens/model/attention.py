"""Reading and editing what happens inside attention, without leaving the fused path unless someone asks.

While at least one tap is active the model's attention layers call :func:`tapped_sdpa` or :func:`tapped_eager`. A layer
without taps goes on to its own fused kernel; an edited mask stays on the fused path; only a layer whose scores or
pattern are read or written is computed step by step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from sightlens.errors import InterventionError
from sightlens.families.compat import register_attention, sdpa_attention_forward
from sightlens.families.sites import AttentionTensor

MaskEdit = Callable[[Float[Tensor, "batch heads query key"]], Float[Tensor, "batch heads query key"]]
NAME = "sightlens"


class AttentionTaps:
    """What is active at one attention module: hook points and mask edits.

    An edge that an edit removes must stay removed: whatever hooks write into the mask, the scores or the pattern is checked.
    """

    def __init__(self) -> None:
        """Start with nothing active."""
        self.points: dict[AttentionTensor, Callable[[Tensor], Tensor]] = {}
        self.edits: list[MaskEdit] = []
        self.joining: RemovableHandle | None = None
        self.apart: Bool[Tensor, "1 1 query key"] | None = None

    def __bool__(self) -> bool:
        """Whether anything is active."""
        return bool(self.points or self.edits)

    def fire(self, name: AttentionTensor, value: Tensor) -> Tensor:
        """Pass a tensor through its hook point, if one is active."""
        return self.points[name](value) if name in self.points else value

    def join(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Have a layer that works chunk by chunk compute all chunks at once, under a mask that keeps them apart."""
        stops = kwargs["cu_seqlens"]
        chunk = torch.bucketize(torch.arange(int(stops[-1]), device=stops.device), stops[1:], right=True)
        self.apart = (chunk[:, None] == chunk)[None, None]
        return args, {**kwargs, "cu_seqlens": stops[[0, -1]]}

    def part(self) -> None:
        """Let the layer work chunk by chunk again."""
        assert self.joining is not None
        self.joining.remove()
        self.joining = self.apart = None


_TAPS: WeakKeyDictionary[nn.Module, AttentionTaps] = WeakKeyDictionary()
_ORIGINAL: WeakKeyDictionary[nn.Module, str] = WeakKeyDictionary()


def taps_of(module: nn.Module) -> AttentionTaps:
    """Return the taps of an attention module, made on first use."""
    return _TAPS.setdefault(module, AttentionTaps())


def _config(module: Any) -> Any:
    return module.config


def refresh(module: nn.Module) -> None:
    """Route an attention module's model through the tapped functions while any tap is active, and back after the last."""
    config = _config(module)
    name = config._attn_implementation
    active = any(taps and _config(other) is config for other, taps in _TAPS.items())
    if active and not name.startswith(f"{NAME}_"):
        _ORIGINAL[module] = name
        config._attn_implementation = f"{NAME}_{'eager' if name == 'eager' else 'sdpa'}"
    elif not active and name.startswith(f"{NAME}_"):
        originals = [_ORIGINAL.pop(other) for other in list(_ORIGINAL) if _config(other) is config]
        config._attn_implementation = originals[0]


def additive_mask(mask: Tensor | None, query: Tensor, key: Tensor, *, causal: bool) -> Float[Tensor, "batch heads query key"]:
    """Turn any mask HF passes into a new additive one: 0 keeps an edge, the dtype's minimum removes it.

    Args:
        mask: None (causal or full attention), bool (True keeps), or additive float, ``[batch, 1 | head, query, key]``.
        query: ``[batch, head, query, d_head]``.
        key: ``[batch, key_head, key, d_head]``.
        causal: what None means.
    """
    batch, queries, keys = query.shape[0], query.shape[2], key.shape[2]
    lowest = torch.finfo(query.dtype).min
    if mask is None:
        keep = torch.ones(queries, keys, dtype=torch.bool, device=query.device)
        keep = keep.tril(keys - queries) if causal and queries > 1 else keep
        mask = keep.expand(batch, 1, queries, keys)
    if mask.dtype == torch.bool:
        return torch.zeros(mask.shape, dtype=query.dtype, device=query.device).masked_fill_(~mask, lowest)
    return mask[..., :keys].clone()


def kept_edges(mask: Float[Tensor, "*any query key"]) -> Bool[Tensor, "*any query key"]:
    """Return which edges an additive mask keeps."""
    return mask > torch.finfo(mask.dtype).min / 2


def tapped_sdpa(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any) -> Any:
    """Run a layer on the fused path, with whatever taps it has."""
    taps = _TAPS.get(module)
    if not taps:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **options)
    attention_mask = attention_mask if taps.apart is None else taps.apart
    if {"attn_scores", "pattern"} & set(taps.points):
        return _stepwise(module, taps, (query, key, value), attention_mask, options)
    query, key, mask, _ = _before_scores(module, taps, (query, key), attention_mask, options)
    return sdpa_attention_forward(module, query, key, value, mask, **options)


def tapped_eager(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any) -> Any:
    """Run a layer of an eager model step by step, with whatever taps it has."""
    taps = _TAPS.get(module) or AttentionTaps()
    attention_mask = attention_mask if taps.apart is None else taps.apart
    return _stepwise(module, taps, (query, key, value), attention_mask, options)


def _is_causal(module: Any, options: dict[str, Any]) -> bool:
    asked = options.get("is_causal")
    return module.is_causal if asked is None else asked


def _before_scores(
    module: nn.Module, taps: AttentionTaps, query_key: tuple[Tensor, Tensor], mask: Tensor | None, options: dict[str, Any]
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Return queries, keys and mask as hooks and edits leave them, and the edges that edits removed; None for no edit."""
    query = taps.fire("rot_q", query_key[0].transpose(1, 2)).transpose(1, 2)
    key = taps.fire("rot_k", query_key[1].transpose(1, 2)).transpose(1, 2)
    removed = None
    if taps.edits or "attn_mask" in taps.points:
        mask = given = additive_mask(mask, query, key, causal=_is_causal(module, options))
        for edit in taps.edits:
            mask = edit(mask)
        removed = kept_edges(given) & ~kept_edges(mask) if taps.edits and taps.points else None
        if "attn_mask" in taps.points:
            mask = taps.fire("attn_mask", mask.expand(-1, query.shape[1], -1, -1).clone())
            _check_removed(removed, kept_edges(mask))
    return query, key, mask, removed


def _check_removed(removed: Tensor | None, kept: Tensor) -> None:
    """Refuse a pass in which an edge that was removed is kept after all."""
    if removed is not None and (back := removed & kept).any():
        raise InterventionError(
            "no attention on the edges that a knockout removed",
            f"{int(back.sum())} edges that a hook on mask, scores or pattern, or a patch-in there, put back",
            "Leave these edges out of the one or the other.",
        )


def _stepwise(
    module: nn.Module, taps: AttentionTaps, states: tuple[Tensor, Tensor, Tensor], mask: Tensor | None, options: dict[str, Any]
) -> tuple[Tensor, Tensor]:
    query, key, mask, removed = _before_scores(module, taps, states[:2], mask, options)
    repeats = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(repeats, dim=1) if repeats > 1 else x for x in (key, states[2]))
    mask = additive_mask(mask, query, key, causal=_is_causal(module, options))
    scores = taps.fire("attn_scores", query @ key.transpose(2, 3) * options["scaling"] + mask)
    pattern = taps.fire("pattern", scores.softmax(dim=-1, dtype=torch.float32).to(query.dtype))
    _check_removed(removed, pattern != 0)
    dropped = nn.functional.dropout(pattern, p=options.get("dropout", 0.0), training=module.training)
    return (dropped @ value).transpose(1, 2).contiguous(), pattern


register_attention(NAME, fused=tapped_sdpa, eager=tapped_eager)
