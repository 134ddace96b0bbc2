"""Which positions of the sequence the forward pass in progress is computing."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
from jaxtyping import Int
from torch import nn

from sightlens._types import Positions
from sightlens.errors import SelectorError
from sightlens.families.compat import cached_length
from sightlens.families.family import Grid
from sightlens.interventions import Phase
from sightlens.layout import Layout, TokenSet

Carried = Int[np.ndarray, " token"]


class Window:
    """The absolute positions ``start .. stop`` of the current forward pass, and what the rows of its batch are.

    ``layouts`` holds each row's layout, ``examples`` which example of the prompt it is, ``grid`` how the projector's outputs of
    one crop lie in this model (0 × 0 when the picture decides). One window serves all HookedVLMs on one HF model. A decoding
    step with a cache computes one position; hooks and interventions act at absolute positions, so they ask here.
    """

    def __init__(self) -> None:
        """Begin before the first pass."""
        self.layouts: tuple[Layout, ...] = ()
        self.examples: tuple[int, ...] = ()
        self.grid = Grid(0, 0)
        self.start, self.stop = 0, 0

    @classmethod
    def of(cls, hf: nn.Module, decoder: nn.Module) -> Window:
        """Return the window that follows a model and its decoder; a few microseconds per forward pass, no tensor is touched."""
        if decoder not in _FOLLOWING:
            _FOLLOWING[decoder] = cls()
            for module in (hf, decoder):  # embeddings are looked up before the decoder is called
                module.register_forward_pre_hook(_FOLLOWING[decoder]._follow, with_kwargs=True)
        return _FOLLOWING[decoder]

    def _follow(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        given = [kwargs.get("inputs_embeds"), kwargs.get("input_ids"), *args]
        self.start = cached_length(kwargs)
        self.stop = self.start + next(states for states in given if states is not None).shape[1]

    @contextmanager
    def showing(self, layouts: Sequence[Layout], examples: Sequence[int]) -> Iterator[None]:
        """Say what the rows of the coming passes are, while the context is open; then describe the pass outside of it again."""
        before = self.layouts, self.examples, self.start, self.stop
        self.layouts, self.examples = tuple(layouts), tuple(examples)
        try:
            yield
        finally:
            self.layouts, self.examples, self.start, self.stop = before

    def snapshot(self) -> Window:
        """Return this pass's window, which later passes do not move."""
        return copy.copy(self)

    def inside(self, tokens: TokenSet, phases: Sequence[Phase], *, first: int | None = None) -> tuple[Positions, Positions]:
        """Return a token set's absolute positions inside the window, in the set's order, and their index in the set.

        Args:
            tokens: on the layout of a row.
            phases: ``"prefill"`` for positions of the prompt, ``"decode"`` for generated ones that the set takes in; the index
                of those is -1.
            first: where to begin instead of the window's start; keys are held from earlier passes too.
        """
        start = self.start if first is None else first
        chosen = tokens.positions if "prefill" in phases else tokens.positions[:0]
        held = (chosen >= start) & (chosen < self.stop)
        new = np.arange(max(start, len(tokens.mask)), self.stop if "decode" in phases and tokens.generated else 0)
        return np.concatenate([chosen[held], new]), np.concatenate([np.flatnonzero(held), np.full(len(new), -1)])

    def queries(self, tokens: TokenSet) -> Positions:
        """Return a token set's positions inside the window, counted from its start; generated ones if the set takes them.

        A set with a grid shape that lies wholly inside comes row by row, any other ascending.
        """
        if self.holds(tokens) and tokens.grid_shape is not None:
            return tokens.positions - self.start
        return np.flatnonzero(self._members(tokens)[self.start : self.stop])

    def keys(self, tokens: TokenSet, *, held: int) -> Positions:
        """Return where a token set's positions stand among the last ``held`` keys up to the window's end.

        A layer holds all keys, or, when its attention slides, those of its window.
        """
        first = max(0, self.stop - held)
        if tokens.grid_shape is not None and self.stop >= len(tokens.mask) and not first:
            return tokens.positions
        return np.flatnonzero(self._members(tokens)[first : self.stop])

    def features(self, positions: Positions, row: int, *, name: str) -> tuple[Carried, Carried]:
        """Return which outputs of the projector, over the whole batch, the visual tokens among a row's positions carry, and their index.

        In the given order; the index counts the row's visual tokens by position.

        Args:
            positions: absolute.
            row: of the batch.
            name: of the positions, for messages.

        Raises:
            SelectorError: for visual tokens that blend several outputs.
        """
        structure = self.layouts[row].structure
        table = structure.visual_tokens()["position"]
        inside = np.searchsorted(table, positions[structure.visual[positions]])
        own = inside if structure.features is None else np.asarray(structure.features.of, dtype=np.int64)[inside]
        if (own < 0).any():
            raise SelectorError(
                "visual tokens that carry one output of the projector each",
                f"`{name}`, of which {int((own < 0).sum())} blend several",
                "Use hook_merged_embed: this picture's tiles were scaled down after the projector.",
            )
        return own + sum(layout.structure.feature_rows for layout in self.layouts[:row]), inside

    def holds(self, tokens: TokenSet) -> bool:
        """Whether every position of the set lies in the window."""
        chosen = np.flatnonzero(tokens.mask)
        return len(chosen) > 0 and bool(self.start <= chosen[0] and chosen[-1] < self.stop)

    def _members(self, tokens: TokenSet) -> np.ndarray:
        return tokens.extended(max(self.stop, len(tokens.mask)))


_FOLLOWING: WeakKeyDictionary[nn.Module, Window] = WeakKeyDictionary()
"""The window of each decoder that has one."""
