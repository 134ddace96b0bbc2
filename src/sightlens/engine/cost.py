"""What passes cost, from the model's shapes alone: floating-point operations and memory."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from torch import nn

from sightlens.engine.start import Point, Stage
from sightlens.layout import Layout
from sightlens.model import HookedVLM

FLOPS_PER_WEIGHT = 2
PASS = 250_000_000
"""Operations in the time that calling every module of a small model once more takes."""
CACHE = 12_000_000
"""Bytes of a layer's inner activations that a CPU's cache serves well."""
UNLIMITED = 2**31


def _weights(modules: Iterable[nn.Module]) -> int:
    """Count the weights that multiply every position."""
    return sum(part.weight.numel() for module in modules for part in module.modules() if isinstance(part, nn.Linear | nn.Conv2d))


@dataclass(frozen=True)
class ModelCost:
    """Sizes of a model that decide what a pass costs.

    Attributes:
        attention: weights of one layer's attention; ``output`` those of its output projection alone.
        mlp: weights of the rest of a layer.
        head: weights of the unembedding.
        tower: weights of the vision tower; ``projector`` those of the projector.
        tower_pair: operations per query-key pair, over all layers of the tower.
        pair: operations per query-key pair in one layer of the language model.
        kv: numbers kept per position and layer; ``width`` of the residual stream; ``itemsize`` bytes per number.
        accelerated: whether it runs on something other than the CPU.
    """

    layers: int
    attention: int
    output: int
    mlp: int
    head: int
    tower: int
    projector: int
    tower_pair: int
    pair: int
    kv: int
    width: int
    itemsize: int
    accelerated: bool

    @classmethod
    def of(cls, model: HookedVLM) -> ModelCost:
        """Read the sizes off a model."""
        sites, points = model.sites, model.sites.points
        attention, output = sites.attention_module(0), points["blocks.0.attn.hook_z"].module
        layer, key = (points[f"blocks.0.{name}"].module for name in ("hook_resid_pre", "attn.hook_k"))
        tower = [points[name].module for name in ("vision_encoder.hook_in",) if name in points]
        projector = [points[name].module for name in ("vision_projector.hook_out",) if name in points]
        blocks = {name.split(".")[2] for name in points if name.startswith("vision_encoder.encoder_layers.")}
        tower_width = _linear(points["vision_encoder.encoder_layers.0.attn.hook_z"].module).in_features if blocks else 0
        return cls(
            layers=sites.n_layers,
            attention=_weights([attention]),
            output=_weights([output]),
            mlp=_weights([layer]) - _weights([attention]),
            head=_weights([model.unembedding]),
            tower=_weights(tower),
            projector=_weights(projector),
            tower_pair=4 * len(blocks) * tower_width,
            pair=4 * _linear(output).in_features,
            kv=2 * _linear(key).out_features,
            width=model.cfg.d_model,
            itemsize=model.hf.dtype.itemsize,
            accelerated=model.device.type != "cpu",
        )

    def decoder(self, point: Point, queries: int, keys: int, *, read: int | None = None) -> int:
        """Return the operations of one row from a point on.

        Args:
            point: where it starts.
            queries: positions that are computed.
            keys: positions that are attended to.
            read: positions at which the last MLP runs; all when None.
        """
        whole = self.layers - point.layer - 1 + (point.stage is Stage.WHOLE_LAYER)
        attention = whole * queries * (FLOPS_PER_WEIGHT * self.attention + self.pair * keys)
        if point.stage is Stage.AFTER_ATTENTION:
            attention += FLOPS_PER_WEIGHT * queries * self.output
        mlps = whole + (point.stage is Stage.AFTER_ATTENTION)
        spared = 0 if read is None or mlps == 0 else queries - read
        return attention + FLOPS_PER_WEIGHT * self.mlp * (mlps * queries - spared)

    def fast_rows(self, queries: int) -> int:
        """Return how many rows of so many computed positions run fastest together.

        A CPU works faster on what stays in its cache, so that many long rows at once are slower than one after the other. An
        accelerator gets as many as fit.
        """
        per_row = queries * (self.mlp // self.width) * self.itemsize
        return UNLIMITED if self.accelerated else max(1, CACHE // per_row)

    @property
    def free_positions(self) -> int:
        """How many more positions a row may run for the price of another pass.

        Another pass reads every weight again, which costs a CPU as much as some ten positions and a GPU some hundred, and calls
        every module again, which costs some ``PASS`` operations.
        """
        per_position = FLOPS_PER_WEIGHT * self.layers * (self.attention + self.mlp)
        return (256 if self.accelerated else 16) + PASS // per_position

    def unembedding(self, positions: int) -> int:
        """Return the operations of reading logits."""
        return FLOPS_PER_WEIGHT * positions * self.head

    def vision(self, layout: Layout) -> int:
        """Return the operations of tower and projector for an example's images."""
        operations = 0
        for view in layout.views:
            patches = view.count * int(view.patches)
            operations += FLOPS_PER_WEIGHT * (patches * self.tower + view.count * self.projector) + self.tower_pair * patches**2
        return operations

    def row_bytes(self, queries: int, keys: int, *, read: int, stays: bool) -> int:
        """Return the memory that one row of a pass needs at most.

        Args:
            queries: positions that are computed.
            keys: positions that are attended to.
            read: positions whose logits are read.
            stays: whether the row's keys and values stay for generation.
        """
        inner = max(self.mlp // max(self.width, 1), self.width)
        states = queries * (6 * self.width + inner + 3 * (self.pair // 4)) * self.itemsize
        attention = keys * (self.kv + 2 * (self.pair // 4)) * self.itemsize + queries * keys * (2 * self.itemsize + 3)
        kept = self.layers * self.kv * keys * self.itemsize if stays else 0
        return states + attention + kept + 2 * read * (self.head // max(self.width, 1)) * self.itemsize


def _linear(module: nn.Module) -> nn.Linear:
    assert isinstance(module, nn.Linear)
    return module
