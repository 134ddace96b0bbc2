"""Whether the paths through a model agree: hooked and not, fused and stepwise, cached and not."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from sightlens._types import Logits
from sightlens.errors import CheckpointError
from sightlens.families import Prompt
from sightlens.families.compat import cache_keyword
from sightlens.families.prompt import PER_POSITION

TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 0.15, torch.float16: 0.03}
"""Largest difference between two paths, relative to the largest logit."""


@dataclass(frozen=True)
class Check:
    """One thing that was checked."""

    name: str
    passed: bool
    detail: str


def compare_paths(expected: Logits, others: Mapping[str, Logits], dtype: torch.dtype) -> tuple[Check, ...]:
    """Compare logits of several paths with those of HF.

    Args:
        expected: HF's own, ``[batch, position, vocab]``.
        others: by the name of the path; a path may hold the last positions only.
        dtype: of the weights, which decides how much may differ.

    Raises:
        CheckpointError: when one differs by more.
    """
    scale, limit = float(expected.float().abs().max()), TOLERANCE.get(dtype, 0.15)
    checks = []
    for name, logits in others.items():
        worst = float((logits.float() - expected[:, -logits.shape[1] :].float()).abs().max())
        passed = bool(np.isfinite(worst)) and worst <= limit * scale
        checks.append(Check(name, passed, f"largest difference {worst:.2g}, largest logit {scale:.3g}"))
    if failed := [check for check in checks if not check.passed]:
        found = "; ".join(f"{check.name}: {check.detail}" for check in failed)
        raise CheckpointError("paths that agree", found, "Try dtype=torch.float32 or another attention path.")
    return tuple(checks)


def cached_logits(hf: nn.Module, prompt: Prompt) -> Tensor:
    """Return the last position's logits ``[batch, 1, vocab]`` from a step that reuses the keys and values of the rest."""
    moving = {name: tensor for name, tensor in prompt.tensors.items() if name in PER_POSITION}
    rest = {name: tensor for name, tensor in prompt.tensors.items() if name not in PER_POSITION}
    first = hf(**{name: tensor[..., :-1] for name, tensor in moving.items()}, **rest, use_cache=True)
    last = {name: tensor[..., -1:] for name, tensor in moving.items()} | {"attention_mask": moving["attention_mask"]}
    name = cache_keyword()
    return hf(**last, **{name: first[name]}).logits
