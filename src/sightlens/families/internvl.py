"""InternVL-3 and 3.5 in HF format: tiles of the squashed image in rows, then the whole image as a thumbnail.

An image is resized without keeping its aspect ratio to ``columns × rows`` tiles; the grid is chosen by aspect ratio. With
one tile there is no thumbnail and that tile is the global view. Two patches per side merge into one visual token (pixel
shuffle). Towers: LayerNorm, or RMSNorm with QK norm. Language models: Qwen2, Qwen3, Llama.

In the tower LayerScale multiplies what attention and MLP add to the residual stream: ``hook_attn_out`` and ``hook_mlp_out``
are the true contributions, after it.
"""

from __future__ import annotations

from typing import Any

from PIL import Image
from transformers import PreTrainedConfig
from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import get_optimal_tiled_canvas

from sightlens._types import Box
from sightlens.errors import FamilyError
from sightlens.families.family import Family, Grid, ImageOptions, Place, ViewedImage, in_order, require_values
from sightlens.families.sites import DecoderShape, Site, TowerNames, decoder_shape, decoder_sites, projector_sites, tower_sites
from sightlens.layout import View
from sightlens.metrics import BoxFormat, PerMille

TOWER = "model.vision_tower"
NAMES = TowerNames(
    "embeddings",
    "encoder.layer",
    "attention",
    "projection_layer",
    "layernorm_before",
    "layernorm_after",
    attention_scale="lambda_1",
    mlp_scale="lambda_2",
)


class InternVL(Family):
    """InternVL-3 and 3.5 (1B to 14B) in HF format: tiles row by row, thumbnail last; 16 × 16 visual tokens per 448-pixel view."""

    name = "internvl"
    model_type = "internvl"
    architecture = "InternVLForConditionalGeneration"
    template_image = "<IMG_CONTEXT>"
    options = frozenset({"max_tiles"})

    def check_config(self, config: PreTrainedConfig) -> None:
        """Refuse towers, decoders, shuffles and feature selections that no test covers."""
        require_values(config.vision_config, "model_type", ("internvl_vision",))
        require_values(config.text_config, "model_type", ("qwen2", "qwen3", "llama"))
        require_values(config, "vision_feature_select_strategy", ("default",))
        require_values(config, "vision_feature_layer", (-1,))
        require_values(config, "downsample_ratio", (0.5, 1.0))
        grid = self.token_grid(config)
        if grid.count != config.image_seq_length:
            raise FamilyError(
                f"image_seq_length {grid.count} (from image, patch and shuffle)", f"{config.image_seq_length}", "Mend config.json."
            )

    def token_grid(self, config: PreTrainedConfig) -> Grid:
        """Merge ``1 / downsample_ratio`` patches per side."""
        merge = round(1 / config.downsample_ratio)
        (height, width), (patch_height, patch_width) = config.vision_config.image_size, config.vision_config.patch_size
        return Grid(height // patch_height // merge, width // patch_width // merge, merge)

    def sites(self, config: PreTrainedConfig) -> tuple[Site, ...]:
        """List the hook names."""
        vision, text = config.vision_config, config.text_config
        tower = DecoderShape(vision.num_hidden_layers, vision.num_attention_heads, vision.num_attention_heads)
        return (
            *tower_sites(tower, NAMES, tower=TOWER),
            *projector_sites("model.multi_modal_projector"),
            *decoder_sites(decoder_shape(text)),
        )

    def view_image(self, image: Image.Image, processor: Any, options: ImageOptions, *, place: Place) -> ViewedImage:
        """Cut the tiles and the thumbnail."""
        most = processor.max_patches if options.max_tiles is None else options.max_tiles
        if most < processor.min_patches:
            raise FamilyError(f"max_tiles >= {processor.min_patches}", f"{most}", "Ask for more tiles.")
        made = processor(images=[image], crop_to_patches=True, max_patches=most, return_tensors="pt")
        size = (image.height, image.width)
        tile = (processor.size["height"], processor.size["width"])
        columns, rows = get_optimal_tiled_canvas(size, tile, processor.min_patches, most) if most > 1 else (1, 1)
        views = tile_views(size, (rows, columns), image=place.index, grid=place.grid)
        if len(views) != made["pixel_values"].shape[0]:
            raise FamilyError(f"{len(views)} views", f"{made['pixel_values'].shape[0]} from the image processor", "Report this image size.")
        return ViewedImage(made["pixel_values"], views, in_order(views, opening=("<img>",), closing=("</img>",)))

    def box_format(self, processor: Any) -> BoxFormat:
        """Integers 0–1000 relative to the original image."""
        return PerMille()


def tile_views(size: tuple[int, int], tiles: tuple[int, int], *, image: int, grid: Grid) -> tuple[View, ...]:
    """Return the views of a tiled image in sequence order: tiles row by row, then the thumbnail.

    Args:
        size: ``(height, width)`` of the original image in pixels.
        tiles: rows and columns of tiles.
        image: index of the image in the prompt.
        grid: visual tokens per view.
    """
    whole: Box = (0.0, 0.0, float(size[1]), float(size[0]))
    tokens = (grid.rows, grid.columns)
    overview = View(kind="global", tile=None, image=image, grid=tokens, box=whole, merge=grid.merge)
    if tiles == (1, 1):
        return (overview,)
    height, width = size[0] / tiles[0], size[1] / tiles[1]
    crops = tuple(
        View(
            kind="tile",
            tile=(row, column),
            image=image,
            grid=tokens,
            box=(column * width, row * height, (column + 1) * width, (row + 1) * height),
            merge=grid.merge,
        )
        for row in range(tiles[0])
        for column in range(tiles[1])
    )
    return (*crops, overview)
