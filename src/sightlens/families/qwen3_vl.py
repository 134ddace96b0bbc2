"""Qwen3-VL: pictures at their own size, and visual features that come in again after early decoder layers (DeepStack).

A picture is scaled to multiples of 32 pixels within ``ImageOptions(min_pixels=…, max_pixels=…)``. States of some tower
blocks are projected too and added to the visual tokens after decoder layers 0, 1, …: ``hook_deepstack_embed.{k}`` is what
layer k's output receives. It belongs to that output: ``blocks.{k}.hook_resid_post`` is read where layer k + 1 receives it and
equals ``blocks.{k+1}.hook_resid_pre``, so that mid + mlp_out + the re-injected features = post. What HF records as that
layer's output lacks the addition.
An ablation or a patch-in at ``hook_merged_embed`` also acts on what comes in again, unless it says ``reinjected=False``.
``position_ids`` are M-RoPE's, always. Videos are not taken.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from transformers import PreTrainedConfig

from sightlens.errors import FamilyError
from sightlens.families.family import require_values
from sightlens.families.packed import (
    TOWER,
    PackedFamily,
    PackedOrder,
    PackedTower,
    packed_sites,
)
from sightlens.families.sites import DecoderNames, Input, Output, Site, decoder_shape, decoder_sites
from sightlens.metrics import BoxFormat, PerMille

MLP = (("hook_pre", "linear_fc1", Output()), ("hook_post", "linear_fc2", Input("input")))


class Qwen3VL(PackedFamily):
    """Qwen3-VL (4B, 8B): pictures at their own size, one visual token per 32 × 32 pixels; features that come in again (DeepStack)."""

    name = "qwen3-vl"
    model_type = "qwen3_vl"
    architecture = "Qwen3VLForConditionalGeneration"

    def check_config(self, config: PreTrainedConfig) -> None:
        """Refuse features that come in out of order, or after layers that do not exist."""
        require_values(config.text_config, "model_type", ("qwen3_vl_text",))
        blocks = list(config.vision_config.deepstack_visual_indexes)
        if blocks != sorted(set(blocks)) or len(blocks) >= config.text_config.num_hidden_layers:
            known = f"fewer than {config.text_config.num_hidden_layers} deepstack_visual_indexes, ascending"
            raise FamilyError(known, f"{blocks}", "This configuration changes where visual features come in.")

    def reinjections(self, config: PreTrainedConfig) -> int:
        """One after each of the first decoder layers."""
        return len(config.vision_config.deepstack_visual_indexes)

    def sites(self, config: PreTrainedConfig) -> tuple[Site, ...]:
        """List the hook names."""
        vision = config.vision_config
        tower = PackedTower(vision.depth, vision.num_heads, PackedOrder(TOWER, vision.spatial_merge_size), MLP)
        again = tuple(
            Site(
                f"hook_deepstack_embed.{k}",
                f"{TOWER}.deepstack_merger_list.{k}",
                Output(),
                ("token", "d_model"),
                f"deepstack_features[{k}]",
            )
            for k in range(self.reinjections(config))
        )
        names = replace(DecoderNames(), companions=tuple(site.name for site in again))
        return (*packed_sites(tower), *again, *decoder_sites(decoder_shape(config.text_config), names))

    def box_format(self, processor: Any) -> BoxFormat:
        """Integers 0–1000 relative to the original image."""
        return PerMille()
