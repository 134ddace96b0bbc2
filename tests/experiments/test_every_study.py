"""What holds of every study: the batch does not matter, and a store belongs to one model, one layout and one study."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image
from tests.conftest import hooked, picture
from tests.tiny import VARIANTS, image_processor
from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil

from sightlens import experiments
from sightlens.errors import LayoutError, StoreError
from sightlens.experiments import (
    GeneratedAnswer,
    GrownTruth,
    Study,
    Trial,
    ablate_cumulatively,
    ablate_tokens,
    ablate_views,
    containerize_objects,
    knockout_heads,
    knockout_windows,
    mediate_heads,
    pair_trials,
    shuffle_tokens,
    token_effects,
)
from sightlens.model import HookedVLM
from sightlens.model.loading import processing_for
from sightlens.stimuli import Pair, Question, SceneObject, Stimulus

MODELS = [VARIANTS[0], VARIANTS[4]]


def pairs() -> list[Pair]:
    """Two pictures of different sizes with an object, and without."""
    made = []
    for k, (height, width) in enumerate(((48, 64), (40, 96))):
        mask = np.zeros((height, width), dtype=bool)
        mask[8:28, 10:30] = True
        box = (10.0, 8.0, 30.0, 28.0)
        clean, gone = picture(height, width, k), picture(height, width, k)
        gone[mask] = 128
        item = SceneObject("red circle", box, mask)
        questions = (
            Question("localization", "where is the red circle ?", "", target=0, box=box),
            Question("existence", "is there a red circle ?", "yes", target=0),
        )
        pictures = Stimulus(f"{k}", Image.fromarray(clean), (item,)), Stimulus(f"{k}-gone", Image.fromarray(gone))
        made.append(Pair(*pictures, "remove", mask, (0,), questions))
    return made


def scored(model: HookedVLM, trials: tuple[Trial, ...]) -> list[Trial]:
    """Trials with scores that need no gradients."""
    counts = [len(model.prepare(trial.image, trial.question.text).layout.visual_tokens()) for trial in trials]
    return [replace(trial, scores=tuple(map(float, range(count)))) for trial, count in zip(trials, counts, strict=True)]


ORDER = [(layer, head) for layer in range(3) for head in range(4)]
STUDIES = {
    "ablate_tokens": lambda model, trials: ablate_tokens(trials, paddings=(0, 1), seeds=(0,), value="zero"),
    "selected": lambda model, trials: ablate_tokens(
        scored(model, trials), paddings=(), value="noise", others={"register": "register(0.5)", "top": "top(object)"}
    ),
    "shuffle_tokens": lambda model, trials: shuffle_tokens(trials, seeds=(0,)),
    "containerize_objects": lambda model, trials: containerize_objects(trials, paddings=(0, 1), seeds=1),
    "ablate_views": lambda model, trials: ablate_views(trials, value="zero", seeds=(0,)),
    "knockout_windows": lambda model, trials: knockout_windows(trials, width=2, stride=1),
    "knockout_heads": lambda model, trials: knockout_heads(model, trials, layers=(1,)),
    "mediate_heads": lambda model, trials: mediate_heads(model, pairs()),
    "ablate_cumulatively": lambda model, trials: ablate_cumulatively(trials, {"order": ORDER}, fractions=(0.1, 0.5), seeds=(0,)),
    "token_effects": lambda model, trials: token_effects(trials[0], positions=places(model, trials[0]), value="zero"),
}


def places(model: HookedVLM, trial: Trial) -> list[int]:
    return model.prepare(trial.image, trial.question.text).layout.select("image & row[0]").positions.tolist()


def make(name: str, model: HookedVLM) -> Study:
    """Return a study whose answers are short, since these models never end one."""
    study = STUDIES[name](model, pair_trials(pairs()))
    short = isinstance(study.measure, GeneratedAnswer | GrownTruth)
    return study.measured_by(replace(study.measure, max_new_tokens=6)) if short else study


def test_no_study_is_forgotten():
    """Everything public that returns a study is tried here, under its own name or another."""
    recipes = {name for name in experiments.__all__ if getattr(experiments, name).__annotations__.get("return") in ("Study", Study)}
    assert recipes == set(STUDIES) - {"selected"}


@pytest.mark.parametrize("variant", MODELS, ids=str)
@pytest.mark.parametrize("name", STUDIES)
def test_batch_size_one_and_more_give_the_same_records(name, variant):
    model = hooked(variant)
    one, many = (make(name, model).run(model, batch_size=size, progress=False) for size in (1, 4))
    assert len(one.records) == len(many.records) > 1
    for a, b in zip(one.records, many.records, strict=True):
        assert (dict(a.coordinates), a.examples, a.extras, a.notes) == (dict(b.coordinates), b.examples, b.extras, b.notes)
        for metric, values in a.values.items():
            assert np.allclose(values, b.values[metric], atol=1e-4, rtol=1e-4, equal_nan=True), (a.cell, metric)
    assert one.provenance == many.provenance


@pytest.mark.parametrize("variant", MODELS, ids=str)
@pytest.mark.parametrize("name", STUDIES)
def test_a_store_of_another_model_layout_or_study_is_refused(name, variant, tmp_path):
    model = hooked(variant)
    study = make(name, model)
    short = replace(study, cells=(study.cells if isinstance(study.cells, tuple) else study.cells.expand(3))[:2])
    short.run(model, store=tmp_path, progress=False)
    with pytest.raises(StoreError, match="cells"):
        replace(short, cells=short.cells[:1]).run(model, store=tmp_path, progress=False)
    other = GotOcr2ImageProcessorPil(size={"height": 32, "width": 32}, crop_to_patches=True, min_patches=1, max_patches=2)
    cut = other if variant.family == "internvl" else image_processor(variant, pad=True)
    processing = processing_for(model.hf.config, model.tokenizer, cut)
    with pytest.raises((StoreError, LayoutError), match=r"layout_hash|visual tokens"):  # scores are of one layout, too
        short.run(HookedVLM(model.hf, processing, name=model.name, box_format=model.box_format), store=tmp_path, progress=False)
    short.run(model, store=tmp_path, progress=False)
    with torch.no_grad():
        model.hf.lm_head.weight[0, 0] += 1
    with pytest.raises(StoreError, match="content_hash"):
        short.run(model, store=tmp_path, progress=False)
