"""Towers that pack the patches of all pictures into one sequence, as Qwen-VL's do.

A picture keeps its aspect ratio and becomes as many patches as it needs; ``merge × merge`` patches make one visual token.
The model orders patches token by token, and may order tokens window by window. Hooks see neither: their rows are the patches
(or visual tokens) of one picture after the other, each picture row by row.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import ceil
from typing import Any

import numpy as np
import torch
from jaxtyping import Int
from PIL import Image
from torch import Tensor
from transformers import PreTrainedConfig

from sightlens.errors import FamilyError, ImageError
from sightlens.families.family import Family, Grid, ImageOptions, Place, ViewedImage, in_order, visual_mask
from sightlens.families.sites import Attention, HeadResult, Input, Order, Output, Site
from sightlens.layout import Layout, Padding, View, Visual

TOWER = "model.visual"
START, PLACEHOLDER, END = "<|vision_start|>", "<|image_pad|>", "<|vision_end|>"
STATE, HEADS = ("patch", "d_vision"), ("patch", "head", "d_head")
ATTENTION = ("head", "query_patch", "key_patch")


@dataclass(frozen=True)
class PackedOrder(Order):
    """Patches token by token, or the tokens themselves; both window by window if there are windows."""

    merge: int
    window: int | None = None
    """Visual tokens per side of a window."""
    tokens: bool = False
    """Whether rows are visual tokens, not patches."""

    def indices(self, grids: Int[Tensor, "picture 3"]) -> Int[Tensor, " row"]:
        """Return where each row stands in the model's order."""
        found, before = [], 0
        for _, height, width in grids.tolist():
            places = self._tokens(height // self.merge, width // self.merge)
            if not self.tokens:
                inner = torch.arange(self.merge**2).reshape(self.merge, self.merge)
                blocks = places[:, None, :, None] * self.merge**2 + inner[None, :, None, :]
                places = blocks.reshape(height, width)
            found.append(places.flatten() + before)
            before += places.numel()
        return torch.cat(found)

    def _tokens(self, rows: int, columns: int) -> Int[Tensor, "row column"]:
        if self.window is None:
            return torch.arange(rows * columns).reshape(rows, columns)
        down, across = torch.arange(rows) // self.window, torch.arange(columns) // self.window
        windows = down[:, None] * ceil(columns / self.window) + across
        return windows.flatten().argsort(stable=True).argsort().reshape(rows, columns)


@dataclass(frozen=True)
class PackedTower:
    """What a packed tower needs to be told about.

    Attributes:
        layers: blocks.
        heads: per block.
        order: of the patches inside the blocks.
        mlp: modules and hook names of the MLP's neurons: ``(name, module, tap)``.
    """

    layers: int
    heads: int
    order: PackedOrder
    mlp: tuple[tuple[str, str, Input | Output], ...]


def packed_sites(tower: PackedTower) -> Iterator[Site]:
    """List the sites of a packed tower and of the merger that projects its states."""
    order = tower.order
    blocks, tokens = PackedOrder(order.tower, order.merge), PackedOrder(order.tower, order.merge, order.window, tokens=True)
    yield Site("vision_encoder.hook_in", TOWER, Input(), ("patch", "pixel"), "pixel_values", order=blocks)
    yield Site("vision_encoder.embeddings.hook_out", f"{TOWER}.patch_embed", Output(), STATE, order=blocks)
    for layer in range(tower.layers):
        yield from _block_sites(tower, f"vision_encoder.encoder_layers.{layer}", f"{TOWER}.blocks.{layer}")
    merger = f"{TOWER}.merger"
    yield Site("vision_projector.hook_in", merger, Input("x"), STATE, "merger input", order=order)
    for name in ("vision_projector.hook_out", "hook_visual_embed"):
        yield Site(name, merger, Output(), ("token", "d_model"), "get_image_features().pooler_output", order=tokens)


def _block_sites(tower: PackedTower, block: str, path: str) -> Iterator[Site]:
    order, heads = tower.order, tower.heads
    yield Site(f"{block}.hook_resid_pre", path, Input(), STATE, order=order)
    for k, letter in enumerate("qkv"):
        yield Site(f"{block}.attn.hook_{letter}", f"{path}.attn.qkv", Output(heads=heads, part=(k, 3)), HEADS, order=order)
    for name in ("rot_q", "rot_k"):
        yield Site(f"{block}.attn.hook_{name}", f"{path}.attn", Attention(name), HEADS, order=order)
    for name in ("attn_mask", "attn_scores", "pattern"):
        yield Site(f"{block}.attn.hook_{name}", f"{path}.attn", Attention(name), ATTENTION, order=order)
    yield Site(f"{block}.attn.hook_z", f"{path}.attn.proj", Input("input", heads=heads), HEADS, order=order)
    yield Site(f"{block}.attn.hook_result", f"{path}.attn.proj", HeadResult(heads), ("patch", "head", "d_vision"), order=order)
    yield Site(f"{block}.hook_attn_out", f"{path}.attn", Output(), STATE, order=order)
    yield Site(f"{block}.hook_resid_mid", f"{path}.norm2", Input(shared=True), STATE, order=order)
    for name, module, tap in tower.mlp:
        yield Site(f"{block}.mlp.{name}", f"{path}.mlp.{module}", tap, ("patch", "d_mlp"), order=order)
    yield Site(f"{block}.hook_mlp_out", f"{path}.mlp", Output(), STATE, order=order)
    yield Site(f"{block}.hook_resid_post", path, Output(), STATE, order=order)


class PackedFamily(Family):
    """What Qwen's families share: one view per picture at its own size, pixel limits, M-RoPE positions."""

    template_image = START + PLACEHOLDER + END
    image_token = PLACEHOLDER
    options = frozenset({"min_pixels", "max_pixels"})

    def check_processor(self, config: PreTrainedConfig, processor: Any) -> None:
        """Compare patches."""
        check_patches(config, processor)

    def token_grid(self, config: PreTrainedConfig) -> Grid:
        """The picture decides."""
        return Grid(0, 0, config.vision_config.spatial_merge_size)

    def view_image(self, image: Image.Image, processor: Any, options: ImageOptions, *, place: Place) -> ViewedImage:
        """Make the one view."""
        return view_packed(image, processor, options, place=place)

    def image_rows(self, tensors: Mapping[str, Tensor], layouts: Sequence[Layout]) -> dict[str, list[int]]:
        """One row of pixels per patch."""
        rows = super().image_rows(tensors, layouts)
        return {**rows, "pixel_values": [sum(view.count * view.merge**2 for view in layout.views) for layout in layouts]}

    def token_tensors(self, tensors: dict[str, Tensor], layouts: Sequence[Layout]) -> dict[str, Tensor]:
        """Add M-RoPE's positions."""
        return packed_tokens(tensors, layouts)


def view_packed(image: Image.Image, processor: Any, options: ImageOptions, *, place: Place) -> ViewedImage:
    """Scale one picture within the pixel limits and cut it into patches.

    Raises:
        ImageError: for a picture that is more than 200 times as long as wide.
        FamilyError: for limits that contradict each other.
    """
    least, most = (processor.size[edge] for edge in ("shortest_edge", "longest_edge"))
    least, most = options.min_pixels or least, options.max_pixels or most
    side = processor.patch_size * processor.merge_size
    if not side**2 <= most >= least:
        raise FamilyError(f"max_pixels of at least min_pixels and {side}²", f"{most}, with min_pixels {least}", "Change one of them.")
    if max(image.size) > 200 * min(image.size):
        raise ImageError("a picture at most 200 times as long as wide", f"{image.width}×{image.height}", "Crop it, or pad it.")
    made = processor(images=[image], size={"shortest_edge": least, "longest_edge": most}, return_tensors="pt")
    _, height, width = made["image_grid_thw"][0].tolist()
    merge = place.grid.merge
    view = View("global", place.index, (height // merge, width // merge), (0, 0, image.width, image.height), merge=merge)
    span = in_order((view,), opening=(START,), closing=(END,))
    return ViewedImage(made["pixel_values"], (view,), span, extras={"image_grid_thw": made["image_grid_thw"]})


def check_patches(config: PreTrainedConfig, processor: Any) -> None:
    """Refuse an image processor that cuts other patches than the tower takes.

    Raises:
        FamilyError: naming the field.
    """
    vision = config.vision_config
    wanted = {"patch_size": vision.patch_size, "merge_size": vision.spatial_merge_size, "temporal_patch_size": vision.temporal_patch_size}
    for name, value in wanted.items():
        if getattr(processor, name) != value:
            raise FamilyError(f"{name} {value} as in config.json", f"{getattr(processor, name)}", "Use the checkpoint's own processor.")


def packed_tokens(tensors: dict[str, Tensor], layouts: Sequence[Layout]) -> dict[str, Tensor]:
    """Add which positions are visual, and put time, row and column in place of plain positions."""
    positions = torch.stack([torch.as_tensor(axial_positions(layout)) for layout in layouts], dim=1)
    return {**tensors, "position_ids": positions, "mm_token_type_ids": visual_mask(layouts).long()}


def axial_positions(layout: Layout) -> Int[np.ndarray, "3 position"]:
    """Return each position's place in time, in rows and in columns, as M-RoPE counts them.

    Text moves all three on together; a picture's tokens share one time, spread over rows and columns, and move what
    follows on by the longer of its sides.
    """
    places, now = np.zeros((3, layout.length), dtype=np.int64), 0
    for segment in layout.segments:
        count = segment.stop - segment.start
        if isinstance(segment, Padding):
            continue
        if isinstance(segment, Visual):
            rows, columns = layout.views[segment.view].grid
            places[:, segment.start : segment.stop] = now + np.stack(
                [np.zeros(count, dtype=np.int64), *np.indices((rows, columns)).reshape(2, -1)]
            )
            now += max(rows, columns)
        else:
            places[:, segment.start : segment.stop] = now + np.arange(count)
            now += count
    return places
