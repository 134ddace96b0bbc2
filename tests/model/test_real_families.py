"""The published sizes of further families, built without memory: every site exists, heads follow, layouts are the known ones."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
import transformers
from PIL import Image
from tests.conftest import picture
from transformers import AutoConfig, PreTrainedConfig
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
from transformers.models.llava_next.image_processing_pil_llava_next import LlavaNextImageProcessorPil
from transformers.models.llava_onevision.image_processing_pil_llava_onevision import LlavaOnevisionImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from sightlens.families import ImageOptions, find_family
from sightlens.families.compat import lens_config
from sightlens.families.family import Mark, Place
from sightlens.families.sites import HeadResult, Input, Output
from sightlens.model.sites import Sites

CLIP = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24, "num_attention_heads": 16}
CLIP |= {"model_type": "clip_vision_model", "image_size": 336, "patch_size": 14, "projection_dim": 768}
SIGLIP = {"hidden_size": 1152, "intermediate_size": 4304, "num_attention_heads": 16, "patch_size": 14, "vision_use_head": False}
SIGLIP |= {"model_type": "siglip_vision_model"}
WINDOWED = {"depth": 32, "hidden_size": 1280, "intermediate_size": 3420, "num_heads": 16}
DEEP = [5, 11, 17]
MROPE = {"rope_type": "default", "rope_theta": 1e6}


@dataclass(frozen=True)
class Size:
    """One published model; heads, key heads, width and head size as published, parameters in 10⁹ with its own tying."""

    name: str
    model_type: str
    layers: int
    width: int
    mlp: int
    heads: int
    key_heads: int
    d_head: int
    vocab: int
    tied: bool
    billions: float
    text: str = ""
    more: Any = None

    def __str__(self) -> str:
        return self.name


SIZES = [
    Size("llava-v1.6-vicuna-7b", "llava_next", 32, 4096, 11008, 32, 32, 128, 32064, False, 7.06, "llama"),
    Size("llava-v1.6-mistral-7b", "llava_next", 32, 4096, 14336, 32, 8, 128, 32064, False, 7.57, "mistral"),
    Size("llava-onevision-qwen2-0.5b", "llava_onevision", 24, 896, 4864, 14, 2, 64, 152000, True, 0.89, "qwen2"),
    Size("llava-onevision-qwen2-7b", "llava_onevision", 28, 3584, 18944, 28, 4, 128, 152128, False, 8.03, "qwen2"),
    Size("gemma-3-4b", "gemma3", 34, 2560, 10240, 8, 4, 256, 262208, True, 4.30, "gemma3_text"),
    Size("gemma-3-12b", "gemma3", 48, 3840, 15360, 16, 8, 256, 262208, True, 12.19, "gemma3_text"),
    Size("qwen2.5-vl-3b", "qwen2_5_vl", 36, 2048, 11008, 16, 2, 128, 151936, True, 3.75, more={"out_hidden_size": 2048}),
    Size("qwen2.5-vl-7b", "qwen2_5_vl", 28, 3584, 18944, 28, 4, 128, 152064, False, 8.29, more={"out_hidden_size": 3584}),
    Size(
        "qwen3-vl-4b", "qwen3_vl", 36, 2560, 9728, 32, 8, 128, 151936, True, 4.44,
        more={"depth": 24, "hidden_size": 1024, "intermediate_size": 4096, "out_hidden_size": 2560, "deepstack_visual_indexes": DEEP},
    ),
    Size("qwen3-vl-8b", "qwen3_vl", 36, 4096, 12288, 32, 8, 128, 151936, False, 8.77, more={"out_hidden_size": 4096}),
    Size("llama-3.1-8b", "llama", 32, 4096, 14336, 32, 8, 128, 128256, False, 8.03),
    Size("qwen2.5-7b", "qwen2", 28, 3584, 18944, 28, 4, 128, 152064, False, 7.62),
    Size("qwen3-8b", "qwen3", 36, 4096, 12288, 32, 8, 128, 151936, False, 8.19),
]  # fmt: skip


def configuration(size: Size) -> PreTrainedConfig:
    """The published configuration, written out."""
    text = {
        "num_hidden_layers": size.layers,
        "hidden_size": size.width,
        "intermediate_size": size.mlp,
        "num_attention_heads": size.heads,
        "num_key_value_heads": size.key_heads,
        "vocab_size": size.vocab,
        "head_dim": size.d_head,
        "tie_word_embeddings": size.tied,
        "max_position_embeddings": 32768,
    }
    if size.model_type in ("qwen2", "qwen2_5_vl") or size.text == "qwen2":
        text.pop("head_dim")
    whole: dict[str, Any] = {"tie_word_embeddings": size.tied, "text_config": {**text, "model_type": size.text}}
    match size.model_type:
        case "llava_next":
            whole |= {"vision_config": CLIP, "image_token_index": 32000}
        case "llava_onevision":
            whole |= {"vision_config": {**SIGLIP, "image_size": 384, "num_hidden_layers": 26}}
        case "gemma3":
            whole |= {"vision_config": {**SIGLIP, "image_size": 896, "num_hidden_layers": 27}}
        case "qwen2_5_vl" | "qwen3_vl":
            section = [16, 24, 24] if size.model_type == "qwen2_5_vl" else [24, 20, 20]
            whole["text_config"] = {**text, "rope_parameters": {**MROPE, "mrope_section": section}}
            whole["vision_config"] = {**(WINDOWED if size.model_type == "qwen2_5_vl" else {}), **size.more}
        case _:
            whole = text
    return AutoConfig.for_model(size.model_type, **whole)


@pytest.fixture(scope="module", params=SIZES, ids=str)
def built(request: pytest.FixtureRequest) -> tuple[Size, Any, Sites]:
    """One size, its model without storage, and its hook points."""
    config, family = configuration(request.param), find_family(request.param.model_type)
    family.check_config(config)
    with torch.device("meta"):
        hf = getattr(transformers, family.architecture)(config).eval()
    return request.param, hf, Sites(hf, family.sites(config))


def test_every_site_exists_and_parameters_are_the_published_number(built: tuple[Size, Any, Sites]) -> None:
    size, hf, sites = built
    assert all(isinstance(point.module, torch.nn.Module) for point in sites.points.values())
    assert all(tensor.is_meta for tensor in hf.parameters())
    assert (sites.n_layers, sites.n_heads) == (size.layers, size.heads)
    count = sum(tensor.numel() for tensor in hf.parameters()) - (hf.lm_head.weight.numel() if size.tied and _twice(hf) else 0)
    assert abs(count / 1e9 - size.billions) < 0.01, count


def _twice(hf: Any) -> bool:
    """Whether a model on the meta device still holds the unembedding apart from the embedding."""
    return hf.lm_head.weight is not hf.get_input_embeddings().weight


def test_heads_follow_from_the_weights(built: tuple[Size, Any, Sites]) -> None:
    size, hf, sites = built
    for layer in (0, size.layers - 1):
        for letter, heads in (("q", size.heads), ("k", size.key_heads), ("v", size.key_heads)):
            point = sites.points[f"blocks.{layer}.attn.hook_{letter}"]
            assert isinstance(point.site.tap, Output)
            assert point.site.tap.heads == heads
            assert point.module.weight.shape == (heads * size.d_head, size.width)
        z = sites.points[f"blocks.{layer}.attn.hook_z"]
        assert isinstance(z.site.tap, Input)
        assert z.module.weight.shape == (size.width, size.heads * size.d_head)
        assert isinstance(sites.points[f"blocks.{layer}.attn.hook_result"].site.tap, HeadResult)
    cfg = lens_config(hf, size.name)
    assert (cfg.n_layers, cfg.n_heads, cfg.d_model, cfg.d_mlp, cfg.d_head) == (size.layers, size.heads, size.width, size.mlp, size.d_head)


def test_tower_layers_and_what_comes_in_again(built: tuple[Size, Any, Sites]) -> None:
    size, hf, sites = built
    towers = [name for name in sites.points if name.startswith("vision_encoder.encoder_layers") and name.endswith("hook_resid_post")]
    depth = {"llava_next": 23, "llava_onevision": 26, "gemma3": 27, "qwen2_5_vl": 32, "qwen3_vl": 24 if "4b" in size.name else 27}
    assert len(towers) == depth.get(size.model_type, 0)
    again = [name for name in sites.points if name.startswith("hook_deepstack_embed")]
    assert len(again) == find_family(size.model_type).reinjections(hf.config) == (3 if size.model_type == "qwen3_vl" else 0)


PINPOINTS = [[336, 672], [672, 336], [672, 672], [1008, 336], [336, 1008]]
PROCESSORS = {
    "llava_next": lambda: LlavaNextImageProcessorPil(
        size={"shortest_edge": 336}, crop_size={"height": 336, "width": 336}, image_grid_pinpoints=PINPOINTS
    ),
    "llava_onevision": LlavaOnevisionImageProcessorPil,
    "gemma3": lambda: Gemma3ImageProcessorPil(size={"height": 896, "width": 896}),
    "qwen2_5_vl": Qwen2VLImageProcessorPil,
    "qwen3_vl": lambda: Qwen2VLImageProcessorPil(patch_size=16, size={"shortest_edge": 65536, "longest_edge": 16777216}),
}


@pytest.mark.parametrize(
    ("name", "options", "grids", "newlines"),
    [
        ("llava-v1.6-mistral-7b", ImageOptions(), [(24, 24), *[(18, 24)] * 4], 36),
        ("llava-onevision-qwen2-7b", ImageOptions(), [(27, 27), *[(20, 27)] * 4], 40),
        ("gemma-3-4b", ImageOptions(), [(16, 16)], 0),
        ("gemma-3-4b", ImageOptions(pan_and_scan=True), [(16, 16)] * 3, 0),
        ("qwen2.5-vl-7b", ImageOptions(), [(17, 23)], 0),
        ("qwen2.5-vl-7b", ImageOptions(max_pixels=336 * 336), [(10, 13)], 0),
        ("qwen3-vl-8b", ImageOptions(), [(15, 20)], 0),
    ],
)
def test_a_picture_of_480_by_640(name: str, options: ImageOptions, grids: list[tuple[int, int]], newlines: int) -> None:
    size = next(size for size in SIZES if size.name == name)
    family, config = find_family(size.model_type), configuration(size)
    processor = PROCESSORS[size.model_type]()
    family.check_processor(config, processor)
    place = Place(0, 1, family.token_grid(config), config)
    viewed = family.view_image(Image.fromarray(picture(480, 640)), processor, options, place=place)
    assert [view.grid for view in viewed.views] == grids
    assert sum(part == Mark("newline") for part in viewed.span) == newlines
    assert {view.merge for view in viewed.views} == {
        4 if size.model_type == "gemma3" else 2 if "qwen" in size.model_type and "llava" not in name else 1
    }
