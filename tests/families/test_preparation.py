"""``prepare`` makes the tensors of HF's own processors, and says truly what each position is."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image
from tests.conftest import hooked, picture
from tests.tiny import INTERNVL_TEMPLATE, LLAVA_TEMPLATE, VARIANTS, Variant, hf_model, image_processor, tokenizer
from tokenizers.processors import TemplateProcessing
from transformers import LlavaProcessor
from transformers.models.llava.image_processing_pil_llava import LlavaImageProcessorPil
from transformers.utils import is_torchvision_available

from sightlens.errors import FamilyError, PromptError
from sightlens.families import ImageOptions, Prompt
from sightlens.layout import Layout
from sightlens.model import HookedVLM

LLAVA = [variant for variant in VARIANTS if variant.family == "llava"]
INTERNVL = VARIANTS[4]
QUESTION = "what colour is the circle ?"
SIZES = [
    (48, 64),
    (64, 48),
    (32, 32),
    (31, 33),
    (1, 1),
    (1, 40),
    (40, 1),
    (3, 50),
    (50, 3),
    (7, 1),
    (2, 200),
    (200, 2),
    (400, 300),
    (33, 1000),
]
HF_INTERNVL = pytest.mark.skipif(not is_torchvision_available(), reason="InternVLProcessor's video processor needs torchvision")
ONE = settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
MODELS = {str(variant): hooked(variant) for variant in VARIANTS}


def messages(question: str, *, images: int = 1, system: str | None = None) -> list[dict[str, Any]]:
    """A conversation as HF writes it."""
    before = [] if system is None else [{"role": "system", "content": [{"type": "text", "text": system}]}]
    return [*before, {"role": "user", "content": [{"type": "image"}] * images + [{"type": "text", "text": question}]}]


def llava_processor(variant: Variant, images: Any) -> LlavaProcessor:
    """HF's own processor of a variant."""
    clip = variant.vision == "clip"
    return LlavaProcessor(
        images,
        tokenizer(LLAVA_TEMPLATE),
        patch_size=8,
        vision_feature_select_strategy="default" if clip else "full",
        num_additional_image_tokens=1 if clip else 0,
        chat_template=LLAVA_TEMPLATE,
    )


def processed(processor: Any, conversations: Sequence[Any], images: Sequence[np.ndarray], **options: Any) -> dict[str, torch.Tensor]:
    """HF's tensors of conversations."""
    texts = [processor.apply_chat_template(chat, tokenize=False, add_generation_prompt=True) for chat in conversations]
    pictures = [Image.fromarray(image) for image in images] or None
    return dict(processor(text=texts, images=pictures, padding=True, padding_side="left", return_tensors="pt", **options))


def retold(texts: Sequence[str], images: Sequence[np.ndarray], *, most: int) -> dict[str, torch.Tensor]:
    """What InternVL's processor makes, computed again from its parts."""
    made = image_processor(INTERNVL)(images=[Image.fromarray(image) for image in images], max_patches=most, return_tensors="pt")
    counts = iter(made["num_patches"].tolist())
    whole = []
    for text in texts:
        first, *rest = text.split("<IMG_CONTEXT>")
        whole.append(first + "".join("<img>" + "<IMG_CONTEXT>" * (4 * next(counts)) + "</img>" + part for part in rest))
    return {
        **tokenizer(INTERNVL_TEMPLATE)(whole, padding=True, padding_side="left", return_tensors="pt"),
        "pixel_values": made["pixel_values"],
    }


def check_equal(prompt: Prompt, wanted: dict[str, torch.Tensor]) -> None:
    """Compare a prompt with HF's tensors."""
    for name in ("input_ids", "attention_mask", "pixel_values"):
        assert torch.equal(prompt.tensors[name], wanted[name]), name
    mask = wanted["attention_mask"]
    for row, positions in zip(mask, prompt.tensors["position_ids"], strict=True):
        real = int(row.sum())
        assert positions[-real:].tolist() == list(range(real))
        assert not positions[:-real].any()
    assert prompt.tensors.keys() == {"input_ids", "attention_mask", "position_ids", "pixel_values"}
    assert prompt.lengths == tuple(mask.sum(1).tolist())


def words(layout: Layout, selector: str) -> str:
    """The selected tokens, in order."""
    return " ".join(layout.tokens[k] for k in sorted(layout.select(selector).positions))


def shown(layout: Layout) -> list[tuple[float, ...]]:
    """The views' boxes."""
    return [view.box for view in layout.views]


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("mode", [None, "pad", "crop"])
@pytest.mark.parametrize("variant", LLAVA, ids=str)
def test_llava_is_hf_s_processor(variant: Variant, mode: str | None, size: tuple[int, int]) -> None:
    image = picture(*size)
    own = image_processor(variant)
    if mode is not None:
        kept = {"size": own.size, "image_mean": own.image_mean, "image_std": own.image_std, "resample": own.resample}
        crop = {"crop_size": own.crop_size, "do_center_crop": True} if variant.vision == "clip" else {"do_center_crop": False}
        own = LlavaImageProcessorPil(**kept, **crop, do_pad=mode == "pad")
    prompt = MODELS[str(variant)].prepare(image, QUESTION, options=ImageOptions(image_mode=mode))
    check_equal(prompt, processed(llava_processor(variant, own), [messages(QUESTION)], [image]))


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("most", [1, 2, 6, 12])
def test_internvl_is_its_parts(most: int, size: tuple[int, int]) -> None:
    image = picture(*size)
    prompt = MODELS[str(INTERNVL)].prepare(image, QUESTION, options=ImageOptions(max_tiles=most))
    wanted = retold(prompt.texts, [image], most=most)
    check_equal(prompt, wanted)
    views = prompt.layout.views
    assert len(views) == len(wanted["pixel_values"])
    assert [view.kind for view in views] == ["tile"] * (len(views) - 1) + ["global"]
    tiles = [view.tile for view in views[:-1]]
    rows, columns = (1 + max(place[k] for place in tiles) for k in (0, 1)) if tiles else (0, 0)
    assert tiles == [(row, column) for row in range(rows) for column in range(columns)]
    height, width = size
    for view in views[:-1]:
        row, column = view.tile
        assert np.allclose(
            view.box, (column * width / columns, row * height / rows, (column + 1) * width / columns, (row + 1) * height / rows)
        )
    assert views[-1].box == (0, 0, width, height)


def _internvl_processor() -> Any:
    from transformers import InternVLProcessor
    from transformers.models.internvl.video_processing_internvl import InternVLVideoProcessor

    video = InternVLVideoProcessor()
    return InternVLProcessor(
        image_processor(INTERNVL), tokenizer(INTERNVL_TEMPLATE), video, image_seq_length=4, chat_template=INTERNVL_TEMPLATE
    )


@HF_INTERNVL
@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("most", [1, 6, 12])
def test_internvl_is_hf_s_processor(most: int, size: tuple[int, int]) -> None:
    image = picture(*size)
    prompt = MODELS[str(INTERNVL)].prepare(image, QUESTION, system="you are helpful", options=ImageOptions(max_tiles=most))
    chat = messages(QUESTION, system="you are helpful")
    check_equal(prompt, processed(_internvl_processor(), [chat], [image], max_patches=most))


@HF_INTERNVL
def test_internvl_batch_is_hf_s_processor() -> None:
    prompt, images, texts, counts = _batch(MODELS[str(INTERNVL)])
    chats = [messages(text, images=count) for text, count in zip(texts, counts, strict=True)]
    check_equal(prompt, processed(_internvl_processor(), chats, images))


def _batch(model: HookedVLM) -> tuple[Prompt, list[np.ndarray], list[str], list[int]]:
    """Three examples with two, one and three images, and texts of different lengths."""
    images = [picture(*size, seed=k) for k, size in enumerate([(48, 64), (64, 20), (32, 32), (90, 33), (5, 60), (40, 40)])]
    texts = ["where is the red circle ?", "how many ?", "is there a star in the image and where is the square ?"]
    return model.prepare([images[:2], images[2], images[3:]], texts), images, texts, [2, 1, 3]


@pytest.mark.parametrize("variant", [variant for variant in VARIANTS if variant.family in ("llava", "internvl")], ids=str)
def test_batches_of_several_images(variant: Variant) -> None:
    prompt, images, texts, counts = _batch(MODELS[str(variant)])
    if variant.family == "llava":
        chats = [messages(text, images=count) for text, count in zip(texts, counts, strict=True)]
        check_equal(prompt, processed(llava_processor(variant, image_processor(variant)), chats, images))
    else:
        check_equal(prompt, retold(prompt.texts, images, most=6))
    assert len(set(prompt.lengths)) == 3
    for layout, text, count in zip(prompt.layouts, texts, counts, strict=True):
        assert words(layout, "question") == text
        assert len(layout.image_sizes) == count
        assert words(layout, "last") == {"llava": ":", "internvl": "ASSISTANT"}[variant.family]
        assert layout.select("last").positions.tolist() == [layout.length - 1]


@pytest.mark.parametrize("variant", [LLAVA[0], INTERNVL], ids=str)
def test_text_alone_and_text_beside_images(variant: Variant) -> None:
    model = MODELS[str(variant)]
    alone = model.prepare(None, QUESTION)
    assert "pixel_values" not in alone.tensors
    assert words(alone.layout, "question") == QUESTION
    mixed = model.prepare([None, picture()], ["what ?", QUESTION])
    assert mixed.layouts[0].views == ()
    assert mixed.layouts[1].select("image").count == int((mixed.tensors["input_ids"][1] == model.hf.config.image_token_id).sum())
    assert (
        mixed.tensors["input_ids"][0][-alone.layout.length + 4 :].tolist() == model.prepare(None, "what ?").tensors["input_ids"][0].tolist()
    )


@ONE
@given(height=st.integers(1, 400), width=st.integers(1, 400), most=st.integers(1, 12), mode=st.sampled_from(["pad", "crop"]))
def test_any_size(height: int, width: int, most: int, mode: str) -> None:
    image = picture(height, width)
    tiled = MODELS[str(INTERNVL)].prepare(image, QUESTION, options=ImageOptions(max_tiles=most))
    check_equal(tiled, retold(tiled.texts, [image], most=most))
    own = LlavaImageProcessorPil(size={"shortest_edge": 32}, crop_size={"height": 32, "width": 32}, do_pad=mode == "pad")
    plain = MODELS[str(LLAVA[0])].prepare(image, QUESTION, options=ImageOptions(image_mode=mode))
    check_equal(plain, processed(llava_processor(LLAVA[0], own), [messages(QUESTION)], [image]))
    (box,) = shown(plain.layout)
    side = max(height, width) if mode == "pad" else min(height, width)
    slack = 0.0 if mode == "pad" else max(height, width) / min(height, width) * (1 + side / 16)
    assert np.allclose([box[2] - box[0], box[3] - box[1]], side, atol=slack)
    assert abs((box[0] + box[2]) - width) <= max(1.0, 2 * slack)
    assert abs((box[1] + box[3]) - height) <= max(1.0, 2 * slack)


@ONE
@given(
    question=st.lists(
        st.sampled_from(["a", ":", "ASSISTANT", "USER", "system", "zebra", "?", "</s>", "<|im_start|>"]), min_size=1, max_size=6
    )
)
def test_any_question_is_found_where_it_stands(question: list[str]) -> None:
    for variant in (LLAVA[0], INTERNVL):
        layout = MODELS[str(variant)].prepare(picture(), " ".join(question), system="a system").layout
        found = layout.select("question | special").positions
        place = layout.select("post_image").positions.tolist()
        expected = [word if word != "zebra" else "<unk>" for word in question]
        start = place[0]
        assert [layout.tokens[k] for k in range(start, start + len(question))] == expected
        plain = [start + k for k, word in enumerate(question) if word not in ("</s>", "<|im_start|>")]
        assert layout.select("question").positions.tolist() == plain if plain else True
        assert set(plain) <= set(found.tolist())
        assert words(layout, "system") == "a system"


@pytest.mark.parametrize("variant", [LLAVA[0], INTERNVL], ids=str)
def test_roles(variant: Variant) -> None:
    layout = MODELS[str(variant)].prepare([picture(), picture(20, 70)], QUESTION, system="you are helpful").layout
    assert words(layout, "question") == QUESTION
    assert words(layout, "system") == "you are helpful"
    if variant.family == "llava":
        assert layout.select("image").count == 32
        assert words(layout, "last") == ":"
        assert words(layout, "post_image") == QUESTION + " ASSISTANT :"
        assert words(layout, "template") == "USER : ASSISTANT :"
    else:
        assert words(layout, "separator") == "<img> </img> <img> </img>"
        assert words(layout, "separator[start]") == "<img> <img>"
        assert words(layout, "last") == "ASSISTANT"
        assert words(layout, "post_image") == QUESTION + " <|im_end|> <|im_start|> ASSISTANT"
        assert words(layout, "special") == "<|im_start|> <|im_end|> <|im_start|> <|im_end|> <|im_start|>"
    parts = ["question", "system", "template", "separator", "special", "image"]
    places = [
        position for part in parts for position in (layout.select(part).positions if part != "separator" or variant is INTERNVL else [])
    ]
    assert sorted(np.ravel(places).tolist()) == list(range(layout.length))


def test_spaces_and_repeats_do_not_move_the_question() -> None:
    model = MODELS[str(LLAVA[0])]
    assert words(model.prepare(picture(), "  what ?  ").layout, "question") == "what ?"
    same = model.prepare(picture(), "what", system="what").layout
    assert words(same, "question") == words(same, "system") == "what"
    assert same.select("system").positions[0] < same.select("image").positions.min() < same.select("question").positions[0]


@pytest.mark.parametrize("written", [True, False])
def test_one_opening_token_whoever_writes_it(written: bool) -> None:
    tokens = tokenizer(("<s> " if written else "") + LLAVA_TEMPLATE)
    tokens._tokenizer.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    model = HookedVLM.from_hf(hf_model(LLAVA[0]), SimpleNamespace(tokenizer=tokens, image_processor=image_processor(LLAVA[0])))
    prompt = model.prepare(picture(), QUESTION)
    processor = LlavaProcessor(image_processor(LLAVA[0]), tokens, 8, "default", tokens.chat_template, num_additional_image_tokens=1)
    chat = [{"role": "user", "content": [{"type": "image", "image": Image.fromarray(picture())}, {"type": "text", "text": QUESTION}]}]
    check_equal(
        prompt,
        dict(processor.apply_chat_template([chat], tokenize=True, return_dict=True, return_tensors="pt", add_generation_prompt=True)),
    )
    assert prompt.tensors["input_ids"][0].tolist().count(1) == 1
    assert words(prompt.layout, "special") == "<s>"
    assert words(prompt.layout, "question") == QUESTION


def test_raw_text_places_images_itself() -> None:
    text = "USER : where <image> is <image> ?"
    prompt = MODELS[str(LLAVA[0])].prepare([picture(), picture(20, 20)], text, template="raw")
    processor = llava_processor(LLAVA[0], image_processor(LLAVA[0]))
    pictures = [Image.fromarray(picture()), Image.fromarray(picture(20, 20))]
    check_equal(prompt, dict(processor(text=[text], images=pictures, return_tensors="pt")))
    between = prompt.layout.select("text").positions
    assert [prompt.layout.tokens[k] for k in between] == ["USER", ":", "where", "is", "?"]
    tiled = MODELS[str(INTERNVL)].prepare(picture(), "<IMG_CONTEXT> where ?", template="raw")
    check_equal(tiled, retold(["<IMG_CONTEXT> where ?"], [picture()], most=6))
    assert words(tiled.layout, "separator") == "<img> </img>"


@pytest.mark.parametrize(
    ("images", "text", "options"),
    [
        (picture(), "no place", {"template": "raw"}),
        (None, "a <image> ?", {"template": "raw"}),
        (picture(), "what <image> ?", {}),
        (picture(), "<image>", {"template": "raw", "system": "you"}),
        ([picture()], ["a", "b"], {}),
        (picture(), ["a", "b"], {}),
        (None, [], {}),
        (None, "a " * 600, {}),
    ],
)
def test_prompts_that_cannot_be(images: Any, text: Any, options: dict[str, Any]) -> None:
    model = MODELS[str(LLAVA[0])]
    with pytest.raises(PromptError):
        model.prepare(images, text, **options)


@pytest.mark.parametrize(
    "options",
    [
        *({"max_tiles": value} for value in (10**6, 129, -1, "x", 2.5, True)),
        *({name: value} for name in ("min_pixels", "max_pixels") for value in ("x", 0, 2.5, 10**12)),
        {"image_mode": 3},
        {"pan_and_scan": "yes"},
    ],
    ids=str,
)
@pytest.mark.usefixtures("unchecked")
def test_options_of_a_wrong_type_or_size(options: dict[str, Any]) -> None:
    with pytest.raises(FamilyError, match=next(iter(options)).replace("image_mode", "image mode")):
        ImageOptions(**options)


def test_options_of_another_family_or_value() -> None:
    with pytest.raises(FamilyError, match="image_mode"):
        MODELS[str(INTERNVL)].prepare(picture(), QUESTION, options=ImageOptions(image_mode="pad"))
    with pytest.raises(FamilyError, match="max_tiles"):
        MODELS[str(LLAVA[0])].prepare(picture(), QUESTION, options=ImageOptions(max_tiles=2))
    with pytest.raises(FamilyError, match="'pad' or 'crop'"):
        MODELS[str(LLAVA[0])].prepare(picture(), QUESTION, options=ImageOptions(image_mode="squash"))
    with pytest.raises(FamilyError, match="max_tiles >= 1"):
        MODELS[str(INTERNVL)].prepare(picture(), QUESTION, options=ImageOptions(max_tiles=0))
