"""Write a trained network as a Hugging Face checkpoint folder that plain `transformers` loads."""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import GenerationConfig, PreTrainedModel
from transformers.utils.constants import OPENAI_CLIP_MEAN, OPENAI_CLIP_STD

from sightlens.zoo.recipe import Recipe, tokenizer_for
from sightlens.zoo.vocabulary import COORDINATES


def export(network: PreTrainedModel, recipe: Recipe, out: Path) -> None:
    """Write config, half-precision weights, tokenizer and processor files; `config.json` asks to load them as float32."""
    out.mkdir(parents=True, exist_ok=True)
    tokenizer = tokenizer_for(recipe)
    network.config.dtype = torch.float32
    network.config.architectures = [type(network).__name__]
    network.config.save_pretrained(out)
    weights = {name: value.detach().to(torch.float16).contiguous() for name, value in network.state_dict().items()}
    save_file(weights, out / "model.safetensors", metadata={"format": "pt"})
    tokenizer.save_pretrained(out)
    GenerationConfig(
        do_sample=False,
        max_new_tokens=8,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    ).save_pretrained(out)
    write_processor(recipe, out)
    write_boxes(recipe, out)


def write_boxes(recipe: Recipe, out: Path) -> None:
    """Write `sightlens.json`, which says how the model writes a box."""
    frame = "padded_square" if recipe.name == "llava" else "image"
    boxes = {"frame": frame, "bins": COORDINATES, "prefixes": ["<loc"] * 4, "anchor": "edge", "digits": 2}
    (out / "sightlens.json").write_text(json.dumps({"box_format": boxes}, indent=2) + "\n")


def write_processor(recipe: Recipe, out: Path) -> None:
    """Write `preprocessor_config.json` and `processor_config.json`."""
    pixels = {
        "do_convert_rgb": True,
        "do_resize": True,
        "do_rescale": True,
        "do_normalize": True,
        "rescale_factor": 1 / 255,
        "resample": 3,
        "image_mean": OPENAI_CLIP_MEAN,
        "image_std": OPENAI_CLIP_STD,
    }
    view, llava = recipe.sizes.view, recipe.name == "llava"
    if llava:
        pixels |= {"image_processor_type": "LlavaImageProcessorPil", "do_pad": True, "do_center_crop": True}
        pixels |= {"size": {"shortest_edge": view}, "crop_size": {"height": view, "width": view}}
        whole = {"processor_class": "LlavaProcessor", "patch_size": recipe.sizes.patch, "num_additional_image_tokens": 1}
        whole |= {"vision_feature_select_strategy": "default", "image_token": "<image>"}
    else:
        pixels |= {"image_processor_type": "GotOcr2ImageProcessor", "crop_to_patches": True, "min_patches": 1}
        pixels |= {"max_patches": 4, "size": {"height": view, "width": view}}
        whole = {"processor_class": "InternVLProcessor", "image_seq_length": recipe.sizes.grid**2}
        tiling = ("image_processor_type", "crop_to_patches", "min_patches", "max_patches")
        video = {key: value for key, value in pixels.items() if key not in tiling}
        video |= {"video_processor_type": "InternVLVideoProcessor"}
        (out / "video_preprocessor_config.json").write_text(json.dumps(video, indent=2) + "\n")
    (out / "preprocessor_config.json").write_text(json.dumps({**pixels, "processor_class": whole["processor_class"]}, indent=2) + "\n")
    (out / "processor_config.json").write_text(json.dumps(whole, indent=2) + "\n")
