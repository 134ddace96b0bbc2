"""The dataset mean that an ablation puts in place of visual tokens, with what it was measured on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, get_args

import numpy as np
import torch
from jaxtyping import Float
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from sightlens._types import Positions
from sightlens.errors import InterventionError, listing
from sightlens.layout import Layout

Parts = Literal["all", "view", "position"]


@dataclass(frozen=True, eq=False)
class Mean:
    """Average activation over all visual tokens of a set of images, in float32; or one for each part of them.

    Schaumlöffel et al. 2026 (arXiv 2605.19792): ``μ = 1/(M·N) Σ proj(x)`` over ImageNet-val, one vector for all views.

    Attributes:
        vector: ``[d_model]``.
        site: where it was measured.
        source: what it was measured on, in words.
        tokens: how many visual tokens went in.
        companions: averages of what the model adds to the same tokens again later, by site.
        by: what parts are: ``"all"`` (there is one), ``"view"`` (global views and tiles apart), or ``"position"`` (each place
            in the grid of each kind of view; tiles share theirs).
        parts: averages by site, then by part (``"tile"``, ``"global[3,4]"``); an ablation takes them instead of the vector.
    """

    vector: Float[Tensor, " d_model"]
    site: str
    source: str
    tokens: int
    companions: Mapping[str, Float[Tensor, " d_model"]] = field(default_factory=dict)
    by: Parts = "all"
    parts: Mapping[str, Mapping[str, Float[Tensor, " d_model"]]] = field(default_factory=dict)

    def of(self, site: str, layout: Layout, positions: Positions) -> Float[Tensor, "n d_model"]:
        """Return what takes the place of visual tokens at a site: of the parts that they belong to.

        Raises:
            InterventionError: for a part that no picture of the mean has.
        """
        names = part_names(layout, positions, self.by)
        if absent := sorted({name for name in names if name not in self.parts[site]}):
            got = f"none of {listing(absent, limit=4)}"
            raise InterventionError("a mean of every part that is ablated", got, "Measure it on pictures with such views.")
        return torch.stack([self.parts[site][name] for name in names])


def part_names(layout: Layout, positions: Positions, by: Parts) -> list[str]:
    """Return the part that each visual token belongs to.

    Raises:
        InterventionError: for a position that is no visual token.
    """
    if not layout.structure.visual[positions].all():
        raise InterventionError("visual tokens, which belong to views", "other positions too", "Restrict it: `(…) & image`.")
    table = layout.visual_tokens()
    rows = table[np.searchsorted(table["position"], positions)]
    kinds = [layout.views[view].kind for view in rows["view"]]
    if by != "position":
        return [kind if by == "view" else "all" for kind in kinds]
    return [f"{kind}[{row['row']},{row['column']}]" for kind, row in zip(kinds, rows, strict=True)]


def save_mean(mean: Mean, path: Path) -> None:
    """Write a mean with its provenance to one safetensors file."""
    about = {"site": mean.site, "source": mean.source, "tokens": str(mean.tokens), "by": mean.by}
    vectors = {"mean": mean.vector, **{f"companion {name}": vector for name, vector in mean.companions.items()}}
    vectors |= {f"part {site} {name}": vector for site, held in mean.parts.items() for name, vector in held.items()}
    save_file({name: vector.contiguous() for name, vector in vectors.items()}, path, metadata=about)


def load_mean(path: Path) -> Mean:
    """Read what :func:`save_mean` wrote.

    Raises:
        OSError, SafetensorError, KeyError, ValueError: when the file is missing, damaged or of another kind.
    """
    with safe_open(path, framework="pt") as file:
        about = file.metadata() or {}
    vectors = load_file(path)
    companions = {name.removeprefix("companion "): vector for name, vector in vectors.items() if name.startswith("companion ")}
    parts: dict[str, dict[str, Tensor]] = {}
    for name, vector in vectors.items():
        if name.startswith("part "):
            _, site, part = name.split(" ")
            parts.setdefault(site, {})[part] = vector
    by = next(known for known in get_args(Parts) if known == about.get("by", "all"))
    return Mean(vectors["mean"], about["site"], about["source"], int(about["tokens"]), companions, by, parts)


class MeanMeter:
    """Accumulates means of parts in float64 over any number of batches."""

    def __init__(self, site: str) -> None:
        """Start at nothing."""
        self.site = site
        self._counts: dict[str, int] = {}
        self._sums: Tensor | None = None

    def add(self, values: Float[Tensor, "n d_model"], names: Sequence[str]) -> None:
        """Add activations, each to the part that is named."""
        for name in names:
            self._counts[name] = self._counts.get(name, 0) + 1
        index = {name: number for number, name in enumerate(self._counts)}
        grown = values.new_zeros(len(index), values.shape[-1], dtype=torch.float64)
        if self._sums is not None:
            grown[: len(self._sums)] = self._sums
        where = torch.tensor([index[name] for name in names], dtype=torch.long, device=values.device)
        self._sums = grown.index_add_(0, where, values.detach().double())

    def result(self) -> tuple[Float[Tensor, " d_model"], int, dict[str, Float[Tensor, " d_model"]]]:
        """Return the mean over everything, how much that was, and the mean of each part.

        Raises:
            InterventionError: when nothing was added.
        """
        total = sum(self._counts.values())
        if self._sums is None or not total:
            raise InterventionError("at least one image to average over", "none", "Give some prompts with images.")
        parts = {name: (row / count).float() for (name, count), row in zip(self._counts.items(), self._sums, strict=True)}
        return (self._sums.sum(0) / total).float(), total, parts
