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
def stepping_over(sites: Sites, point: Point, z: Tensor | None, *, read: Sequence[int]) -> Iterator[None]:
    """Let the decoder pass its input through every layer before a point, while the context is open.

    The last layer's MLP runs only where its output is read, unless someone listens inside it.

    Only the modules' ``forward`` is replaced, so hooks on them still fire; it is put back whatever happens.

    Args:
        sites: of the model.
        point: where computation starts.
        z: the clean ``[row, position, head · d_head]`` of that layer, when it starts after attention.
        read: positions of the pass whose last hidden state is used.
    """
    skipped = point.layer + (point.stage is Stage.AFTER_LAYER)
    with ExitStack() as stack:
        for layer in range(skipped):
            stack.enter_context(_forward_as(sites.point(f"blocks.{layer}.hook_resid_pre").module, _pass_through))
        if point.stage is Stage.AFTER_ATTENTION:
            project = sites.point(f"blocks.{point.layer}.attn.hook_z").module

            def from_z(*args: Any, **kwargs: Any) -> tuple[Tensor, None]:
                return project(z), None

            stack.enter_context(_forward_as(sites.attention_module(point.layer), from_z))
        mlp, inner = sites.mlp(sites.n_layers - 1)
        if point.stage is not Stage.AFTER_LAYER and not any(site.has_hooks() for site in inner):
            stack.enter_context(_forward_as(mlp, partial(_only_at, mlp.forward, list(read))))
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
