"""LLaVA-NeXT and LLaVA-OneVision: HF's tensors, un-padded grids, newlines, and tokens scaled down after the projector."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from tests.conftest import hooked, picture
from tests.families.test_preparation import SIZES, messages
from tests.tiny import LLAVA_TEMPLATE, VARIANTS, image_processor, tokenizer
from transformers import LlavaNextProcessor, LlavaOnevisionProcessor

from sightlens.errors import FamilyError, SelectorError
from sightlens.families.anyres import Canvas
from sightlens.interventions import Ablate
from sightlens.model import HookedVLM, verify_layout

NEXT, ONEVISION = (next(v for v in VARIANTS if v.family == family) for family in ("llava_next", "llava_onevision"))
MODELS = {str(variant): hooked(variant) for variant in (NEXT, ONEVISION)}
QUESTION = "what colour is the circle ?"
WIDE = [(90, 96), (200, 200), (96, 64), (500, 499)]


def processor(variant: Any) -> Any:
    """HF's own processor of a variant."""
    images, words = image_processor(variant), tokenizer(LLAVA_TEMPLATE)
    if variant is NEXT:
        return LlavaNextProcessor(images, words, 8, "default", LLAVA_TEMPLATE, num_additional_image_tokens=1)
    made = object.__new__(LlavaOnevisionProcessor)  # the constructor wants a video processor, which needs torchvision
    made.image_processor, made.tokenizer, made.video_processor, made.chat_template = images, words, None, LLAVA_TEMPLATE
    made.num_image_tokens, made.vision_feature_select_strategy, made.vision_aspect_ratio = 16, "full", "anyres_max_4"
    made.image_token, made.video_token = "<image>", "<video>"
    made.image_token_id, made.video_token_id = (words.convert_tokens_to_ids(token) for token in ("<image>", "<video>"))
    return made


def check_equal(model: HookedVLM, variant: Any, groups: list[list[np.ndarray]], questions: list[str]) -> Any:
    """Compare a batch with HF's tensors."""
    prompt = model.prepare(groups if len(groups) > 1 else groups[0], questions if len(groups) > 1 else questions[0])
    chats = [messages(question, images=len(group)) for group, question in zip(groups, questions, strict=True)]
    texts = [processor(variant).apply_chat_template(chat, tokenize=False, add_generation_prompt=True) for chat in chats]
    pictures = [[Image.fromarray(image) for image in group] for group in groups]
    wanted = processor(variant)(text=texts, images=pictures, padding=True, padding_side="left", return_tensors="pt")
    assert set(wanted) - {"batch_num_images"} <= set(prompt.tensors)
    for name in set(prompt.tensors) - {"position_ids"}:
        assert torch.equal(prompt.tensors[name], torch.as_tensor(wanted[name])), name
    return prompt


@pytest.mark.parametrize("size", [*SIZES, *WIDE], ids=str)
@pytest.mark.parametrize("variant", [NEXT, ONEVISION], ids=str)
def test_tensors_are_hf_s_and_the_model_takes_them(variant: Any, size: tuple[int, int]) -> None:
    model = MODELS[str(variant)]
    prompt = check_equal(model, variant, [[picture(*size)]], [QUESTION])
    assert prompt.layout.views[0].kind == "global"
    assert prompt.layout.views[0].box == (0, 0, size[1], size[0])
    model(prompt)
    verify_layout(model, prompt, tokens=3)
    boxes = prompt.layout.visual_tokens()["box"]
    slack = max(size) / 12
    assert boxes.min() >= -slack
    assert (boxes[:, 2:] <= np.array([size[1], size[0]]) + slack).all()


@pytest.mark.parametrize("variant", [NEXT, ONEVISION], ids=str)
def test_batches_of_several_images_are_hf_s(variant: Any) -> None:
    images = [picture(*size, seed=k) for k, size in enumerate([(48, 64), (64, 20), (32, 32), (90, 33), (5, 60), (40, 40)])]
    questions = ["where is the red circle ?", "how many ?", "is there a star in the image and where is the square ?"]
    prompt = check_equal(MODELS[str(variant)], variant, [images[:2], images[2:3], images[3:]], questions)
    MODELS[str(variant)](prompt)
    newlines = [layout.select("separator[newline]").count for layout in prompt.layouts]
    assert newlines[0] == (
        2 if variant is ONEVISION else sum(view.grid[0] for view in prompt.layouts[0].views if view.tile and not view.tile[1])
    )


@settings(max_examples=40, deadline=None)
@given(height=st.integers(1, 400), width=st.integers(1, 400))
def test_any_size(height: int, width: int) -> None:
    for variant in (NEXT, ONEVISION):
        check_equal(MODELS[str(variant)], variant, [[picture(height, width)]], [QUESTION])


def test_canvas_of_a_published_size() -> None:
    """480 × 640 on 672 × 672: 504 rows of pixels are picture, 84 above and below padding, 6 of 48 rows of tokens each."""
    canvas = Canvas((480, 640), (2, 2), 336, 24)
    assert canvas.kept() == (range(6, 42), range(48))
    assert canvas.box(range(6, 42), range(48)) == (0, 0, 640, 480)
    assert canvas.box(range(24, 42), range(24, 48)) == (320, 240, 640, 480)
    model = MODELS[str(NEXT)]
    layout = model.prepare(picture(48, 64), QUESTION).layout
    assert [view.name for view in layout.views] == ["global", "tile[0,0]", "tile[0,1]", "tile[1,0]", "tile[1,1]"]
    assert [view.grid for view in layout.views] == [(4, 4), *[(3, 4)] * 4]
    assert layout.views[4].box == (32, 24, 64, 48)
    first = layout.select("tile[0,*] & row[0]").positions
    assert first.tolist() == list(range(18, 26))  # <bos-less> USER : and 16 tokens of the base come before
    assert layout.tokens[26] == "<image>"
    assert 26 in layout.select("separator[newline]").positions


@pytest.mark.parametrize("variant", [NEXT, ONEVISION], ids=str)
@torch.no_grad()
def test_a_tile_is_read_and_written_before_the_merge_and_after_it(variant: Any) -> None:
    model = MODELS[str(variant)]
    prompt = model.prepare([picture(), [picture(48, 64, 1)]], [QUESTION, "how many ?"])
    for where in ("tile[1,0]", "global & row[2]", "tile[*] & column[0]"):
        plain, cache = model.run_with_cache(prompt, names_filter=["hook_visual_embed", "hook_merged_embed"])
        assert torch.equal(cache[f"hook_visual_embed@{where}"], cache[f"hook_merged_embed@{where}"])
        early = model(prompt, interventions=[Ablate(where, "zero", site="hook_visual_embed")])
        late = model(prompt, interventions=[Ablate(where, "zero")])
        assert torch.equal(early, late)
        assert (early - plain).abs().max() > 1e-3


@torch.no_grad()
def test_tiles_of_a_canvas_wider_than_high_carry_their_own_features() -> None:
    model = MODELS[str(NEXT)]
    prompt = model.prepare(picture(60, 90), QUESTION)
    assert [view.tile for view in prompt.layout.views[1:]] == [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2)]
    _, cache = model.run_with_cache(prompt, names_filter=["hook_visual_embed", "hook_merged_embed"])
    for r in range(2):
        for c in range(3):
            assert torch.equal(cache[f"hook_merged_embed@tile[{r},{c}]"][0], cache["hook_visual_embed"][1 + 3 * r + c].unflatten(0, (4, 4)))


@torch.no_grad()
def test_tokens_scaled_down_after_the_projector() -> None:
    model = MODELS[str(ONEVISION)]
    prompt = model.prepare(picture(200, 200), QUESTION)
    assert [view.grid for view in prompt.layout.views] == [(4, 4), (8, 8)]
    _, cache = model.run_with_cache(prompt, names_filter=["hook_visual_embed", "hook_merged_embed"])
    tiles = cache["hook_visual_embed"][1:].reshape(3, 3, 4, 4, -1).permute(4, 0, 2, 1, 3).reshape(1, -1, 12, 12)
    scaled = torch.nn.functional.interpolate(tiles, [8, 8], mode="bilinear")[0].permute(1, 2, 0)
    assert torch.allclose(cache["hook_merged_embed@tile[0,0]"][0], scaled, atol=1e-6)
    assert (cache["hook_visual_embed@global"] == cache["hook_merged_embed@global"]).all()
    with pytest.raises(SelectorError, match="blend"):
        cache["hook_visual_embed@tile[0,0]"]


@torch.no_grad()
def test_the_newline_vector_stands_at_every_newline() -> None:
    model = MODELS[str(NEXT)]
    prompt = model.prepare(picture(), QUESTION)
    vector = torch.arange(32.0)
    with model.hooks(fwd_hooks=[("hook_newline", lambda value, hook: vector)]):
        _, cache = model.run_with_cache(prompt, names_filter="hook_merged_embed")
    assert (cache["hook_merged_embed@separator[newline]"] == vector).all()
    _, plain = model.run_with_cache(prompt, names_filter="hook_merged_embed")
    assert (plain["hook_merged_embed@separator[newline]"] == model.hf.model.image_newline).all()
    assert torch.equal(cache["hook_merged_embed@~separator"], plain["hook_merged_embed@~separator"])

    def fail(value: Any, hook: Any) -> None:
        raise RuntimeError("mine")

    for name in ("hook_newline", "blocks.0.hook_resid_pre"):
        with pytest.raises(RuntimeError, match="mine"), model.hooks(fwd_hooks=[("hook_newline", lambda v, hook: v), (name, fail)]):
            model(prompt)
    assert isinstance(model.hf.model.image_newline, torch.nn.Parameter)


def test_a_processor_of_other_canvases_is_refused() -> None:
    images = image_processor(NEXT)
    images.image_grid_pinpoints = images.image_grid_pinpoints[:2]
    with pytest.raises(FamilyError, match="image_grid_pinpoints"):
        HookedVLM.from_hf(MODELS[str(NEXT)].hf, SimpleNamespace(tokenizer=tokenizer(LLAVA_TEMPLATE), image_processor=images))
