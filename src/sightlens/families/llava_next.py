"""LLaVA-NeXT (LLaVA-1.6): the whole picture, then un-padded tiles whose rows end in a newline.

Towers and decoders are LLaVA's. ``global`` is the base view; ``tile[r,c]`` are the tiles of the chosen canvas, without rows
and columns of padding, so that outer tiles may be smaller. Newlines stand on image placeholders; their selector is
``separator[newline]``, and their one shared vector has the hook ``hook_newline``. An extremely elongated picture may keep
no row of its tiles: then the base view is all the model sees.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from PIL import Image
from torch import Tensor
from transformers import PreTrainedConfig
from transformers.image_processing_utils import select_best_resolution

from sightlens.families.anyres import AnyresFamily, make_canvas, padded_crops, tile_side, view_anyres
from sightlens.families.family import ImageOptions, Place, ViewedImage, require_values
from sightlens.families.llava import check_towers
from sightlens.metrics import BoxFormat, UnitSquare


class LlavaNext(AnyresFamily):
    """LLaVA-NeXT (v1.6, 7B with Vicuna and Mistral): the whole picture in 24 × 24 visual tokens, then un-padded tiles with newlines."""

    name = "llava-next"
    model_type = "llava_next"
    architecture = "LlavaNextForConditionalGeneration"
    template_image = "<image>"

    def check_config(self, config: PreTrainedConfig) -> None:
        """Refuse towers, decoders and feature selections that no test covers."""
        check_towers(config)
        require_values(config.vision_config, "model_type", ("clip_vision_model",))

    def view_image(self, image: Image.Image, processor: Any, options: ImageOptions, *, place: Place) -> ViewedImage:
        """Make the base view and the tiles."""
        pixels = processor(images=[image], return_tensors="pt")["pixel_values"][0]
        size, settings = (image.height, image.width), processor.to_dict()
        resolution = select_best_resolution(size, settings["image_grid_pinpoints"])
        return view_anyres(pixels, make_canvas(size, resolution, place.grid, side=tile_side(settings)), place)

    def image_tensors(self, examples: Sequence[Sequence[ViewedImage]]) -> dict[str, Tensor]:
        """Pad each image's crops to the most that one has, as HF's processor does."""
        return {**super().image_tensors(examples), "pixel_values": padded_crops(examples)}

    def box_format(self, processor: Any) -> BoxFormat:
        """Two-decimal corners relative to the picture, as far as is known: the training data are not published."""
        return UnitSquare(frame="image")
