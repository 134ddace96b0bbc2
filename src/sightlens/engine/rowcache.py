"""A key-value cache whose rows share a clean prefix."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicLayer

KeysValues = tuple[Tensor, Tensor]
"""Of one layer, each ``[example, key_head, position, d_head]``."""


class KeptLayer(DynamicLayer):
    """One layer of the clean run: it hands keys and values on, and stores them as they are to be kept."""

    def __init__(self, keep: Callable[[Tensor], Tensor]) -> None:
        """Start empty; ``keep`` stores a tensor."""
        super().__init__()
        self._keep, self.is_initialized, self.held = keep, True, (torch.empty(0), torch.empty(0))

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> KeysValues:
        """Store the keys and values of the whole prompt."""
        self.held = self._keep(key_states), self._keep(value_states)
        return key_states, value_states

    def get_seq_length(self) -> int:
        """Say that nothing came before."""
        return 0


class RowLayer(DynamicLayer):
    """One layer: positions before ``prefix`` come from the clean run of each row's example, later ones are the row's own.

    While a layer runs, its rows' keys and values lie in one buffer, to which the prefix is copied; layers take turns, so that
    only one is filled at a time. Without ``room`` nothing stays afterwards. Folding the rows' queries over one shared prefix,
    joined with the rows' own keys by log-sum-exp, would save little: a layer's time is mostly its matrix products. It needs
    kernels that return the log-sum-exp and take no mask, so that knockouts, taps, padding and sliding windows would need the
    copy all the same; hence rows copy.
    """

    def __init__(self, clean: KeysValues, examples: Tensor, *, prefix: int, room: int | None) -> None:
        """Start with the prefix.

        Args:
            clean: keys and values of the clean run.
            examples: which example each row is.
            prefix: how many positions rows share with the clean run.
            room: positions to make room for after the first pass; None keeps nothing.
        """
        super().__init__()
        self._clean, self._examples, self._room = clean, examples, room
        self._own: KeysValues | None = None
        self._prefix, self._length = prefix, prefix
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> KeysValues:
        """Append new keys and values, and return all of them."""
        length = self._length + key_states.shape[-2]
        states = (key_states, value_states)
        if torch.is_grad_enabled():  # writing in place would break the graph
            return tuple(torch.cat([self._prefix_of(c, s), s], dim=-2) for c, s in zip(self._clean, states, strict=True))  # pyright: ignore[reportReturnType]
        both = self._own or tuple(self._allocate(c, s, length) for c, s in zip(self._clean, states, strict=True))
        for buffer, new in zip(both, states, strict=True):
            buffer[:, :, self._length : length] = new
        if self._room is not None:
            self._own, self._length = both, length  # pyright: ignore[reportAttributeAccessIssue]  # two tensors
        return both[0][:, :, :length], both[1][:, :, :length]

    def _prefix_of(self, clean: Tensor, like: Tensor) -> Tensor:
        part = clean[:, :, : self._prefix]
        if len(part) == 1:
            return part.to(like).expand(len(self._examples), -1, -1, -1)
        return part[self._examples.to(part.device)].to(like)

    def _allocate(self, clean: Tensor, new: Tensor, length: int) -> Tensor:
        buffer = new.new_empty(len(self._examples), new.shape[1], length + (self._room or 0), new.shape[3])
        buffer[:, :, : self._prefix] = self._prefix_of(clean, new)
        return buffer

    def finish(self, length: int, like: Tensor) -> None:
        """Take positions up to ``length`` from the clean run when the layer was stepped over."""
        if self._own is None:
            self._prefix = self._length = length
            keys, values = (self._allocate(clean, like.new_empty(1, *clean.shape[1:]), length) for clean in self._clean)
            self._own = (keys, values)

    def get_seq_length(self) -> int:
        """Count the positions so far."""
        return self._length

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return how many keys a pass of so many queries sees, and the first one's position."""
        return self._length + query_length, 0

    @staticmethod
    def joined(layers: Sequence[RowLayer]) -> RowLayer:
        """Put the rows of finished layers under each other."""
        first = layers[0]
        whole = RowLayer(first._clean, torch.cat([layer._examples for layer in layers]), prefix=first._length, room=first._room)
        if len(layers) == 1:
            whole._own = first._own
        else:
            kept = [layer._own for layer in layers]
            whole._own = tuple(torch.cat([own[k] for own in kept if own is not None]) for k in (0, 1))  # pyright: ignore[reportAttributeAccessIssue]
            for layer in layers:  # one layer at a time is there twice
                layer._own = None
        return whole


def row_cache(clean: Sequence[KeysValues], examples: Tensor, *, prefix: int, room: int | None = None) -> Cache:
    """Return a cache for rows that share the clean run's first positions; see :class:`RowLayer`."""
    return Cache(layers=[RowLayer(layer, examples, prefix=prefix, room=room) for layer in clean])


def finish(cache: Cache, length: int, like: Tensor) -> None:
    """Fill the layers that a pass stepped over."""
    for layer in cache.layers:
        assert isinstance(layer, RowLayer)
        layer.finish(length, like)


def joined(caches: Sequence[Cache]) -> Cache:
    """Put the rows of finished caches under each other."""
    return Cache(layers=[RowLayer.joined(layers) for layers in zip(*(cache.layers for cache in caches), strict=True)])  # pyright: ignore[reportArgumentType]
