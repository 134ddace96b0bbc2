"""Gemma-3: HF's tensors, pan-and-scan crops, tokens that see each other, sliding layers, post-norms."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from tests.conftest import hooked, picture
from tests.families.test_preparation import SIZES, messages
from tests.tiny import TEMPLATES, VARIANTS, gemma3, image_processor, randomise, tokenizer
from transformers import Gemma3Processor

from sightlens.errors import FamilyError
from sightlens.families import ImageOptions
from sightlens.interventions import Ablate, Knockout
from sightlens.model import HookedVLM, verify_layout

GEMMA = next(v for v in VARIANTS if v.family == "gemma3")
MODEL = hooked(GEMMA)
NARROW = HookedVLM(randomise(gemma3(window=10), 0), MODEL.processing)
QUESTION = "what colour is the circle ?"


def hf_tensors(groups: list[list[np.ndarray]], questions: list[str], **options: Any) -> dict[str, torch.Tensor]:
    """What HF's own processor makes."""
    template = TEMPLATES["gemma3"]
    processor = Gemma3Processor(image_processor(GEMMA), tokenizer(template, "gemma3"), chat_template=template, image_seq_length=16)
    chats = [messages(question, images=len(group)) for group, question in zip(groups, questions, strict=True)]
    texts = [processor.apply_chat_template(chat, tokenize=False, add_generation_prompt=True) for chat in chats]
    pictures = [[Image.fromarray(image) for image in group] for group in groups]
    crops = {"pan_and_scan_min_crop_size": 16, "pan_and_scan_max_num_crops": 4, "pan_and_scan_min_ratio_to_activate": 1.2}
    return dict(processor(text=texts, images=pictures, padding=True, padding_side="left", return_tensors="pt", **crops, **options))


def check_equal(prompt: Any, wanted: dict[str, torch.Tensor]) -> None:
    assert set(prompt.tensors) - {"position_ids"} == set(wanted)
    for name, tensor in wanted.items():
        assert torch.equal(prompt.tensors[name], tensor), name


@pytest.mark.parametrize("size", [*SIZES, (60, 90), (90, 33), (100, 16)], ids=str)
@pytest.mark.parametrize("crops", [False, True])
def test_tensors_are_hf_s_and_layouts_hold(crops: bool, size: tuple[int, int]) -> None:
    prompt = MODEL.prepare(picture(*size), QUESTION, options=ImageOptions(pan_and_scan=crops))
    check_equal(prompt, hf_tensors([[picture(*size)]], [QUESTION], do_pan_and_scan=crops))
    verify_layout(MODEL, prompt, tokens=4)
    views = prompt.layout.views
    assert views[0].kind == "global"
    tiles = views[1:]
    assert len(tiles) in ((0, 2, 3, 4) if crops else (0,))
    if tiles:
        assert tiles[0].box[:2] == (0, 0)
        assert tiles[-1].box[2:] == (size[1], size[0])
        assert {view.tile[size[0] <= size[1]] for view in tiles} == set(range(len(tiles)))


def test_crops_stand_between_their_own_delimiters() -> None:
    layout = MODEL.prepare(picture(32, 96), QUESTION, options=ImageOptions(pan_and_scan=True)).layout
    assert [view.name for view in layout.views] == ["global", "tile[0,0]", "tile[0,1]", "tile[0,2]"]
    assert layout.views[2].box == (32, 0, 64, 32)
    assert layout.select("separator[start]").count == layout.select("separator[end]").count == 4
    start = layout.select("tile[0,1]").positions[0]
    assert layout.tokens[start - 1] == "<start_of_image>"
    assert layout.tokens[start + 16] == "<end_of_image>"
    fewer = MODEL.prepare(picture(32, 96), QUESTION, options=ImageOptions(pan_and_scan=True, max_tiles=2)).layout
    assert len(fewer.views) == 3


def test_a_batch_of_several_images_is_hf_s() -> None:
    images = [picture(*size, seed=k) for k, size in enumerate([(48, 64), (64, 20), (32, 32), (90, 33), (5, 60), (40, 40)])]
    groups = [images[:2], images[2:3], images[3:]]
    questions = ["where is the red circle ?", "how many ?", "is there a star in the image and where is the square ?"]
    prompt = MODEL.prepare(groups, questions, options=ImageOptions(pan_and_scan=True))
    check_equal(prompt, hf_tensors(groups, questions, do_pan_and_scan=True))


@torch.no_grad()
def test_visual_tokens_see_each_other_within_the_window() -> None:
    prompt = NARROW.prepare(picture(), QUESTION)
    _, cache = NARROW.run_with_cache(prompt, names_filter="blocks.*.attn.hook_pattern")
    image = prompt.layout.select("image").positions
    far = np.abs(image[:, None] - image) >= 10
    for layer, slides in enumerate((True, False, True)):
        block = cache[f"blocks.{layer}.attn.hook_pattern"][0][:, image[:, None], image]
        seen = (block > 0).all(0).numpy()
        below = image[:, None] >= image
        assert (seen[~below & ~far]).all()
        assert (seen == ~(far & below)).all() if slides else seen.all()


@pytest.mark.parametrize("layer", [0, 1, 2])
@torch.no_grad()
def test_a_knockout_reaches_every_kind_of_layer_backwards_too(layer: int) -> None:
    prompt = NARROW.prepare(picture(), QUESTION)
    early, late = "image & row[1]", "image & row[2]"
    name = f"blocks.{layer}.attn.hook_pattern"
    for queries, keys in ((early, late), (late, early)):
        _, cache = NARROW.run_with_cache(prompt, names_filter=name, interventions=[Knockout(queries, keys, layers=(layer,))])
        assert cache[f"{name}@{queries} -> {keys}"].abs().max() == 0
        assert cache[f"{name}@{keys} -> {queries}"].abs().max() > 0


@torch.no_grad()
def test_patterns_are_addressed_when_a_sliding_layer_holds_the_last_keys_only() -> None:
    prompt = NARROW.prepare(picture(), QUESTION)
    seen: dict[str, list[torch.Tensor]] = {}
    hooks = [
        (
            f"blocks.{layer}.attn.hook_pattern@answer -> {keys}",
            lambda v, hook, k=f"{layer} {keys}": seen.setdefault(k, []).append(v.clone()),
        )
        for layer in (0, 1)
        for keys in ("last", "all")
    ]
    options = {"eos_token_id": None}
    with NARROW.hooks(fwd_hooks=hooks):
        ids = NARROW.generate_ids(prompt, max_new_tokens=4, options=options)
    longer = prompt.with_answers(ids[:, :-1].tolist(), [["x"] * 3])
    _, cache = NARROW.run_with_cache(longer, names_filter="blocks.*.attn.hook_pattern")
    last = prompt.layout.length - 1
    for layer in (0, 1):
        whole = cache[f"blocks.{layer}.attn.hook_pattern"][0]
        for step in range(3):
            assert torch.allclose(seen[f"{layer} last"][step][0, :, 0, 0], whole[:, last + 1 + step, last], atol=1e-5)


@torch.no_grad()
def test_head_results_add_up_after_the_norm_and_writing_one_head_takes_its_share_away() -> None:
    prompt = MODEL.prepare(picture(), QUESTION)
    names = ["blocks.1.attn.hook_result", "blocks.1.hook_attn_out", "blocks.1.hook_resid_mid"]
    _, plain = MODEL.run_with_cache(prompt, names_filter=names)
    assert torch.allclose(plain[names[0]].sum(2), plain[names[1]], atol=1e-5)
    _, without = MODEL.run_with_cache(prompt, names_filter=names, interventions=[Ablate("all", "zero", site=names[0], heads=(2,))])
    for name in names[1:]:
        assert torch.allclose(without[name], plain[name] - plain[names[0]][:, :, 2], atol=1e-5)


@pytest.mark.parametrize(("field", "value"), [("mm_tokens_per_image", 15), ("mm_tokens_per_image", 9)])
def test_a_grid_that_is_not_known_is_refused(field: str, value: int) -> None:
    config = hooked(GEMMA).hf.config
    setattr(config, field, value)
    with pytest.raises(FamilyError, match=field):
        MODEL.processing.family.check_config(config)


def test_other_attention_is_refused() -> None:
    config = hooked(GEMMA).hf.config
    config.text_config.attn_logit_softcapping = 30.0
    with pytest.raises(FamilyError, match="softcapping"):
        MODEL.processing.family.check_config(config)
