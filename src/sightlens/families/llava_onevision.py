"""LLaVA-OneVision: as LLaVA-NeXT, with a limit on tokens, and one view per picture when there are several.

Towers: SigLIP. A picture alone is cut as in LLaVA-NeXT; where its tiles have more than 1.21 times ``anyres_max_N`` tiles'
worth of tokens, their common grid is scaled down bilinearly after the projector. Such tokens blend up to four projector
outputs: together they are the view ``tile[0,0]``, and hooks before the merge (``hook_visual_embed``) cannot address them.
Several pictures in one prompt are padded to squares, one view and one newline each. Videos are not taken.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from PIL import Image
from torch import Tensor
from transformers import PreTrainedConfig
from transformers.image_processing_utils import select_best_resolution

from sightlens.errors import FamilyError
from sightlens.families.anyres import COUNTS, NEWLINE, AnyresFamily, make_canvas, padded_crops, tile_side, view_anyres
from sightlens.families.family import Cells, ImageOptions, Place, ViewedImage, require_values
from sightlens.families.geometry import ImageSteps
from sightlens.families.llava import check_towers
from sightlens.layout import View
from sightlens.metrics import BoxFormat, UnitSquare

LIMIT = "anyres_max_"


class LlavaOnevision(AnyresFamily):
    """LLaVA-OneVision (0.5B, 7B): the whole picture in 27 × 27 visual tokens, then un-padded tiles; several pictures one view each."""

    name = "llava-onevision"
    model_type = "llava_onevision"
    architecture = "LlavaOnevisionForConditionalGeneration"
    template_image = "<image>"

    def check_config(self, config: PreTrainedConfig) -> None:
        """Refuse towers, decoders, feature selections and limits that no test covers."""
        check_towers(config)
        require_values(config.vision_config, "model_type", ("siglip_vision_model",))
        if not config.vision_aspect_ratio.removeprefix(LIMIT).isdigit():
            raise FamilyError(f"vision_aspect_ratio {LIMIT}N", repr(config.vision_aspect_ratio), "This configuration changes the layout.")

    def view_image(self, image: Image.Image, processor: Any, options: ImageOptions, *, place: Place) -> ViewedImage:
        """Make the base view and the tiles of a picture alone, or the one view of one among several."""
        size, settings = (image.height, image.width), processor.to_dict()
        if place.count > 1:
            pixels = processor(images=[[image, image]], return_tensors="pt")["pixel_values"][0][:1]
            return _square_view(pixels, size, place)
        pixels = processor(images=[image], return_tensors="pt")["pixel_values"][0]
        resolution = select_best_resolution(size, settings["image_grid_pinpoints"])
        canvas = make_canvas(size, resolution, place.grid, side=tile_side(settings))
        return view_anyres(pixels, canvas, place, most_tiles=int(place.config.vision_aspect_ratio.removeprefix(LIMIT)))

    def image_tensors(self, examples: Sequence[Sequence[ViewedImage]]) -> dict[str, Tensor]:
        """Pad each image's crops to the most that one has, and count the images of each example that has some."""
        counts = torch.tensor([len(example) for example in examples if example])
        return {**super().image_tensors(examples), "pixel_values": padded_crops(examples), COUNTS: counts}

    def box_format(self, processor: Any) -> BoxFormat:
        """Two-decimal corners relative to the picture, as far as is known: the training data are not published."""
        return UnitSquare(frame="image")


def _square_view(pixels: Tensor, size: tuple[int, int], place: Place) -> ViewedImage:
    grid = place.grid
    box = ImageSteps(pad=True, resize=None, crop=None).shown_box(size)
    view = View("global", place.index, (grid.rows, grid.columns), box)
    return ViewedImage(pixels, (view,), (Cells(0, 0, grid.count), NEWLINE), extras={"image_sizes": torch.tensor([size])})
