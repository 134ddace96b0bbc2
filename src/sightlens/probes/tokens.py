"""What probes learn from: activations of visual tokens with their place, image by image."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from functools import lru_cache

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from sightlens.errors import ProbeError


@dataclass(frozen=True)
class ProbeSettings:
    """How probes are trained; the localization paper states images and epochs, the rest is ours (arXiv 2605.19792, probes).

    Attributes:
        epochs: passes over the images.
        learning_rate: of AdamW.
        weight_decay: of AdamW.
        standardize: whether activations are first shifted and scaled per channel by running statistics, so that one
            learning rate serves sites of different norms; the probe stays linear in the activations.
        test_share: share of images that are held out (10,000 of 60,000 in the paper).
        seed: of the split and the shuffled labels.
    """

    epochs: int = 10
    learning_rate: float = 1e-3
    weight_decay: float = 1e-2
    standardize: bool = True
    test_share: float = 1 / 6
    seed: int = 0

    def __post_init__(self) -> None:
        """Refuse numbers out of range."""
        if self.epochs < 1 or self.learning_rate <= 0 or self.weight_decay < 0 or not 0 < self.test_share < 1:
            raise ProbeError("epochs >= 1, learning_rate > 0, weight_decay >= 0, 0 < test_share < 1", str(self), "Mend the settings.")


@dataclass(frozen=True, eq=False)
class SiteTokens:
    """Activations of one site, with the place of each token.

    Attributes:
        states: one row per token.
        rows: of each token in its view, from 0.
        columns: of each token in its view, from 0.
        owners: index of each token's image in the batch.
    """

    states: Float[Tensor, "token width"]
    rows: Int[Tensor, " token"]
    columns: Int[Tensor, " token"]
    owners: Int[Tensor, " token"]

    @classmethod
    def of_grids(cls, states: Float[Tensor, "image rows columns width"]) -> SiteTokens:
        """Take whole grids, one per image."""
        images, rows, columns, _ = states.shape
        owners, row, column = torch.meshgrid(*(torch.arange(size) for size in (images, rows, columns)), indexing="ij")
        return cls(states.flatten(0, 2), row.flatten(), column.flatten(), owners.flatten())

    @classmethod
    def join(cls, parts: Sequence[SiteTokens]) -> SiteTokens:
        """Put some, at least one, behind each other."""
        return cls(*(torch.cat([getattr(part, field.name) for part in parts]) for field in fields(cls)))

    def keep(self, chosen: Bool[Tensor, " token"]) -> SiteTokens:
        """Return the chosen tokens."""
        return SiteTokens(self.states[chosen.to(self.states.device)], self.rows[chosen], self.columns[chosen], self.owners[chosen])


@dataclass(frozen=True, eq=False)
class ProbeBatch:
    """Some images and their activations at every site.

    Attributes:
        images: their ids, which decide the split.
        sites: by hook name.
    """

    images: tuple[str, ...]
    sites: Mapping[str, SiteTokens]


def held_out(image: str, settings: ProbeSettings) -> bool:
    """Say whether an image is for testing only; its id alone decides, so all its tokens are on one side."""
    return _fraction(f"split {settings.seed} {image}") < settings.test_share


def shuffle_labels(
    labels: Int[Tensor, " token"], owners: Int[Tensor, " token"], images: tuple[str, ...], *, seed: int
) -> Int[Tensor, " token"]:
    """Permute labels among the tokens of each image, in the same way whenever the image is seen."""
    return labels[_shuffled_order(owners.numpy().tobytes(), images, seed)]


@lru_cache(maxsize=8)
def _shuffled_order(owners: bytes, images: tuple[str, ...], seed: int) -> Int[Tensor, " token"]:
    """Return where each token takes its label from; all sites of a batch, and both axes, share it."""
    owner = np.frombuffer(owners, dtype=np.int64)
    order = np.arange(len(owner))
    for index, image in enumerate(images):
        places = np.flatnonzero(owner == index)
        number = int(_fraction(f"shuffle {seed} {image}") * 2**48)
        order[places] = places[np.random.default_rng(number).permutation(len(places))]
    return torch.from_numpy(order)


def _fraction(text: str) -> float:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:6], "big") / 2**48
