"""The shipped folders load with plain transformers, are small, and answer held-out scenes."""

import json

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForImageTextToText, AutoTokenizer

from sightlens.stimuli.stimulus import Question
from sightlens.zoo import evaluate
from sightlens.zoo.answers import generate, load_checkpoint
from sightlens.zoo.batches import Batcher
from sightlens.zoo.evaluate import FOLDERS, Bars, Outcome, ask, grade, held_out, outcome, score
from sightlens.zoo.recipe import HELD_OUT_SEED, RECIPES, TRAINING_SEED

NAMES = sorted(RECIPES)
LOWER = Bars(
    loc=0.70,
    iou=0.80,
    counting_to_6=0.90,
    existence_yes=0.95,
    existence_colour=0.90,
    existence_shape=0.90,
    existence_crossed=0.90,
)


@pytest.mark.parametrize("name", NAMES)
def test_every_weight_is_loaded(name: str) -> None:
    model = AutoModelForImageTextToText.from_pretrained(FOLDERS[name])
    stored = load_file(FOLDERS[name] / "model.safetensors")
    assert model.dtype == torch.float32
    assert set(stored) == set(model.state_dict())
    for key, value in model.state_dict().items():
        assert torch.equal(value, stored[key].float())


@pytest.mark.parametrize("name", NAMES)
def test_the_folder_is_small_and_complete(name: str) -> None:
    files = {path.name: path.stat().st_size for path in FOLDERS[name].iterdir()}
    assert sum(files.values()) <= 4 * 2**20
    assert files.keys() >= {
        "README.md",
        "chat_template.jinja",
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "preprocessor_config.json",
        "processor_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
    }


@pytest.mark.parametrize("name", NAMES)
def test_ids_agree_between_files(name: str) -> None:
    config = json.loads((FOLDERS[name] / "config.json").read_text())
    tokenizer = AutoTokenizer.from_pretrained(FOLDERS[name])
    placeholder = tokenizer.image_token if name == "llava" else tokenizer.context_image_token
    assert config.get("image_token_index", config.get("image_token_id")) == tokenizer.convert_tokens_to_ids(placeholder)
    assert config["text_config"]["vocab_size"] == len(tokenizer)
    assert config["text_config"]["eos_token_id"] == tokenizer.eos_token_id


@pytest.mark.parametrize("name", NAMES)
def test_the_shipped_model_answers_held_out_scenes(name: str) -> None:
    scores = score(ask(load_checkpoint(FOLDERS[name]), 40))
    assert LOWER.missed(scores) == []


def test_small_objects_need_the_tiles() -> None:
    checkpoint = load_checkpoint(FOLDERS["internvl"])
    posed = [entry for entry in held_out(checkpoint, 60, seed=HELD_OUT_SEED) if entry.views == 5 and entry.question.kind == "localization"]
    images, texts = [entry.stimulus.image for entry in posed], [entry.question.text for entry in posed]

    def iou() -> float:
        return score([outcome(entry, said) for entry, said in zip(posed, generate(checkpoint, images, texts), strict=True)])["iou_small"]

    def blur_tiles(module: torch.nn.Module, given: tuple, output: torch.Tensor) -> torch.Tensor:
        views = output.unflatten(0, (-1, 5)).clone()
        views[:, :4] = output.mean((0, 1))
        return views.flatten(0, 1)

    whole = iou()
    handle = checkpoint.model.model.multi_modal_projector.register_forward_hook(blur_tiles)
    without = iou()
    handle.remove()
    assert whole - without > 0.2


def test_the_files_were_measured_on_scenes_training_never_drew() -> None:
    held = Batcher(RECIPES["llava"], seed=HELD_OUT_SEED)
    trained = Batcher(RECIPES["llava"], seed=TRAINING_SEED)
    layout = RECIPES["llava"].layouts[0]
    assert held.scene(0, layout)[0].id != trained.scene(0, layout)[0].id
    assert HELD_OUT_SEED != TRAINING_SEED


def test_grades() -> None:
    frame = (0.0, 0.0, 64.0, 64.0)
    where = Question("localization", "where is the red circle ?", "", target=0, box=(8.0, 8.0, 24.0, 24.0))
    assert grade(where, "<loc08> <loc08> <loc24> <loc24>", frame) == 1.0
    assert grade(where, "<loc08> <loc08> <loc24> <loc16>", frame) == pytest.approx(0.5)
    assert grade(where, "<loc24> <loc24> <loc08> <loc08>", frame) == 0.0
    assert grade(where, "no", frame) == 0.0
    count = Question("counting", "how many objects ?", "3", number=3)
    assert (grade(count, "3", frame), grade(count, "2", frame)) == (1.0, 0.0)


def test_scores_by_group() -> None:
    where = Question("localization", "where is the red circle ?", "", target=0, box=(0.0, 0.0, 1.0, 1.0))
    absent = Question("existence", "is there a red circle ?", "no", negative="crossed")
    many = Question("counting", "how many objects ?", "7", number=7)
    outcomes = [
        Outcome(where, "", 0.8, "small", 1),
        Outcome(where, "", 0.4, "large", 1),
        Outcome(absent, "no", 1.0, None, 1),
        Outcome(absent, "yes", 0.0, None, 1),
        Outcome(many, "7", 1.0, None, 1),
    ]
    scores = score(outcomes)
    assert scores["iou"] == pytest.approx(0.6)
    assert scores["loc"] == pytest.approx((2 / 3 + 0) / 2)
    assert scores["loc_small"] == pytest.approx(2 / 3)
    assert scores["existence_crossed"] == 0.5
    assert scores["counting_7"] == 1.0
    assert "counting_to_6" not in scores


def test_check_fails_below_a_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    def answers(*_: object, **__: object) -> list[Outcome]:
        return [Outcome(Question("counting", "how many objects ?", "3", number=3), "2", 0.0, None, 1)]

    monkeypatch.setattr(evaluate, "ask", answers)
    assert evaluate.main(["--model", "llava", "--check"]) == 1
    assert evaluate.main(["--model", "llava"]) == 0
    perfect = dict.fromkeys(vars(Bars()), 1.0)
    assert Bars().missed(perfect) == []
    assert Bars().missed({**perfect, "iou": 0.5}) == ["iou 0.500 < 0.8"]
