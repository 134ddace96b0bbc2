"""Gemma-3: one squashed view per picture, crops beside it if asked for, and visual tokens that see each other.

Sixteen patches (4 × 4) are averaged into each visual token. With ``ImageOptions(pan_and_scan=True)`` elongated pictures
get crops along their longer side, ``tile[0,c]`` or ``tile[r,0]``, after the whole picture; text of the processor stands
between them. Visual tokens of one view attend to all of it, later ones too, and so do windows of sliding layers: a
knockout acts on whichever mask a layer has. Norms follow attention and MLP: ``hook_attn_out`` and ``hook_mlp_out`` are what
joins the residual stream, after them, and ``hook_result`` gives each head its share of it: the head's contribution times
what the norm multiplies the sum with (1 + its weight, over the root mean square).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from math import ceil
from typing import Any

from PIL import Image
from torch import Tensor
from transformers import PreTrainedConfig

from sightlens.errors import FamilyError
from sightlens.families.family import Cells, Family, Grid, ImageOptions, Mark, Part, Place, ViewedImage, Words, require_values, visual_mask
from sightlens.families.llava import CLIP_NAMES, TOWER
from sightlens.families.sites import DecoderNames, DecoderShape, Site, decoder_shape, decoder_sites, projector_sites, tower_sites
from sightlens.layout import Layout, View
from sightlens.metrics import BoxFormat, PerMille

NAMES = DecoderNames(
    before_mlp="pre_feedforward_layernorm", after_attention="post_attention_layernorm", after_mlp="post_feedforward_layernorm"
)
SMALLEST_CROP, MOST_CROPS, SMALLEST_RATIO = 256, 4, 1.2
"""Pan-and-scan of the published processor, where a checkpoint's own says nothing."""


class Gemma3(Family):
    """Gemma-3 with pictures (4B, 12B): 16 × 16 visual tokens per 896-pixel view that see each other; crops if asked for."""

    name = "gemma-3"
    model_type = "gemma3"
    architecture = "Gemma3ForConditionalGeneration"
    template_image = "<start_of_image>"
    image_token = "<image_soft_token>"
    options = frozenset({"pan_and_scan", "max_tiles"})
    bidirectional_images = True

    def check_config(self, config: PreTrainedConfig) -> None:
        """Refuse towers, decoders, grids and attention that no test covers."""
        require_values(config.vision_config, "model_type", ("siglip_vision_model",))
        require_values(config.text_config, "model_type", ("gemma3_text",))
        require_values(config.text_config, "attn_logit_softcapping", (None,))
        require_values(config.text_config, "use_bidirectional_attention", (None, False))
        side = config.vision_config.image_size // config.vision_config.patch_size
        grid = self.token_grid(config)
        if grid.count != config.mm_tokens_per_image or grid.rows * grid.merge != side:
            raise FamilyError(
                f"mm_tokens_per_image that is a square and divides {side} × {side} patches",
                f"{config.mm_tokens_per_image}",
                "Mend config.json.",
            )

    def token_grid(self, config: PreTrainedConfig) -> Grid:
        """Average square blocks of patches."""
        rows = int(config.mm_tokens_per_image**0.5)
        return Grid(rows, rows, config.vision_config.image_size // config.vision_config.patch_size // max(rows, 1))

    def sites(self, config: PreTrainedConfig) -> tuple[Site, ...]:
        """List the hook names."""
        vision = config.vision_config
        tower = DecoderShape(vision.num_hidden_layers, vision.num_attention_heads, vision.num_attention_heads)
        return (
            *tower_sites(tower, CLIP_NAMES, tower=TOWER),
            *projector_sites("model.multi_modal_projector", argument="vision_outputs", received="patch"),
            *decoder_sites(decoder_shape(config.text_config), NAMES),
        )

    def view_image(self, image: Image.Image, processor: Any, options: ImageOptions, *, place: Place) -> ViewedImage:
        """Make the whole view and, if asked for, the crops."""
        crops = _crops((image.height, image.width), processor, options) if options.pan_and_scan else ()
        pieces = [image, *(image.crop((box[0], box[1], box[2], box[3])) for _, box in crops)]
        pixels = processor(images=pieces, do_pan_and_scan=False, return_tensors="pt")["pixel_values"]
        grid = (place.grid.rows, place.grid.columns)
        whole = View("global", place.index, grid, (0, 0, image.width, image.height), merge=place.grid.merge)
        tiles = [View("tile", place.index, grid, box, tile=tile, merge=place.grid.merge) for tile, box in crops]
        return ViewedImage(pixels, (whole, *tiles), _span(len(tiles), place.grid.count))

    def token_tensors(self, tensors: dict[str, Tensor], layouts: Sequence[Layout]) -> dict[str, Tensor]:
        """Mark visual positions, which attend to each other."""
        return {**tensors, "token_type_ids": visual_mask(layouts).long()}

    def box_format(self, processor: Any) -> BoxFormat:
        """Integers 0–1000 relative to the original image, if asked for: no format is published."""
        return PerMille()


def _span(tiles: int, count: int) -> tuple[Part, ...]:
    views = [
        (Words("\n\n"), Mark("start", "<start_of_image>"), Cells(view, 0, count), Mark("end", "<end_of_image>"), Words("\n\n"))
        for view in range(1 + tiles)
    ]
    if not tiles:
        return views[0]
    span: list[Part] = [Words("Here is the original image "), *views[0], Words(" and here are some crops to help you see better ")]
    for index, view in enumerate(views[1:]):
        span += [*([Words(" ")] if index else []), *view]
    return tuple(span)


def _crops(size: tuple[int, int], processor: Any, options: ImageOptions) -> list[tuple[tuple[int, int], tuple[int, int, int, int]]]:
    """Return the tile index and the box ``(x0, y0, x1, y1)`` of each pan-and-scan crop, as HF's processor cuts them."""
    smallest = processor.pan_and_scan_min_crop_size or SMALLEST_CROP
    most = options.max_tiles or processor.pan_and_scan_max_num_crops or MOST_CROPS
    short, long = min(size), max(size)
    if long / short < (processor.pan_and_scan_min_ratio_to_activate or SMALLEST_RATIO):
        return []
    count = min(most, max(2, min(int(long // smallest), int(long / short + 0.5))))
    step = ceil(long / count)
    if min(step, short) < smallest:
        return []
    rows, columns = (1, count) if size[1] >= size[0] else (count, 1)
    height, width = (size[0], step) if rows == 1 else (step, size[1])
    return [
        ((r, c), (c * width, r * height, min((c + 1) * width, size[1]), min((r + 1) * height, size[0])))
        for r, c in product(range(rows), range(columns))
    ]
