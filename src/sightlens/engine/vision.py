"""What a vision tower and its projector cost, from their shapes alone."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from torch import nn

from sightlens.families.family import Grid
from sightlens.interventions import MERGED
from sightlens.layout import Layout, View
from sightlens.model import HookedVLM

FLOPS_PER_WEIGHT = 2
CLASS_TOKENS = ("class_embedding", "cls_token")
"""What towers call the state that they put before the patches of a view."""
Convolution = nn.Conv2d | nn.Conv3d


def weights(modules: Iterable[nn.Module]) -> int:
    """Count the weights that multiply every position; a projection may be a bare parameter of its module."""
    parts = [part for module in modules for part in module.modules() if not isinstance(part, nn.Embedding)]
    return sum(parameter.numel() for part in parts for parameter in part.parameters(recurse=False) if _multiplies(part, parameter))


def _multiplies(part: nn.Module, parameter: nn.Parameter) -> bool:
    return parameter.ndim == 2 or (isinstance(part, Convolution) and parameter.ndim > 2)


@dataclass(frozen=True)
class VisionCost:
    """Sizes that decide what encoding pictures costs.

    Attributes:
        embedding: weights per patch that make its first state; ``blocks`` those of all layers.
        projector: weights per output of the projector, features that come in again included.
        layers: of the tower; ``windowed`` of them attend inside windows of ``window`` × ``window`` visual tokens.
        width: of the tower's states; ``inner`` of its MLP.
        heads: of one layer.
        grid: visual tokens per view; 0 × 0 when the picture decides.
        before: states that stand before the patches of a view.
    """

    embedding: int
    blocks: int
    projector: int
    layers: int
    windowed: int
    window: int
    width: int
    inner: int
    heads: int
    grid: Grid
    before: int

    @classmethod
    def of(cls, model: HookedVLM) -> VisionCost | None:
        """Read the sizes off a model; None when it sees nothing."""
        sites, family, config = model.sites, model.processing.family, model.hf.config
        if "vision_encoder.hook_in" not in sites.points:
            return None
        tower = sites.point("vision_encoder.hook_in").module
        first = sites.point("vision_encoder.encoder_layers.0.hook_resid_pre")
        blocks = model.hf.get_submodule(first.site.module.rpartition(".")[0])
        again = [sites.point(name).module for name in sites.point(MERGED).site.companions]
        z, neurons = (sites.point(f"vision_encoder.encoder_layers.0.{name}") for name in ("attn.hook_z", "mlp.hook_post"))
        windowed, window = family.tower_windows(config)
        assert isinstance(blocks, nn.ModuleList)
        return cls(
            embedding=weights(part for part in tower.modules() if isinstance(part, Convolution)),
            blocks=weights([blocks]) + _pooling(tower),
            projector=weights([sites.point("vision_projector.hook_out").module, *again]),
            layers=len(blocks),
            windowed=windowed,
            window=window,
            width=z.module.in_features,  # pyright: ignore[reportArgumentType]  # both are linear
            inner=neurons.module.in_features,  # pyright: ignore[reportArgumentType]
            heads=sites.heads("vision_encoder.encoder_layers.0.attn.hook_z"),
            grid=model.processing.grid,
            before=sum(name.endswith(CLASS_TOKENS) for name, _ in tower.named_parameters()),
        )

    def operations(self, layout: Layout) -> int:
        """Return the operations of tower and projector for an example's images."""
        sequences = list(self._sequences(layout))
        states = sum(patches for patches, _ in sequences)
        pairs = sum((self.layers - self.windowed) * patches**2 + self.windowed * near for patches, near in sequences)
        embedded = states - self.before * len(sequences)
        once = embedded * self.embedding + states * self.blocks + layout.structure.feature_rows * self.projector
        return FLOPS_PER_WEIGHT * once + 4 * self.width * pairs

    def bytes(self, layout: Layout, *, itemsize: int, eager: bool) -> int:
        """Return the memory that encoding an example's images needs at most; HF keeps the states of every layer."""
        sequences = list(self._sequences(layout))
        states = sum(patches for patches, _ in sequences)
        scores = 3 * self.heads * sum(patches**2 for patches, _ in sequences) if eager else 0
        pixels = self.embedding // self.width
        numbers = states * ((self.layers + 9) * self.width + 3 * self.inner + 2 * pixels) + scores
        return numbers * itemsize

    def _sequences(self, layout: Layout) -> Iterator[tuple[int, int]]:
        """Yield, for everything that is encoded apart, its states and the pairs of states within windows."""
        if not self.grid.count:
            yield from ((view.count * view.merge**2, self._near(view)) for view in layout.views)
            return
        states = self.grid.count * self.grid.merge**2 + self.before
        for _ in range(layout.structure.feature_rows // self.grid.count):
            yield states, states**2

    def _near(self, view: View) -> int:
        rows, columns = ([min(self.window, size - k) for k in range(0, size, self.window)] if self.window else [size] for size in view.grid)
        return sum((height * width * view.merge**2) ** 2 for height in rows for width in columns)


def _pooling(tower: nn.Module) -> int:
    """Count the weights with which a head that pools a view's patches (SigLIP's) reads each of them: keys and values."""
    return sum(2 * part.embed_dim**2 for part in tower.modules() if isinstance(part, nn.MultiheadAttention))
