"""LLaVA-1.5 and its relatives: one view per image, one patch per visual token, no separators.

Towers: CLIP (class token dropped) and SigLIP. Language models: Llama (Vicuna), Mistral, Qwen2, Qwen3. The published
checkpoints resize the short side and crop the centre; the original code, and "Mechanisms of Object Localization in
Vision-Language Models" (arXiv 2605.19792), pad to a square. Both are offered as ``image_mode``; boxes depend on it.
"""

from __future__ import annotations

from typing import Any

from PIL import Image
from transformers import PreTrainedConfig
from transformers.models.llava.image_processing_pil_llava import LlavaImageProcessorPil

from sightlens.errors import FamilyError
from sightlens.families.family import Family, Grid, ImageOptions, Place, ViewedImage, in_order, require_values
from sightlens.families.geometry import ImageSteps
from sightlens.families.sites import DecoderShape, Site, TowerNames, decoder_shape, decoder_sites, projector_sites, tower_sites
from sightlens.layout import View
from sightlens.metrics import BoxFormat, UnitSquare

DECODERS = ("llama", "mistral", "qwen2", "qwen3")
TOWER = "model.vision_tower"
CLIP_NAMES = TowerNames("embeddings", "encoder.layers", "self_attn", "out_proj", "layer_norm1", "layer_norm2")


class Llava(Family):
    """LLaVA-1.5 (7B, 13B) and relatives: one view, centre crop or padded square; 24 × 24 visual tokens for a 336-pixel tower."""

    name = "llava"
    model_type = "llava"
    architecture = "LlavaForConditionalGeneration"
    template_image = "<image>"
    options = frozenset({"image_mode"})

    def check_config(self, config: PreTrainedConfig) -> None:
        """Refuse towers, decoders and feature selections that no test covers."""
        check_towers(config)

    def token_grid(self, config: PreTrainedConfig) -> Grid:
        """One token per patch."""
        return patch_grid(config)

    def sites(self, config: PreTrainedConfig) -> tuple[Site, ...]:
        """List the hook names; tower layers after the feature layer have no effect and are left out."""
        return llava_sites(config)

    def view_image(self, image: Image.Image, processor: Any, options: ImageOptions, *, place: Place) -> ViewedImage:
        """Make the one view."""
        chosen = with_mode(processor, options.image_mode)
        box = image_steps(chosen).shown_box((image.height, image.width))
        pixels = chosen(images=[image], return_tensors="pt")["pixel_values"]
        grid = place.grid
        views = (View(kind="global", image=place.index, grid=(grid.rows, grid.columns), box=box, merge=grid.merge),)
        return ViewedImage(pixels, views, in_order(views))

    def box_format(self, processor: Any) -> BoxFormat:
        """Two-decimal corners relative to the padded square (or to the kept crop)."""
        return UnitSquare(frame="padded_square" if processor.to_dict().get("do_pad") else "centre_crop")


def check_towers(config: PreTrainedConfig) -> None:
    """Refuse towers, decoders and feature selections that no test of the LLaVA families covers.

    Raises:
        FamilyError: naming the field.
    """
    require_values(config.vision_config, "model_type", ("clip_vision_model", "siglip_vision_model"))
    require_values(config.text_config, "model_type", DECODERS)
    has_class = config.vision_config.model_type == "clip_vision_model"
    require_values(config, "vision_feature_select_strategy", ("default",) if has_class else ("full",))
    if not isinstance(config.vision_feature_layer, int):
        raise FamilyError("one vision_feature_layer", f"{config.vision_feature_layer}", "Several feature layers are not supported yet.")


def patch_grid(config: PreTrainedConfig) -> Grid:
    """Return the grid of a square view with one visual token per patch."""
    side = config.vision_config.image_size // config.vision_config.patch_size
    return Grid(side, side)


def llava_sites(config: PreTrainedConfig) -> tuple[Site, ...]:
    """List the hook names of a CLIP or SigLIP tower, a two-layer projector and a decoder."""
    vision, text = config.vision_config, config.text_config
    used = config.vision_feature_layer % (vision.num_hidden_layers + 1)
    tower = DecoderShape(used, vision.num_attention_heads, vision.num_attention_heads)
    return (
        *tower_sites(tower, CLIP_NAMES, tower=TOWER),
        *projector_sites("model.multi_modal_projector"),
        *decoder_sites(decoder_shape(text)),
    )


def with_mode(processor: Any, mode: str | None) -> Any:
    """Return an image processor that pads to a square or crops the centre.

    Args:
        processor: HF's own, whose sizes, mean and resampling are kept.
        mode: ``"pad"``, ``"crop"``, or None for the processor as it is.

    Raises:
        FamilyError: on another mode.
    """
    if mode is None:
        return processor
    if mode not in ("pad", "crop"):
        raise FamilyError("image_mode 'pad' or 'crop'", repr(mode), "Leave it out to keep the checkpoint's own.")
    kept = (
        "size",
        "crop_size",
        "image_mean",
        "image_std",
        "resample",
        "do_resize",
        "do_center_crop",
        "do_rescale",
        "do_normalize",
        "rescale_factor",
    )
    settings = {"do_center_crop": False, **processor.to_dict()}  # a SigLIP processor does not know cropping
    return LlavaImageProcessorPil(**{key: settings[key] for key in kept if key in settings}, do_pad=mode == "pad")


def image_steps(processor: Any) -> ImageSteps:
    """Read the geometric steps off an HF image processor of the CLIP kind."""
    settings = processor.to_dict()
    size, crop = settings["size"], settings.get("crop_size")
    if not settings.get("do_resize", True):
        resize = None
    elif size.get("shortest_edge"):
        resize = ("short", size["shortest_edge"])
    else:
        resize = ("to", size["height"], size["width"])
    keeps = bool(settings.get("do_center_crop"))
    return ImageSteps(
        pad=bool(settings.get("do_pad")), resize=resize, crop=(crop["height"], crop["width"]) if keeps and crop is not None else None
    )
