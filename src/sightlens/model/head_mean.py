"""The dataset mean of every head's output, which a mean ablation of heads puts in its place."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from jaxtyping import Float
from torch import Tensor

from sightlens.errors import InterventionError
from sightlens.families import Prompt
from sightlens.model.hooked import HookedVLM

HEAD_MEAN = "head_mean"


@torch.no_grad()
def fit_head_mean(model: HookedVLM, prompts: Iterable[Prompt]) -> Float[Tensor, "layer head d_head"]:
    """Average ``hook_z`` over all positions of prompts, and keep the result as the donor ``"head_mean"``.

    Args:
        model: whose heads.
        prompts: one at a time in memory; padding is left out.

    Raises:
        InterventionError: without a prompt.
    """
    names = [f"blocks.{layer}.attn.hook_z" for layer in range(model.cfg.n_layers)]
    total, positions = torch.zeros((), dtype=torch.float64), 0
    for prompt in prompts:
        _, cache = model.run_with_cache(prompt, names_filter=names)
        real = prompt.tensors["attention_mask"].bool()
        total = total + torch.stack([cache[name][real].sum(0, dtype=torch.float64) for name in names]).cpu()
        positions += int(real.sum())
    if positions == 0:
        raise InterventionError("at least one prompt to average over", "none", "Give some prompts with images.")
    model.donors[HEAD_MEAN] = (total / positions).float()
    return (total / positions).float()
