"""What training feeds the models equals what the Hugging Face processors make of the same picture and question."""

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import AutoTokenizer, LlavaProcessor
from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil

from sightlens.metrics import BinTokens
from sightlens.model import HookedVLM
from sightlens.zoo import vocabulary
from sightlens.zoo.batches import LABELS, Batcher, attention_mask, box_tokens, relative_box
from sightlens.zoo.evaluate import FOLDERS
from sightlens.zoo.network import read, see
from sightlens.zoo.pixels import normalize, padded, tiled
from sightlens.zoo.recipe import RECIPES

SIZES = [(64, 64), (64, 48), (48, 64), (96, 96), (96, 72), (72, 64), (32, 96), (96, 32), (40, 40), (32, 32), (200, 31), (17, 90), (1, 50)]


def picture(size: tuple[int, int]) -> Image.Image:
    width, height = size
    return Image.fromarray(np.random.default_rng(width * height).integers(0, 256, (height, width, 3), dtype=np.uint8))


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_llava_pixels_equal_the_processor(size: tuple[int, int]) -> None:
    processor = LlavaProcessor.from_pretrained(FOLDERS["llava"])
    theirs = processor(images=picture(size), text="USER: <image>\nwhere ?", return_tensors="pt")["pixel_values"]
    torch.testing.assert_close(normalize(padded(picture(size), 64).pixels), theirs, atol=1e-5, rtol=0)


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_internvl_pixels_equal_the_processor(size: tuple[int, int]) -> None:
    processor = GotOcr2ImageProcessorPil.from_pretrained(FOLDERS["internvl"])
    theirs = processor(images=[picture(size)], return_tensors="pt")["pixel_values"]
    torch.testing.assert_close(normalize(tiled(picture(size), 32, most=4).pixels), theirs, atol=1e-5, rtol=0)


def test_windows_cover_the_picture_row_by_row_and_the_overview_is_last() -> None:
    views = tiled(picture((72, 64)), 32, most=4)
    assert views.windows == ((0, 0, 36, 32), (36, 0, 72, 32), (0, 32, 36, 64), (36, 32, 72, 64), (0, 0, 72, 64))
    assert tiled(picture((40, 40)), 32, most=4).windows == ((0, 0, 40, 40),)
    assert padded(picture((64, 48)), 64).frame == (0, -8, 64, 56)


def test_the_recipes_layouts_have_the_views_they_say() -> None:
    for recipe in RECIPES.values():
        batcher = Batcher(recipe, seed=5)
        assert sum(layout.share for layout in recipe.layouts) == pytest.approx(1)
        for layout in recipe.layouts:
            for index in range(12):
                assert len(batcher.views(batcher.scene(index, layout)[0]).windows) == layout.views


def test_llava_prompt_ids_equal_the_processor() -> None:
    processor = LlavaProcessor.from_pretrained(FOLDERS["llava"])
    batcher = Batcher(RECIPES["llava"], seed=1)
    text = "USER: <image>\nwhere is the red circle ? ASSISTANT:"
    theirs = processor(images=picture((64, 64)), text=text)["input_ids"][0]
    assert batcher.prefix(1) + batcher.encode("where is the red circle ?") + batcher.suffix() == theirs
    asked = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "where is the red circle ?"}]}]
    assert processor.apply_chat_template(asked, add_generation_prompt=True) == text


@pytest.mark.parametrize(("size", "views"), [((40, 40), 1), ((64, 32), 3), ((72, 64), 5)])
def test_internvl_prompt_ids_are_those_of_the_chat(size: tuple[int, int], views: int) -> None:
    model = HookedVLM.from_pretrained(FOLDERS["internvl"], check=False)
    batcher = Batcher(RECIPES["internvl"], seed=1)
    prompt = model.prepare(picture(size), "how many red circles ?")
    assert len(prompt.layout.views) == views
    trained = batcher.prefix(views) + batcher.encode("how many red circles ?") + batcher.suffix()
    assert prompt.tensors["input_ids"].tolist() == [trained]


@pytest.mark.parametrize("name", sorted(RECIPES))
def test_every_word_of_a_question_is_known(name: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(FOLDERS[name])
    batcher = Batcher(RECIPES[name], seed=2)
    for index in range(40):
        for question in batcher.scene(index, batcher.recipe.layouts[0])[1]:
            ids = tokenizer(question.text + question.answer, add_special_tokens=False)["input_ids"]
            assert tokenizer.unk_token_id not in ids
            assert batcher.encode(question.text) == tokenizer(question.text, add_special_tokens=False)["input_ids"]
    for text in (batcher.prefix(2), batcher.suffix()):
        assert tokenizer.unk_token_id not in text


@pytest.mark.parametrize("name", sorted(RECIPES))
def test_packed_questions_are_read_as_if_asked_alone(name: str) -> None:
    model = HookedVLM.from_pretrained(FOLDERS[name], check=False).hf
    batcher = Batcher(RECIPES[name], seed=3)
    stimulus, asked = batcher.scene(4, batcher.recipe.layouts[0])
    batch = batcher.pack([(stimulus, asked)])
    with torch.no_grad():
        packed = read(model, batch, see(model, batch)).logits
    supervised = batch.blocks[0][batch.weight[0] > 0]
    for block, question in enumerate(asked, start=1):
        views = batcher.views(stimulus)
        answer = batcher.answer(question, views)
        ids = batcher.prefix(len(views.windows)) + batcher.encode(question.text) + batcher.suffix() + answer
        with torch.no_grad():
            alone = model(input_ids=torch.tensor([ids]), pixel_values=batch.pixels).logits[0, -len(answer) - 1 :]
        torch.testing.assert_close(packed[supervised == block], alone, atol=2e-3, rtol=0)
        assert batch.target[0][(batch.blocks[0] == block) & (batch.weight[0] > 0)].tolist() == [*answer, batcher.tokenizer.eos_token_id]


def test_a_question_does_not_see_another() -> None:
    mask = attention_mask(torch.tensor([[0, 0, 1, 1, 2, -1]]))[0, 0]
    assert mask.tolist()[4] == [True, True, False, False, True, False]
    assert mask.tolist()[3] == [True, True, True, True, False, False]
    assert mask.tolist()[0] == [True] + 5 * [False]


def test_boxes_survive_their_tokens() -> None:
    frame = (0.0, -8.0, 64.0, 56.0)
    box = (3.0, 10.0, 17.0, 24.0)
    assert box_tokens(box, frame) == ["<loc03>", "<loc18>", "<loc17>", "<loc32>"]
    boxes = BinTokens(bins=65, prefixes=("<loc",) * 4, frame="padded_square", anchor="edge", digits=2)
    assert boxes.parse(" ".join(box_tokens(box, frame)), (48, 64)) == box
    assert vocabulary.coordinate(-0.2) == "<loc00>"
    assert vocabulary.coordinate(1.2) == "<loc64>"


@pytest.mark.parametrize("name", sorted(RECIPES))
def test_helper_targets_describe_the_pixels(name: str) -> None:
    batcher = Batcher(RECIPES[name], seed=6)
    grid, covered = batcher.recipe.sizes.grid, 0
    for index in range(6):
        stimulus, asked = batcher.scene(index, batcher.recipe.layouts[0])
        batch, views = batcher.pack([(stimulus, asked)]), batcher.views(stimulus)
        for number, (x0, y0, x1, y1) in enumerate(views.windows):
            for row, column in np.ndindex(grid, grid):
                x, y = x0 + (column + 0.5) * (x1 - x0) / grid, y0 + (row + 0.5) * (y1 - y0) / grid
                wide, high = (x1 - x0) / grid, (y1 - y0) / grid
                near = [o for o in stimulus.objects if meets(o.box, (x - wide / 2, y - high / 2, x + wide / 2, y + high / 2))]
                here = number * grid * grid + row * grid + column
                if len(near) != 1 or not batch.owned[0, here]:
                    assert near or not batch.owned[0, here]
                    continue
                covered += 1
                local = torch.tensor(relative_box(near[0].box, (x0, y0, x1, y1))).clamp(0, 1)
                assert batch.label[0, here] == LABELS[near[0].label]
                torch.testing.assert_close(batch.box[0, here], local, atol=1e-6, rtol=0)
                torch.testing.assert_close(batch.frame_box[0, here], torch.tensor(relative_box(near[0].box, views.frame)))
    assert covered > 50


def meets(one: tuple[float, float, float, float], other: tuple[float, float, float, float]) -> bool:
    return one[0] < other[2] and other[0] < one[2] and one[1] < other[3] and other[1] < one[3]


@pytest.mark.parametrize("name", sorted(RECIPES))
def test_every_centre_is_marked_once_in_the_overview(name: str) -> None:
    batcher = Batcher(RECIPES[name], seed=7)
    grid = batcher.recipe.sizes.grid
    for index in range(6):
        stimulus, asked = batcher.scene(index, batcher.recipe.layouts[0])
        batch, frame = batcher.pack([(stimulus, asked)]), batcher.views(stimulus).frame
        overview = batch.centre[0, -grid * grid :].unflatten(0, (grid, grid))
        expected = torch.zeros_like(overview)
        for item in stimulus.objects:
            x0, y0, x1, y1 = relative_box(item.box, frame)
            expected[int((y0 + y1) / 2 * grid), int((x0 + x1) / 2 * grid), LABELS[item.label]] = 1
        assert torch.equal(overview, expected)


@pytest.mark.parametrize("name", sorted(RECIPES))
def test_the_noun_of_each_question_is_found_and_described(name: str) -> None:
    batcher = Batcher(RECIPES[name], seed=8)
    stimulus, asked = batcher.scene(3, batcher.recipe.layouts[0])
    batch, frame = batcher.pack([(stimulus, asked)]), batcher.views(stimulus).frame
    for k, question in enumerate(asked):
        noun = batcher.tokenizer.convert_ids_to_tokens(int(batch.ids[0, batch.asked.place[k]]))
        assert noun == question.text.split()[-2]
        if question.kind == "counting":
            assert batch.asked.number[k] == question.number
        if question.kind == "existence":
            assert (batch.asked.number[k] > 0) == (question.answer == "yes")
        if question.box is not None:
            assert batch.asked.number[k] == 1
            torch.testing.assert_close(batch.asked.box[k], torch.tensor(relative_box(question.box, frame)))
