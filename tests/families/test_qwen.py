"""Qwen2.5-VL and Qwen3-VL: HF's tensors and positions, towers in raster order, windows, features that come in again."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from tests.conftest import hooked, picture
from tests.families.test_preparation import SIZES, messages
from tests.tiny import TEMPLATES, VARIANTS, image_processor, tokenizer
from transformers import Qwen2_5_VLProcessor, Qwen3VLProcessor
from transformers.vision_utils import get_vision_position_ids, get_vision_window_index

from sightlens.errors import FamilyError, ImageError, InterventionError
from sightlens.families import ImageOptions
from sightlens.families.packed import PackedOrder
from sightlens.interventions import Ablate, PatchIn
from sightlens.metrics import PerMille, ResizedPixels
from sightlens.model import verify_layout

QWEN25, QWEN3 = (next(v for v in VARIANTS if v.family == family) for family in ("qwen2_5_vl", "qwen3_vl"))
BOTH = pytest.mark.parametrize("variant", [QWEN25, QWEN3], ids=str)
MODELS = {variant: hooked(variant) for variant in (QWEN25, QWEN3)}
QUESTION = "what colour is the circle ?"
IMAGES = [picture(*size, seed=k) for k, size in enumerate([(48, 64), (64, 20), (32, 32), (90, 33), (5, 60), (40, 40)])]
GROUPS = [IMAGES[:2], [], IMAGES[2:]]
QUESTIONS = ["where is the red circle ?", "how many ?", "is there a star in the image and where is the square ?"]


def hf_tensors(variant: Any, groups: list[list[np.ndarray]], questions: list[str], **options: Any) -> dict[str, torch.Tensor]:
    """What HF's own processor makes; its constructor wants a video processor, which needs torchvision."""
    cls = Qwen2_5_VLProcessor if variant is QWEN25 else Qwen3VLProcessor
    processor, template = object.__new__(cls), TEMPLATES[variant.family]
    processor.image_processor, processor.tokenizer = image_processor(variant), tokenizer(template, variant.family)
    processor.video_processor, processor.chat_template = None, template
    processor.image_token, processor.video_token = "<|image_pad|>", "<|video_pad|>"
    for name in ("image_token", "video_token"):
        setattr(processor, f"{name}_id", processor.tokenizer.convert_tokens_to_ids(getattr(processor, name)))
    chats = [messages(question, images=len(group)) for group, question in zip(groups, questions, strict=True)]
    texts = [processor.apply_chat_template(chat, tokenize=False, add_generation_prompt=True) for chat in chats]
    pictures = [Image.fromarray(image) for group in groups for image in group]
    return dict(processor(text=texts, images=pictures, padding=True, padding_side="left", return_tensors="pt", **options))


def check_equal(prompt: Any, wanted: dict[str, torch.Tensor]) -> None:
    assert set(prompt.tensors) - {"position_ids"} == set(wanted)
    for name, tensor in wanted.items():
        assert torch.equal(prompt.tensors[name], tensor.to(prompt.tensors[name].dtype)), name


@BOTH
@pytest.mark.parametrize("size", [size for size in SIZES if max(size) <= 200 * min(size)], ids=str)
def test_tensors_are_hf_s_and_layouts_hold(variant: Any, size: tuple[int, int]) -> None:
    prompt = MODELS[variant].prepare(picture(*size), QUESTION)
    check_equal(prompt, hf_tensors(variant, [[picture(*size)]], [QUESTION]))
    verify_layout(MODELS[variant], prompt, tokens=4)
    assert prompt.layout.views[0].box == (0, 0, size[1], size[0])


@settings(max_examples=40, deadline=None)
@given(height=st.integers(1, 300), width=st.integers(1, 300), most=st.integers(8 * 8 * 4, 8 * 8 * 100))
def test_any_size_and_limit(height: int, width: int, most: int) -> None:
    if max(height, width) > 200 * min(height, width):
        return
    prompt = MODELS[QWEN25].prepare(picture(height, width), QUESTION, options=ImageOptions(max_pixels=most))
    size = {"shortest_edge": 8 * 8 * 4, "longest_edge": most}
    check_equal(prompt, hf_tensors(QWEN25, [[picture(height, width)]], [QUESTION], size=size))
    resized = ResizedPixels(factor=8, min_pixels=8 * 8 * 4, max_pixels=most).resized((height, width))
    assert tuple(8 * side for side in prompt.layout.views[0].grid) == resized


@BOTH
def test_batches_and_positions_are_hf_s(variant: Any) -> None:
    model = MODELS[variant]
    prompt = model.prepare(GROUPS, QUESTIONS)
    wanted = hf_tensors(variant, GROUPS, QUESTIONS)
    check_equal(prompt, wanted)
    wanted["mm_token_type_ids"] = wanted["mm_token_type_ids"].int()
    positions, _ = model.hf.model.get_rope_index(**{name: wanted[name] for name in wanted if name != "pixel_values"})
    assert torch.equal(prompt.tensors["position_ids"], positions)
    assert prompt.layouts[0].select("separator[start]").count == 2
    assert {prompt.layouts[0].tokens[k] for k in prompt.layouts[0].select("separator").positions} == {"<|vision_start|>", "<|vision_end|>"}


@BOTH
@torch.no_grad()
def test_positions_are_never_plain_and_nothing_is_left_from_another_run(variant: Any) -> None:
    model = hooked(variant)
    prompt, other = model.prepare(IMAGES[0], QUESTION), model.prepare([IMAGES[3], IMAGES[5]], "how many ?")
    logits = model(prompt)
    inputs = prompt.generation_inputs()
    assert torch.equal(model.hf(**inputs, use_cache=False).logits, logits)
    plain = prompt.tensors["attention_mask"].cumsum(1) - 1
    assert (model.hf(**inputs, position_ids=plain, use_cache=False).logits - logits).abs().max() > 1e-3
    options = {"eos_token_id": None}
    first = model.generate_ids(prompt, max_new_tokens=5, options=options)
    text = model.generate_ids(model.prepare(None, "how many ?"), max_new_tokens=5, options=options)
    model.generate_ids(other, max_new_tokens=5, options=options)
    assert torch.equal(model(prompt), logits)
    assert torch.equal(model.generate_ids(model.prepare(None, "how many ?"), max_new_tokens=5, options=options), text)
    assert torch.equal(model.generate_ids(prompt, max_new_tokens=5, options=options), first)


@pytest.mark.parametrize("window", [2, 3, 4, 8])
def test_orders_are_hf_s(window: int) -> None:
    grids = torch.tensor([[1, 10, 14], [1, 4, 4], [1, 2, 22], [1, 16, 6]])
    tokens, _ = get_vision_window_index(grids, spatial_merge_size=2, window_size=window * 2 * 4, patch_size=4)
    assert torch.equal(PackedOrder("", 2, window, tokens=True).indices(grids), tokens.argsort())
    places = get_vision_position_ids(grids, 2)
    starts = torch.repeat_interleave(torch.tensor([0, 140, 156, 200]), torch.tensor([140, 16, 44, 96]))
    widths = torch.repeat_interleave(grids[:, 2], torch.tensor([140, 16, 44, 96]))
    raster = starts + places[:, 0] * widths + places[:, 1]
    assert torch.equal(PackedOrder("", 2).indices(grids), raster.argsort())
    windows = raster.reshape(-1, 4)[tokens].flatten()
    assert torch.equal(PackedOrder("", 2, window).indices(grids), windows.argsort())


@BOTH
@torch.no_grad()
def test_tower_attention_is_read_in_raster_order(variant: Any) -> None:
    model = MODELS[variant]
    prompt = model.prepare([IMAGES[0], IMAGES[5]], QUESTION)
    _, cache = model.run_with_cache(prompt, names_filter="vision_encoder.*")
    row, column, image = [], [], []
    for k, (_, height, width) in enumerate(prompt.tensors["image_grid_thw"].tolist()):
        r, c = np.indices((height, width)).reshape(2, -1)
        row, column, image = [*row, *r], [*column, *c], [*image, *[k] * len(r)]
    image = np.array(image)
    window = np.stack([image, np.array(row) // 4, np.array(column) // 4])
    for layer in range(3):
        block = f"vision_encoder.encoder_layers.{layer}"
        pattern = cache[f"{block}.attn.hook_pattern"]
        together = image[:, None] == image if variant is QWEN3 or layer == 1 else (window[:, :, None] == window[:, None]).all(0)
        assert ((pattern > 0).numpy() == together).all()
        assert torch.allclose(pattern.sum(-1), torch.ones(()))
        z = torch.einsum("hqk,khd->qhd", pattern, cache[f"{block}.attn.hook_v"])
        assert torch.allclose(z, cache[f"{block}.attn.hook_z"], atol=1e-5)
        scores = torch.einsum("qhd,khd->hqk", cache[f"{block}.attn.hook_rot_q"], cache[f"{block}.attn.hook_rot_k"]) / 12**0.5
        assert torch.allclose(scores[:, together], cache[f"{block}.attn.hook_attn_scores"][:, together], atol=1e-4)


@BOTH
@torch.no_grad()
def test_a_written_tower_pattern_takes_effect_where_it_was_written(variant: Any) -> None:
    model = MODELS[variant]
    prompt = model.prepare([IMAGES[0], IMAGES[5]], QUESTION)
    name, z = "vision_encoder.encoder_layers.0.attn.hook_pattern", "vision_encoder.encoder_layers.0.attn.hook_z"
    _, plain = model.run_with_cache(prompt, names_filter=z)

    def silence(value: torch.Tensor, hook: Any) -> None:
        value[1, 5] = 0

    with model.hooks(fwd_hooks=[(name, silence)]):
        _, cache = model.run_with_cache(prompt, names_filter=z)
    assert cache[z][5, 1].abs().max() == 0
    expected = plain[z].clone()
    expected[5, 1] = 0
    assert torch.allclose(cache[z], expected, atol=1e-5)
    assert not any(model.hf.get_submodule(model.hook_dict[name].site.module)._forward_pre_hooks.values())


def test_pictures_and_limits_that_cannot_be() -> None:
    with pytest.raises(ImageError, match="200"):
        MODELS[QWEN25].prepare(picture(1, 300), QUESTION)
    with pytest.raises(FamilyError, match="min_pixels"):
        MODELS[QWEN25].prepare(picture(), QUESTION, options=ImageOptions(min_pixels=9000, max_pixels=800))
    small = MODELS[QWEN25].prepare(picture(), QUESTION, options=ImageOptions(max_pixels=8 * 8 * 6)).layout
    large = MODELS[QWEN25].prepare(picture(8, 8), QUESTION, options=ImageOptions(min_pixels=8 * 8 * 30)).layout
    assert small.select("image").count <= 6
    assert large.select("image").count >= 30
    assert MODELS[QWEN25].processing.box_format == ResizedPixels(factor=8, min_pixels=256, max_pixels=2560)
    assert MODELS[QWEN3].processing.box_format == PerMille()


@pytest.mark.parametrize(
    ("variant", "part", "field", "value"),
    [
        (QWEN25, "text_config", "use_sliding_window", True),
        (QWEN25, "vision_config", "window_size", 20),
        (QWEN3, "vision_config", "deepstack_visual_indexes", [2, 0]),
        (QWEN3, "vision_config", "deepstack_visual_indexes", [0, 1, 2]),
    ],
)
def test_configurations_that_are_not_known_are_refused(variant: Any, part: str, field: str, value: Any) -> None:
    config = hooked(variant).hf.config
    setattr(getattr(config, part), field, value)
    with pytest.raises(FamilyError, match=field):
        MODELS[variant].processing.family.check_config(config)


# DeepStack

AGAIN = ("hook_deepstack_embed.0", "hook_deepstack_embed.1")


def added(cache: Any, layer: int) -> torch.Tensor:
    """What comes in after a layer."""
    block = f"blocks.{layer}"
    return cache[f"{block}.hook_resid_post"] - cache[f"{block}.hook_resid_mid"] - cache[f"{block}.hook_mlp_out"]


@torch.no_grad()
def test_ablation_follows_what_comes_in_again_or_says_that_it_does_not() -> None:
    model = hooked(QWEN3)
    prompt = model.prepare(IMAGES[0], QUESTION)
    where, rest = "image & row[1]", "image & ~row[1]"
    names = ["blocks.*.hook_resid_post", "blocks.*.hook_resid_mid", "blocks.*.hook_mlp_out", "hook_merged_embed", *AGAIN]
    _, plain = model.run_with_cache(prompt, names_filter=names)
    mean = model.fit_mean([model.prepare(picture(seed=seed), QUESTION) for seed in range(3)], source="noise")
    rows, others = prompt.layout.select(where).positions.copy(), prompt.layout.select(rest).positions.copy()
    given = {"mine": torch.arange(32.0)}
    for value, wanted in (("zero", None), ("mean", mean.companions), ("mine", None), ("noise", ...)):
        _, cache = model.run_with_cache(prompt, names_filter=names, interventions=[Ablate(where, value)], donors=given)
        for layer, name in enumerate(AGAIN):
            found = added(cache, layer)[0]
            assert torch.allclose(found[others], added(plain, layer)[0, others], atol=1e-4)
            if wanted is ...:
                assert (found[rows] - added(plain, layer)[0, rows]).abs().min(dim=-1).values.max() > 0.01
            else:
                expected = torch.zeros(32) if wanted is None else wanted[name]
                assert torch.allclose(found[rows], expected.expand(len(rows), -1), atol=1e-4)
        _, stays = model.run_with_cache(prompt, names_filter=names, interventions=[Ablate(where, value, reinjected=False)], donors=given)
        assert torch.equal(stays["hook_merged_embed"], cache["hook_merged_embed"])
        for layer in range(2):
            assert torch.allclose(added(stays, layer)[0, rows], added(plain, layer)[0, rows], atol=1e-4)
    model.donors["mean"] = type(mean)(mean.vector, mean.site, mean.source, mean.tokens)
    with pytest.raises(InterventionError, match="fit_mean"):
        model(prompt, interventions=[Ablate(where, "mean")])


@torch.no_grad()
def test_patching_in_another_picture_gives_its_logits_only_with_what_comes_in_again() -> None:
    model = MODELS[QWEN3]
    prompt, other = model.prepare(IMAGES[0], QUESTION), model.prepare(picture(seed=7), QUESTION)
    expected, donor = model.run_with_cache(other, names_filter=["hook_merged_embed", *AGAIN])
    for at in ("image", "all"):
        patch = PatchIn("hook_merged_embed", at=at)
        assert torch.allclose(model(prompt, interventions=[patch], donors={"clean": donor}), expected, atol=1e-5)
    alone = PatchIn("hook_merged_embed", at="image", reinjected=False)
    assert (model(prompt, interventions=[alone], donors={"clean": donor}) - expected).abs().max() > 1e-2
    _, own = model.run_with_cache(prompt, names_filter=["hook_merged_embed", *AGAIN])
    assert torch.equal(model(prompt, interventions=[PatchIn("hook_merged_embed", donor="own")], donors={"own": own}), model(prompt))
    _, part = model.run_with_cache(other, names_filter="hook_merged_embed")
    with pytest.raises(InterventionError, match="deepstack"):
        model(prompt, interventions=[patch], donors={"clean": part})
    text = model.prepare(None, QUESTION)
    _, words = model.run_with_cache(text, names_filter="hook_merged_embed")
    assert torch.equal(model(text, interventions=[PatchIn("hook_merged_embed")], donors={"clean": words}), model(text))


@pytest.mark.parametrize("order", [0, 1])
@torch.no_grad()
def test_both_names_of_one_residual_agree_whoever_hooks_first(order: int) -> None:
    model = MODELS[QWEN3]
    prompt = model.prepare(IMAGES[0], QUESTION)
    seen = {}
    hooks = [
        ("blocks.0.hook_resid_post", lambda value, hook: value + 1),
        ("blocks.1.hook_resid_pre", lambda value, hook: seen.__setitem__("pre", value.clone())),
    ]
    _, cache = model.run_with_cache(prompt, names_filter=["blocks.0.hook_resid_post", "blocks.1.hook_resid_pre"])
    assert torch.equal(cache["blocks.0.hook_resid_post"], cache["blocks.1.hook_resid_pre"])
    with model.hooks(fwd_hooks=hooks[::-1] if order else hooks):
        changed = model(prompt)
    assert torch.equal(seen["pre"], cache["blocks.0.hook_resid_post"] + 1)
    through_pre = model.run_with_hooks(prompt, fwd_hooks=[("blocks.1.hook_resid_pre", lambda value, hook: value + 1)])
    assert torch.equal(changed, through_pre)
