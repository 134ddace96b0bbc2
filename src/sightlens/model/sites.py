"""All hook points of one model, with what is needed to use them."""

from __future__ import annotations

import difflib
from collections.abc import Sequence

from torch import nn
from transformers import PreTrainedModel

from sightlens.errors import HookError, InterventionError, listing
from sightlens.families.family import Grid
from sightlens.families.sites import Attention, HeadResult, Input, Output, Site
from sightlens.model.taps import LiveSite
from sightlens.model.window import Window


class Sites:
    """The hook points of a model by name, and the window that its forward passes move."""

    def __init__(
        self, hf: PreTrainedModel, listed: Sequence[Site], *, grid: Grid | None = None, bidirectional_images: bool = False
    ) -> None:
        """Make a hook point for every site.

        Args:
            hf: the HF model.
            listed: its family's sites.
            grid: of the projector's outputs of one crop; None for a model that sees nothing.
            bidirectional_images: whether visual tokens of one view see later ones.
        """
        self.bidirectional_images = bidirectional_images
        self.points = {site.name: LiveSite(site, hf) for site in listed}
        layers, _, _ = self.points["blocks.0.hook_resid_pre"].site.module.rpartition(".")
        self.decoder = hf.get_submodule(layers.rpartition(".")[0])
        self.window = Window.of(hf, self.decoder)
        self.window.grid = grid or self.window.grid
        patterns = [point for point in self.points.values() if point.site.layer is not None and point.site.name.endswith("hook_pattern")]
        self._attention = [point.module for point in patterns]
        self._hf = hf
        self.n_heads: int = self.points["blocks.0.attn.hook_z"].site.tap.heads  # type: ignore[union-attr]

    @property
    def n_layers(self) -> int:
        """Layers of the language model."""
        return len(self._attention)

    def block(self, layer: int) -> nn.Module:
        """Return a layer of the language model."""
        return self.points[f"blocks.{layer}.hook_resid_pre"].module

    def mlp(self, layer: int) -> nn.Module:
        """Return the MLP of a language-model layer."""
        return self._hf.get_submodule(self.points[f"blocks.{layer}.mlp.hook_post"].site.module.rpartition(".")[0])

    def attention_module(self, layer: int) -> nn.Module:
        """Return the attention module of a language-model layer."""
        return self._attention[layer]

    def point(self, name: str) -> LiveSite:
        """Return the hook point of a name.

        Raises:
            HookError: with the nearest known names.
        """
        if name not in self.points:
            near = difflib.get_close_matches(name, self.points, n=4, cutoff=0.5) or sorted(self.points)
            raise HookError(f"a hook name of this model (like {listing(near)})", repr(name), "model.hook_dict lists all of them.")
        return self.points[name]

    def heads(self, name: str) -> int:
        """Return how many heads a site has; what exists only inside attention has those of the projection it comes from."""
        tap = self.point(name).site.tap
        if isinstance(tap, Attention):
            attention, _, _ = name.rpartition(".")
            tap = self.point(f"{attention}.hook_{'k' if tap.tensor == 'rot_k' else 'q'}").site.tap
        return tap.heads or 0 if isinstance(tap, Input | Output | HeadResult) else 0

    def layers(self, chosen: Sequence[int] | None) -> Sequence[int]:
        """Return the chosen layers, all of them for None.

        Raises:
            InterventionError: when one is out of range.
        """
        if chosen is not None and max(chosen) >= self.n_layers:
            raise InterventionError(f"layers below {self.n_layers}", f"{tuple(chosen)}", "Layers count from 0.")
        return range(self.n_layers) if chosen is None else chosen
