"""Running HF's own decoder from the middle: modules whose outputs are known are stepped over."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from sightlens.engine.start import Point, Stage
from sightlens.model.sites import Sites


@contextmanager
def stepping_over(sites: Sites, point: Point, z: Tensor | None, *, read: Sequence[int] | None) -> Iterator[None]:
    """Let the decoder pass its input through every layer before a point, while the context is open.

    Only the modules' ``forward`` is replaced, so hooks on them still fire; it is put back whatever happens.

    Args:
        sites: of the model.
        point: where computation starts.
        z: the clean ``[row, position, head · d_head]`` of that layer, when it starts after attention.
        read: positions of the pass at which the last layer's MLP runs, elsewhere it gives zeros; everywhere when None.
    """
    with ExitStack() as stack:
        for layer in range(point.skipped):
            stack.enter_context(_forward_as(sites.block(layer), _pass_through))
        if point.stage is Stage.AFTER_ATTENTION:
            project = sites.point(f"blocks.{point.layer}.attn.hook_z").module

            def from_z(*args: Any, **kwargs: Any) -> tuple[Tensor, None]:
                return project(z), None

            stack.enter_context(_forward_as(sites.attention_module(point.layer), from_z))
        if read is not None:
            mlp = sites.mlp(sites.n_layers - 1)
            stack.enter_context(_forward_as(mlp, partial(_only_at, mlp.forward, list(read))))
        yield


@contextmanager
def stopping_after(sites: Sites, layer: int) -> Iterator[None]:
    """Let the decoder pass a layer's output through every later layer, while the context is open; -1 skips all of them."""
    with ExitStack() as stack:
        for later in range(layer + 1, sites.n_layers):
            stack.enter_context(_forward_as(sites.block(later), _pass_through))
        yield


def _only_at(forward: Callable[[Tensor], Tensor], read: list[int], hidden_states: Tensor) -> Tensor:
    output = torch.zeros_like(hidden_states)
    output[:, read] = forward(hidden_states[:, read])
    return output


def _pass_through(hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    return hidden_states


@contextmanager
def _forward_as(module: nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    before = vars(module).get("forward")  # accelerate may have put its own there
    module.forward = forward
    try:
        yield
    finally:
        if before is None:
            del module.forward
        else:
            module.forward = before
