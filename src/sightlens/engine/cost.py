"""What passes cost, from the model's shapes alone: floating-point operations and memory."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from sightlens.engine.start import Point, Stage
from sightlens.engine.vision import FLOPS_PER_WEIGHT, VisionCost, weights
from sightlens.layout import Layout
from sightlens.model import HookedVLM

PASS = 250_000_000
"""Operations in the time that calling every module of a small model once more takes."""
CACHE = 12_000_000
"""Bytes of a layer's inner activations that a CPU's cache serves well."""
UNLIMITED = 2**31


@dataclass(frozen=True)
class ModelCost:
    """Sizes of a model that decide what a pass costs.

    Attributes:
        attention: weights of one layer's attention; ``output`` those of its output projection alone.
        mlp: weights of the rest of a layer.
        head: weights of the unembedding.
        vision: of the tower and the projector; None for a model that sees nothing.
        pair: operations per query-key pair in one layer of the language model.
        kv: numbers kept per position and layer; ``width`` of the residual stream; ``itemsize`` bytes per number.
        heads: per layer.
        device: where it runs, such as ``"cuda"``.
        eager: whether attention scores and patterns are made.
        bidirectional: whether visual tokens see later ones, for which masks are kept.
    """

    layers: int
    attention: int
    output: int
    mlp: int
    head: int
    vision: VisionCost | None
    pair: int
    kv: int
    heads: int
    width: int
    itemsize: int
    device: str
    eager: bool
    bidirectional: bool

    @classmethod
    def of(cls, model: HookedVLM) -> ModelCost:
        """Read the sizes off a model."""
        sites, points = model.sites, model.sites.points
        attention, output = sites.attention_module(0), points["blocks.0.attn.hook_z"].module
        layer, key = (points[f"blocks.0.{name}"].module for name in ("hook_resid_pre", "attn.hook_k"))
        return cls(
            layers=sites.n_layers,
            attention=weights([attention]),
            output=weights([output]),
            mlp=weights([layer]) - weights([attention]),
            head=weights([model.unembedding]),
            vision=VisionCost.of(model),
            pair=4 * _linear(output).in_features,
            kv=2 * _linear(key).out_features,
            heads=sites.n_heads,
            width=model.cfg.d_model,
            itemsize=model.hf.dtype.itemsize,
            device=model.device.type,
            eager=model.attention == "eager",
            bidirectional=sites.bidirectional_images,
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

    def encoding(self, layout: Layout) -> int:
        """Return the operations of tower and projector for an example's images."""
        return 0 if self.vision is None else self.vision.operations(layout)

    def encoding_bytes(self, layout: Layout) -> int:
        """Return the memory that tower and projector need at most for an example's images."""
        placing = 6 * layout.structure.feature_rows * self.width * self.itemsize  # what is made of features before they are merged
        return 0 if self.vision is None else self.vision.bytes(layout, itemsize=self.itemsize, eager=self.eager) + placing

    def row_bytes(self, queries: int, keys: int, *, read: int, by_head: bool) -> int:
        """Return the memory that one row of a pass needs at most.

        Args:
            queries: positions that are computed.
            keys: positions that are attended to.
            read: positions whose logits are read.
            by_head: whether each head has its own mask.
        """
        states = queries * (6 * self.width + self.inner + 3 * (self.pair // 4)) * self.itemsize
        attention = keys * (self.kv + 2 * (self.pair // 4)) * self.itemsize
        masks = (self.heads if by_head else 1) * queries * keys * (3 * self.itemsize + 5)
        scores = 3 * self.heads * queries * keys * self.itemsize if self.eager else 0
        return states + attention + masks + scores + 2 * read * self.vocabulary * self.itemsize

    def graph_bytes(self, layers: int, queries: int, keys: int, *, by_head: bool) -> int:
        """Return what one row keeps for a backward pass through so many layers."""
        states = queries * (12 * self.width + 5 * self.inner + 4 * (self.pair // 4))
        attention = 2 * keys * (self.kv + 2 * (self.pair // 4)) + 4 * (self.heads if by_head or self.eager else 1) * queries * keys
        return layers * (states + attention) * self.itemsize

    def stay_bytes(self, keys: int) -> int:
        """Return the keys and values that one row keeps of all layers."""
        return self.layers * self.kv * keys * self.itemsize

    @property
    def inner(self) -> int:
        """Neurons of an MLP, at least."""
        return max(self.mlp // self.width, self.width)

    @property
    def vocabulary(self) -> int:
        """How many logits a position has."""
        return self.head // self.width

    @property
    def accelerated(self) -> bool:
        """Whether it runs on something other than the CPU."""
        return self.device != "cpu"


def _linear(module: nn.Module) -> nn.Linear:
    assert isinstance(module, nn.Linear)
    return module
