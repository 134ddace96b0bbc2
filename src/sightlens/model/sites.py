"""All hook points of one model, with what is needed to use them."""

from __future__ import annotations

import difflib
from collections.abc import Sequence

from torch import nn
from transformers import PreTrainedModel

from sightlens.errors import HookError, InterventionError, listing
from sightlens.families.sites import HeadResult, Input, Output, Site
from sightlens.model.taps import LiveSite
from sightlens.model.window import Window


class Sites:
    """The hook points of a model by name, and the window that its forward passes move."""

    def __init__(self, hf: PreTrainedModel, listed: Sequence[Site], *, bidirectional_images: bool = False) -> None:
        """Make a hook point for every site.

        Args:
            hf: the HF model.
            listed: its family's sites.
            bidirectional_images: whether visual tokens of one view see later ones.
        """
        self.bidirectional_images = bidirectional_images
        self.points = {site.name: LiveSite(site, hf) for site in listed}
        layers, _, _ = self.points["blocks.0.hook_resid_pre"].site.module.rpartition(".")
        self.decoder = hf.get_submodule(layers.rpartition(".")[0])
        self.window = Window.of(hf, self.decoder)
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
        """Return how many heads a site has; rotated queries and keys have those of the projections they come from."""
        tap = self.point(name.replace("hook_rot_", "hook_")).site.tap
        return tap.heads or 0 if isinstance(tap, Input | Output | HeadResult) else 0

    def layers(self, chosen: Sequence[int] | None) -> Sequence[int]:
        """Return the chosen layers, all of them for None.

        Raises:
            InterventionError: when one is out of range.
        """
        if chosen is not None and max(chosen) >= self.n_layers:
            raise InterventionError(f"layers below {self.n_layers}", f"{tuple(chosen)}", "Layers count from 0.")
        return range(self.n_layers) if chosen is None else chosen
