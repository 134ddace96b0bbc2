"""The shipped folders load with plain transformers, are small, and answer held-out scenes."""

import json

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForImageTextToText, AutoTokenizer

from sightlens.experiments import Cell, Study
from sightlens.interventions import Ablate
from sightlens.model import HookedVLM
from sightlens.stimuli import Question
from sightlens.zoo import evaluate
from sightlens.zoo.batches import Batcher
from sightlens.zoo.evaluate import FOLDERS, Bars, Outcome, ask, held_out, score
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
    scores = score(ask(HookedVLM.from_pretrained(FOLDERS[name], check=False), 40))
    assert LOWER.missed(scores) == []


def test_small_objects_need_the_tiles() -> None:
    posed = [entry for entry in held_out("internvl", 90, seed=HELD_OUT_SEED) if entry.views == 5 and entry.size in ("small", "large")]
    trials = tuple(entry.trial for entry in posed if entry.trial.question.kind == "localization")
    sizes = {entry.trial.id: entry.size for entry in posed}
    cells = (Cell({"tiles": "kept"}), Cell({"tiles": "ablated"}, (Ablate("tile[*]", "mean"),)))
    model = HookedVLM.from_pretrained(FOLDERS["internvl"], check=False)
    mean = {}
    for record in Study("tiles", cells, trials).run(model, progress=False, batch_size=64).records:
        for size in ("small", "large"):
            values = [v for name, v in zip(record.examples, record.values["iou"], strict=True) if sizes[name] == size]
            assert len(values) >= 8
            mean[record.coordinates["tiles"], size] = sum(values) / len(values)
    assert mean["kept", "small"] > 0.75
    assert mean["ablated", "small"] < mean["kept", "small"] - 0.3
    assert mean["kept", "large"] > 0.85


def test_the_files_were_measured_on_scenes_training_never_drew() -> None:
    held = Batcher(RECIPES["llava"], seed=HELD_OUT_SEED)
    trained = Batcher(RECIPES["llava"], seed=TRAINING_SEED)
    layout = RECIPES["llava"].layouts[0]
    assert held.scene(0, layout)[0].id != trained.scene(0, layout)[0].id
    assert HELD_OUT_SEED != TRAINING_SEED


def test_scores_by_group() -> None:
    where = Question("localization", "where is the red circle ?", "", target=0, box=(0.0, 0.0, 1.0, 1.0))
    absent = Question("existence", "is there a red circle ?", "no", negative="crossed")
    many = Question("counting", "how many objects ?", "7", number=7)
    outcomes = [
        Outcome(where, 0.8, "small", 1),
        Outcome(where, 0.4, "large", 1),
        Outcome(absent, 1.0, None, 1),
        Outcome(absent, 0.0, None, 1),
        Outcome(many, 1.0, None, 1),
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
        return [Outcome(Question("counting", "how many objects ?", "3", number=3), 0.0, None, 1)]

    monkeypatch.setattr(evaluate, "ask", answers)
    assert evaluate.main(["--model", "llava", "--check"]) == 1
    assert evaluate.main(["--model", "llava"]) == 0
    perfect = dict.fromkeys(vars(Bars()), 1.0)
    assert Bars().missed(perfect) == []
    assert Bars().missed({**perfect, "iou": 0.5}) == ["iou 0.500 < 0.8"]
