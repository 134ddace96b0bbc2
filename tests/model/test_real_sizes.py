"""The published sizes, built without memory: every site exists, every shape follows, every parameter is accounted for."""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn
from transformers import (
    CLIPVisionConfig,
    InternVLConfig,
    InternVLForConditionalGeneration,
    InternVLVisionConfig,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    PreTrainedConfig,
    Qwen3Config,
)
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil

from sightlens.errors import FamilyError
from sightlens.families import ImageOptions, find_family
from sightlens.families.compat import lens_config
from sightlens.families.family import Place
from sightlens.families.sites import HeadResult, Input, Output
from sightlens.model.sites import Sites


@dataclass(frozen=True)
class Size:
    """One published model: layers, width, width of the MLP, heads, key heads, and how many hook names it must have."""

    name: str
    layers: int
    width: int
    mlp: int
    heads: int
    key_heads: int
    hooks: int
    billions: float
    """Parameters in 10⁹, unembedding counted apart from the embedding."""

    def __str__(self) -> str:
        return self.name


LLAVA = [Size("llava-1.5-7b", 32, 4096, 11008, 32, 32, 993, 7.06), Size("llava-1.5-13b", 40, 5120, 13824, 40, 40, 1153, 13.35)]
INTERNVL = [
    Size("internvl3.5-1b", 28, 1024, 3072, 16, 8, 928, 1.06),
    Size("internvl3.5-2b", 28, 2048, 6144, 16, 8, 928, 2.35),
    Size("internvl3.5-4b", 36, 2560, 9728, 32, 8, 1088, 4.73),
    Size("internvl3.5-8b", 36, 4096, 12288, 32, 8, 1088, 8.53),
    Size("internvl3.5-14b", 40, 5120, 17408, 40, 8, 1168, 15.12),
]
UNREACHED = {
    "llava": {
        "lm_head.weight",
        "model.multi_modal_projector.linear_N",
        "model.vision_tower.embeddings",
        "model.vision_tower.embeddings.patch_embedding",
        "model.vision_tower.embeddings.position_embedding",
        "model.vision_tower.pre_layrnorm",
        "model.vision_tower.post_layernorm",
        "model.vision_tower.encoder.layers.N.layer_normN",
        "model.vision_tower.encoder.layers.23",
    },
    "internvl": {
        "lm_head.weight",
        "model.multi_modal_projector.linear_N",
        "model.multi_modal_projector.layer_norm",
        "model.vision_tower.embeddings",
        "model.vision_tower.embeddings.patch_embeddings.projection",
        "model.vision_tower.encoder.layer.N.layernorm_before",
        "model.language_model.layers.N.self_attn.q_norm",
        "model.language_model.layers.N.self_attn.k_norm",
    },
}
"""Modules with parameters of their own at which no site taps; all but the last tower layer lie between two sites."""


def configuration(size: Size) -> PreTrainedConfig:
    """The published configuration, written out."""
    text = {
        "num_hidden_layers": size.layers,
        "hidden_size": size.width,
        "intermediate_size": size.mlp,
        "num_attention_heads": size.heads,
        "num_key_value_heads": size.key_heads,
        "tie_word_embeddings": False,
    }
    tower = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24, "num_attention_heads": 16}
    if size in LLAVA:
        vision = CLIPVisionConfig(**tower, image_size=336, patch_size=14, projection_dim=768)
        return LlavaConfig(
            vision_config=vision,
            text_config=LlamaConfig(**text, vocab_size=32064, max_position_embeddings=4096),
            image_token_index=32000,
        )
    vision = InternVLVisionConfig(**tower, image_size=448, patch_size=14, attention_bias=True, norm_type="layer_norm")
    decoder = Qwen3Config(**text, head_dim=128, vocab_size=151936, max_position_embeddings=40960)
    return InternVLConfig(vision_config=vision, text_config=decoder, image_token_id=151671, image_seq_length=256, tie_word_embeddings=False)


def build(size: Size) -> nn.Module:
    """HF's model without storage."""
    cls = LlavaForConditionalGeneration if size in LLAVA else InternVLForConditionalGeneration
    with torch.device("meta"):
        return cls(configuration(size)).eval()


@pytest.fixture(scope="module", params=[*LLAVA, *INTERNVL], ids=str)
def built(request: pytest.FixtureRequest) -> tuple[Size, nn.Module, Sites]:
    """One size, its model, and its hook points."""
    hf = build(request.param)
    family = find_family(hf.config.model_type)
    family.check_config(hf.config)
    return request.param, hf, Sites(hf, family.sites(hf.config))


def test_every_site_exists_and_nothing_is_allocated(built: tuple[Size, nn.Module, Sites]) -> None:
    size, hf, sites = built
    assert len(sites.points) == size.hooks
    assert all(isinstance(point.module, nn.Module) for point in sites.points.values())
    assert all(tensor.is_meta for tensor in hf.parameters())
    assert not any(True for point in sites.points.values() for _ in point.parameters())
    assert sites.n_layers == size.layers
    count = sum(tensor.numel() for tensor in hf.parameters())
    assert abs(count / 1e9 - size.billions) < 0.01, count


def test_heads_follow_from_the_weights(built: tuple[Size, nn.Module, Sites]) -> None:
    size, hf, sites = built
    d_head = 128
    assert sites.n_heads == size.heads
    for layer in (0, size.layers - 1):
        shapes = {letter: sites.points[f"blocks.{layer}.attn.hook_{letter}"] for letter in "qkvz"}
        for letter, heads in (("q", size.heads), ("k", size.key_heads), ("v", size.key_heads)):
            point = shapes[letter]
            assert isinstance(point.site.tap, Output)
            assert point.site.tap.heads == heads
            assert point.module.weight.shape == (heads * d_head, size.width)
        assert isinstance(shapes["z"].site.tap, Input)
        assert shapes["z"].module.weight.shape == (size.width, size.heads * d_head)
    assert sites.points["blocks.0.attn.hook_result"].site.tap == HeadResult(size.heads)
    tower = sites.points["vision_encoder.encoder_layers.0.attn.hook_q"]
    assert (tower.site.tap.heads, tuple(tower.module.weight.shape)) == (16, (1024, 1024))
    cfg = lens_config(hf, size.name)
    assert (cfg.n_layers, cfg.n_heads, cfg.d_model, cfg.d_mlp, cfg.d_head) == (size.layers, size.heads, size.width, size.mlp, d_head)


def test_only_the_listed_parameters_lie_away_from_every_site(built: tuple[Size, nn.Module, Sites]) -> None:
    _, hf, sites = built
    tapped = {point.site.module for point in sites.points.values()}
    unreached = set()
    for name, _ in hf.named_parameters():
        owner = name.rpartition(".")[0]
        if owner in tapped and owner != "model.vision_tower":
            continue
        short = "model.vision_tower.encoder.layers.23" if ".layers.23." in name and "vision_tower" in name else re.sub(r"\d+", "N", owner)
        unreached.add(name if owner == "lm_head" else short)
    tower_root = {"model.vision_tower.embeddings"}  # itself a site: its class token and positions are inside
    assert unreached | tower_root == UNREACHED[hf.config.model_type]


def test_last_used_tower_layer_is_the_last_one_with_a_name(built: tuple[Size, nn.Module, Sites]) -> None:
    size, _, sites = built
    last = 22 if size in LLAVA else 23
    assert f"vision_encoder.encoder_layers.{last}.hook_resid_post" in sites.points
    assert f"vision_encoder.encoder_layers.{last + 1}.hook_resid_post" not in sites.points


@pytest.mark.parametrize(("most", "views"), [(1, 1), (6, 7), (12, 13)])
def test_internvl_views_and_features(most: int, views: int) -> None:
    size = INTERNVL[3]
    hf = build(size)
    family = find_family("internvl")
    grid = family.token_grid(hf.config)
    assert (grid.rows, grid.columns, grid.merge) == (16, 16, 2)
    processor = GotOcr2ImageProcessorPil(size={"height": 448, "width": 448}, crop_to_patches=True)
    picture = Image.fromarray(np.random.default_rng(0).integers(0, 256, (960, 1280, 3), dtype=np.uint8))
    made = family.view_image(picture, processor, ImageOptions(max_tiles=most), place=Place(0, 1, grid, hf.config))
    assert len(made.views) == views
    assert made.pixels.shape == (views, 3, 448, 448)
    assert sum(view.count for view in made.views) == 256 * views
    features = hf.model.get_image_features(pixel_values=made.pixels.to("meta")).pooler_output
    assert torch.cat(list(features)).numel() == views * 256 * size.width


def test_llava_view_and_features() -> None:
    hf = build(LLAVA[0])
    family = find_family("llava")
    grid = family.token_grid(hf.config)
    assert (grid.rows, grid.columns, grid.merge) == (24, 24, 1)
    processor = CLIPImageProcessorPil(size={"shortest_edge": 336}, crop_size={"height": 336, "width": 336})
    picture = Image.fromarray(np.zeros((480, 640, 3), dtype=np.uint8))
    for mode, box in (("pad", (0, -80, 640, 560)), ("crop", (80, 0, 560, 480)), (None, (80, 0, 560, 480))):
        made = family.view_image(picture, processor, ImageOptions(image_mode=mode), place=Place(0, 1, grid, hf.config))
        assert made.views[0].box == box
        assert made.pixels.shape == (1, 3, 336, 336)
        assert made.views[0].count == 576
    features = hf.model.get_image_features(pixel_values=made.pixels.to("meta")).pooler_output
    assert torch.cat(list(features)).numel() == 576 * 4096


@pytest.mark.parametrize("size", [LLAVA[0], INTERNVL[2]], ids=str)
def test_shapes_at_the_hooks_of_one_layer(size: Size) -> None:
    hf = build(size)
    sites = Sites(hf, find_family(hf.config.model_type).sites(hf.config))
    seen: dict[str, tuple[int, ...]] = {}
    for name in ("hook_resid_pre", "attn.hook_q", "attn.hook_k", "attn.hook_rot_k", "attn.hook_z", "mlp.hook_post", "hook_resid_post"):
        sites.points[f"blocks.0.{name}"].add_hook(lambda value, hook: seen.update({hook.name: tuple(value.shape)}))
    decoder = hf.model.language_model
    with torch.device("meta"), torch.no_grad():
        states = torch.zeros(1, 5, size.width)
        turns = decoder.rotary_emb(states, position_ids=torch.arange(5)[None])
        decoder.layers[0](states, attention_mask=None, position_embeddings=turns)
    assert seen == {
        "blocks.0.hook_resid_pre": (1, 5, size.width),
        "blocks.0.attn.hook_q": (1, 5, size.heads, 128),
        "blocks.0.attn.hook_k": (1, 5, size.key_heads, 128),
        "blocks.0.attn.hook_rot_k": (1, 5, size.key_heads, 128),
        "blocks.0.attn.hook_z": (1, 5, size.heads, 128),
        "blocks.0.mlp.hook_post": (1, 5, size.mlp),
        "blocks.0.hook_resid_post": (1, 5, size.width),
    }


@pytest.mark.parametrize(
    ("size", "field", "value"),
    [
        (LLAVA[0], "vision_feature_select_strategy", "full"),
        (LLAVA[0], "vision_feature_layer", [-2, -5]),
        (INTERNVL[0], "downsample_ratio", 0.25),
        (INTERNVL[0], "vision_feature_layer", -2),
        (INTERNVL[0], "image_seq_length", 255),
    ],
)
def test_a_layout_that_is_not_known_is_refused(size: Size, field: str, value: object) -> None:
    config = configuration(size)
    setattr(config, field, value)
    with pytest.raises(FamilyError, match=field):
        find_family(config.model_type).check_config(config)
