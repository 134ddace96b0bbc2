"""The dataset mean that an ablation puts in place of visual tokens, with what it was measured on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from jaxtyping import Float
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from sightlens.errors import InterventionError


@dataclass(frozen=True, eq=False)
class Mean:
    """Average activation over all visual tokens of a set of images, in float32.

    Schaumlöffel et al. 2026 (arXiv 2605.19792): ``μ = 1/(M·N) Σ proj(x)`` over ImageNet-val, one vector for all views.

    Attributes:
        vector: ``[d_model]``.
        site: where it was measured.
        source: what it was measured on, in words.
        tokens: how many visual tokens went in.
        companions: averages of what the model adds to the same tokens again later, by site.
    """

    vector: Float[Tensor, " d_model"]
    site: str
    source: str
    tokens: int
    companions: Mapping[str, Float[Tensor, " d_model"]] = field(default_factory=dict)


def save_mean(mean: Mean, path: Path) -> None:
    """Write a mean with its provenance to one safetensors file."""
    about = {"site": mean.site, "source": mean.source, "tokens": str(mean.tokens)}
    vectors = {"mean": mean.vector, **{f"companion {name}": vector for name, vector in mean.companions.items()}}
    save_file({name: vector.contiguous() for name, vector in vectors.items()}, path, metadata=about)


def load_mean(path: Path) -> Mean:
    """Read what :func:`save_mean` wrote.

    Raises:
        OSError, SafetensorError, KeyError, ValueError: when the file is missing, damaged or of another kind.
    """
    with safe_open(path, framework="pt") as file:
        about = file.metadata() or {}
    vectors = load_file(path)
    companions = {name.removeprefix("companion "): vector for name, vector in vectors.items() if name != "mean"}
    return Mean(vectors["mean"], about["site"], about["source"], int(about["tokens"]), companions)


class MeanMeter:
    """Accumulates a mean in float64 over any number of batches."""

    def __init__(self, site: str, source: str) -> None:
        """Start at nothing."""
        self.site, self.source, self.tokens = site, source, 0
        self._sum: Tensor | None = None

    def add(self, values: Float[Tensor, "*any d_model"]) -> None:
        """Add activations."""
        flat = values.detach().flatten(0, -2).double()
        self.tokens += flat.shape[0]
        self._sum = flat.sum(0) if self._sum is None else self._sum + flat.sum(0)

    def result(self) -> Mean:
        """Return the mean.

        Raises:
            InterventionError: when nothing was added.
        """
        if self._sum is None:
            raise InterventionError("at least one image to average over", "none", "Give some prompts with images.")
        return Mean((self._sum / self.tokens).to(torch.float32), self.site, self.source, self.tokens)
