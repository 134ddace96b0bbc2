"""Linear probes of a token's row and column, for any number of sites at once, trained from a stream."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Float, Int
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional

from sightlens.errors import ProbeError, listing
from sightlens.probes.report import AXES, AxisScores, ProbeReport
from sightlens.probes.tokens import ProbeBatch, ProbeSettings, SiteTokens, held_out, shuffle_labels


@dataclass(frozen=True)
class ProbeShape:
    """Channels of a site and the largest grid of its tokens."""

    width: int
    rows: int
    columns: int


class PositionProbes:
    """Two linear classifiers per site, of row and column, and two controls on shuffled labels; one optimizer for all.

    Schaumlöffel et al. 2026 (arXiv 2605.19792), position probes: ``argmax_k (W h + b)_k``, cross-entropy over all visual
    tokens. Memory does not grow with the number of images: a batch is seen, learned from and let go.

    >>> import torch
    >>> probes = PositionProbes({"site": ProbeShape(8, 2, 3)}, ProbeSettings(epochs=1))
    >>> probes.learn(ProbeBatch(("a", "b"), {"site": SiteTokens.of_grids(torch.randn(2, 2, 3, 8))})) > 0
    True
    """

    def __init__(
        self, shapes: Mapping[str, ProbeShape], settings: ProbeSettings | None = None, *, device: str | torch.device = "cpu"
    ) -> None:
        """Make untrained probes in float32, all weights zero.

        Args:
            shapes: of the sites.
            settings: how they are trained.
            device: where they are; activations come to them.
        """
        if not shapes:
            raise ProbeError("at least one site", "none", "Name the sites to probe.")
        self.shapes, self.settings = dict(shapes), settings or ProbeSettings()
        self._heads = nn.ModuleList(_Head(shape, standardize=self.settings.standardize) for shape in self.shapes.values()).to(device)
        self._optimizer = torch.optim.AdamW(
            self._heads.parameters(), lr=self.settings.learning_rate, weight_decay=self.settings.weight_decay
        )
        self._device = torch.device(device)
        self._counts = {site: np.zeros((len(AXES), 2, shape.rows, shape.columns), dtype=np.int64) for site, shape in self.shapes.items()}
        self._tokens = {site: np.zeros((shape.rows, shape.columns), dtype=np.int64) for site, shape in self.shapes.items()}

    def learn(self, batch: ProbeBatch) -> float:
        """Take one optimizer step on the training images of a batch, for all sites together.

        Returns:
            The mean loss over sites (nats, row and column added); NaN when every image is held out.

        Raises:
            ProbeError: for a missing site, or tokens that do not fit its shape.
        """
        losses = []
        self._heads.train()
        for site, head in self._named():
            tokens = self._tokens_of(batch, site, test=False)
            if len(tokens.rows) > 1:  # one token has no spread to standardize by
                logits, labels = head(tokens.states), self._labels(tokens, batch.images)
                losses.append(sum(functional.cross_entropy(one, label) for one, label in zip(logits, labels, strict=True)))
        if not losses:
            return float("nan")
        total = torch.stack(losses).sum()
        self._optimizer.zero_grad()
        total.backward()
        self._optimizer.step()
        return float(total.detach()) / len(losses)

    @torch.no_grad()
    def judge(self, batch: ProbeBatch) -> None:
        """Count right answers on the held-out images of a batch.

        Raises:
            ProbeError: as for `learn`.
        """
        self._heads.eval()
        for site, head in self._named():
            tokens = self._tokens_of(batch, site, test=True)
            if not len(tokens.rows):
                continue
            logits, labels = head(tokens.states), self._labels(tokens, batch.images)
            right = torch.stack([one.argmax(-1) == label for one, label in zip(logits, labels, strict=True)]).cpu()
            row, column = right[0::2], right[1::2]
            place = (tokens.rows.numpy(), tokens.columns.numpy())
            np.add.at(self._tokens[site], place, 1)
            for axis, found in enumerate((row, column, row & column)):
                for control in (0, 1):
                    np.add.at(self._counts[site][axis, control], place, found[control].numpy().astype(np.int64))

    def reports(self) -> dict[str, ProbeReport]:
        """Return what `judge` counted, by site."""
        found = {}
        for site, shape in self.shapes.items():
            chances = (1 / shape.rows, 1 / shape.columns, 1 / (shape.rows * shape.columns))
            axes = {
                name: AxisScores(self._counts[site][k, 0].copy(), self._counts[site][k, 1].copy(), self._tokens[site].copy(), chances[k])
                for k, name in enumerate(AXES)
            }
            found[site] = ProbeReport(site, axes)
        return found

    def save(self, path: str | Path) -> None:
        """Write weights, shapes and settings to one safetensors file; counts and the optimizer's state are not kept."""
        about = {"shapes": {site: asdict(shape) for site, shape in self.shapes.items()}, "settings": asdict(self.settings)}
        save_file({name: tensor.contiguous() for name, tensor in self._heads.state_dict().items()}, path, {"probes": json.dumps(about)})

    def _named(self) -> list[tuple[str, nn.Module]]:
        return list(zip(self.shapes, self._heads, strict=True))

    def _tokens_of(self, batch: ProbeBatch, site: str, *, test: bool) -> SiteTokens:
        if site not in batch.sites:
            raise ProbeError(f"activations of {site}", f"those of {listing(list(batch.sites))}", "Capture every site that is probed.")
        tokens, shape = batch.sites[site], self.shapes[site]
        if len(tokens.rows) and not (
            tokens.states.shape[1] == shape.width and int(tokens.rows.max()) < shape.rows and int(tokens.columns.max()) < shape.columns
        ):
            got = f"width {tokens.states.shape[1]}, places up to ({int(tokens.rows.max())}, {int(tokens.columns.max())})"
            raise ProbeError(f"tokens within {shape} at {site}", got, "Make the probes for the largest grid.")
        chosen = torch.tensor([held_out(image, self.settings) == test for image in batch.images])
        kept = tokens.keep(chosen[tokens.owners])
        return SiteTokens(kept.states.to(self._device, torch.float32), kept.rows, kept.columns, kept.owners)

    def _labels(self, tokens: SiteTokens, images: tuple[str, ...]) -> tuple[Int[Tensor, " token"], ...]:
        """Return row, column, shuffled row and shuffled column of each token."""
        seed = self.settings.seed
        shuffled = (shuffle_labels(labels, tokens.owners, images, seed=seed) for labels in (tokens.rows, tokens.columns))
        return tuple(labels.to(self._device) for labels in (tokens.rows, tokens.columns, *shuffled))


class _Head(nn.Module):
    """Row and column, and both again for shuffled labels, in one matrix product."""

    def __init__(self, shape: ProbeShape, *, standardize: bool) -> None:
        super().__init__()
        self._sizes = [shape.rows, shape.columns] * 2
        self.norm = nn.BatchNorm1d(shape.width, affine=False, momentum=None) if standardize else nn.Identity()
        self.linear = nn.Linear(shape.width, sum(self._sizes))
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def forward(self, states: Float[Tensor, "token width"]) -> tuple[Float[Tensor, "token _classes"], ...]:
        return self.linear(self.norm(states)).split(self._sizes, dim=-1)


def load_probes(path: str | Path, *, device: str | torch.device = "cpu") -> PositionProbes:
    """Read probes that :meth:`PositionProbes.save` wrote.

    Raises:
        ProbeError: when the file is missing or of another kind.
    """
    try:
        with safe_open(path, framework="pt") as file:
            about = json.loads((file.metadata() or {})["probes"])
        shapes = {site: ProbeShape(**shape) for site, shape in about["shapes"].items()}
        probes = PositionProbes(shapes, ProbeSettings(**about["settings"]), device=device)
        probes._heads.load_state_dict(load_file(path))
    except (OSError, SafetensorError, KeyError, ValueError, TypeError, RuntimeError) as problem:
        raise ProbeError("a file of saved probes", f"{path}: {problem}", "Write it with probes.save(path).") from problem
    return probes
