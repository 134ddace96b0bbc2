"""Qwen2.5-VL: pictures at their own size, window attention in the tower, positions in time, rows and columns.

A picture is scaled to multiples of 28 pixels within ``ImageOptions(min_pixels=…, max_pixels=…)``. Most tower blocks attend
within windows and hold their states window by window; hooks show them in raster order. Fused q, k and v are offered apart.
While someone looks into a block's attention it is computed over all patches at once under a mask between windows, which
costs memory quadratic in patches and gives the same pattern. ``position_ids`` are M-RoPE's, always: HF's fallback to plain
positions is never reached. Videos are not taken. Boxes are in pixels of the scaled picture: with other limits than the
processor's own, read them with a ``ResizedPixels`` of those limits.
"""

from __future__ import annotations

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
from sightlens.families.sites import Input, Output, Site, decoder_shape, decoder_sites
from sightlens.metrics import BoxFormat, ResizedPixels

MLP = (
    ("hook_pre", "gate_proj", Output()),
    ("hook_pre_linear", "up_proj", Output()),
    ("hook_post", "down_proj", Input("input")),
)


class Qwen25VL(PackedFamily):
    """Qwen2.5-VL (3B, 7B): pictures at their own size, one visual token per 28 × 28 pixels; window attention."""

    name = "qwen2.5-vl"
    model_type = "qwen2_5_vl"
    architecture = "Qwen2_5_VLForConditionalGeneration"

    def check_config(self, config: PreTrainedConfig) -> None:
        """Refuse sliding attention in the decoder, and windows that cut visual tokens."""
        require_values(config.text_config, "model_type", ("qwen2_5_vl_text",))
        require_values(config.text_config, "use_sliding_window", (False, None))
        vision = config.vision_config
        if vision.window_size % (vision.patch_size * vision.spatial_merge_size):
            side = vision.patch_size * vision.spatial_merge_size
            raise FamilyError(f"window_size in multiples of {side}", f"{vision.window_size}", "This configuration changes the layout.")

    def tower_windows(self, config: PreTrainedConfig) -> tuple[int, int]:
        """All layers but those of ``fullatt_block_indexes``."""
        vision = config.vision_config
        return vision.depth - len(set(vision.fullatt_block_indexes)), vision.window_size // vision.spatial_merge_size // vision.patch_size

    def sites(self, config: PreTrainedConfig) -> tuple[Site, ...]:
        """List the hook names."""
        vision = config.vision_config
        _, window = self.tower_windows(config)
        order = PackedOrder(TOWER, vision.spatial_merge_size, window)
        tower = PackedTower(vision.depth, vision.num_heads, order, MLP)
        return (*packed_sites(tower), *decoder_sites(decoder_shape(config.text_config)))

    def box_format(self, processor: Any) -> BoxFormat:
        """Pixels of the picture as the processor scales it."""
        size = processor.size
        side = processor.patch_size * processor.merge_size
        return ResizedPixels(factor=side, min_pixels=size["shortest_edge"], max_pixels=size["longest_edge"])
