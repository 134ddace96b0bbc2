"""Studies: what a cell measures, how it resumes, and what it refuses."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image
from tests.conftest import hooked, picture
from tests.tiny import VARIANTS

from sightlens.errors import StoreError, StudyError
from sightlens.experiments import (
    AnswerLikelihood,
    Cell,
    Study,
    Trial,
    ablate_tokens,
    knockout_windows,
    layer_windows,
    make_trials,
    pair_trials,
    token_effects,
)
from sightlens.experiments import study as study_module
from sightlens.interventions import Ablate, Knockout
from sightlens.stimuli import Question, edits, questions, shapes


def trials(count=3, size=(48, 64)):
    made = []
    for k in range(count):
        mask = np.zeros(size, dtype=bool)
        mask[8 : 20 + k, 10:30] = True
        box = (10.0, 8.0, 30.0, 20.0 + k)
        where = Question("localization", "where is the red circle ?", "", target=0, box=box)
        kinds = [where, Question("existence", "is there a red star ?", "yes")]
        made += [Trial(f"{k}-{q.kind}", Image.fromarray(picture(*size, seed=k)), q, mask) for q in kinds]
    return tuple(made)


def vectors(records):
    return {(r.cell, name): np.array(values) for r in records for name, values in r.values.items()}


CELLS = (
    Cell({"what": "none"}),
    Cell({"what": "object"}, (Ablate("object", "zero"),)),
    Cell({"what": "cut"}, (Knockout("post_image", "object", layers=(1,)),)),
)


@pytest.fixture(params=[VARIANTS[0], VARIANTS[4]], ids=str)
def vlm(request):
    return hooked(request.param)


def test_values_are_those_of_running_each_trial_by_hand(vlm):
    asked = trials()
    result = Study("s", CELLS, asked, AnswerLikelihood()).run(vlm, progress=False)
    for record, cell in zip(result.records, CELLS, strict=True):
        for trial, logprob in zip(asked, record.values["logprob"], strict=True):
            prompt = vlm.prepare(trial.image, trial.question.text).with_objects(trial.mask)
            answer = trial.answer(vlm.box_format)
            ids = vlm.tokenizer(answer, add_special_tokens=False)["input_ids"]
            with torch.no_grad():
                logits = vlm(vlm.with_answers(prompt, answer), interventions=cell.interventions)
            start = prompt.layout.length
            each = [float(logits[0, start - 1 + t].log_softmax(-1)[token]) for t, token in enumerate(ids)]
            keep = [True] * len(ids)
            if trial.question.kind == "localization":
                keep = [not flag for flag in vlm.box_format.format_mask([vlm.tokenizer.decode([i]) for i in ids])]
            assert logprob == pytest.approx(sum(x for x, kept in zip(each, keep, strict=True) if kept), abs=1e-4)


def test_batch_size_does_not_change_the_records(vlm):
    runs = [Study("s", CELLS, trials()).run(vlm, batch_size=size, progress=False) for size in (1, 2, 16)]
    assert len({tuple(record.notes[k]["text"] for record in run.records for k in range(6)) for run in runs}) == 1
    first, *others = (vectors(run.records) for run in runs)
    for other in others:
        assert all(np.array_equal(first[key], other[key], equal_nan=True) for key in first)
    assert len({run.provenance[0].layout_hash for run in runs}) == 1


@pytest.mark.parametrize("flush", [0.0, 1e9])
def test_a_stopped_study_goes_on_and_repeats_nothing(vlm, tmp_path, monkeypatch, flush):
    study = Study("s", CELLS, trials(2), AnswerLikelihood())
    whole = study.run(vlm, progress=False)
    measured, original = [], AnswerLikelihood.measure

    def counted(self, engine, prompt, asked, cells):
        for cell, numbers in original(self, engine, prompt, asked, cells):
            if len(measured) == 4 and not again:
                raise KeyboardInterrupt
            measured.append((str(cells[cell].interventions), *(asked[k].id for k in cells[cell].trials)))
            yield cell, numbers

    again = False
    monkeypatch.setattr(AnswerLikelihood, "measure", counted)
    monkeypatch.setattr(study_module, "FLUSH_SECONDS", flush)
    with pytest.raises(KeyboardInterrupt):
        study.run(vlm, store=tmp_path / "run", progress=False, batch_size=1)
    again = True
    rest = study.run(vlm, store=tmp_path / "run", progress=False, batch_size=1)
    assert len(measured) == len(set(measured)) == 12  # three cells on four trials, each once
    assert vectors(rest.records).keys() == vectors(whole.records).keys()
    assert all(np.allclose(value, vectors(rest.records)[key], atol=1e-5) for key, value in vectors(whole.records).items())
    assert [record.examples for record in rest.records] == [record.examples for record in whole.records]
    study.run(vlm, store=tmp_path / "run", progress=False)
    assert len(measured) == 12


def test_another_model_or_study_is_refused_by_the_store(vlm, tmp_path):
    study = Study("s", CELLS[:1], trials(1), AnswerLikelihood())
    study.run(vlm, store=tmp_path / "run", progress=False)
    other = hooked(VARIANTS[0] if "llava" not in vlm.processing.family.name else VARIANTS[1])
    for wrong, model in ((study, other), (Study("s", CELLS[:2], trials(1), AnswerLikelihood()), vlm)):
        with pytest.raises(StoreError):
            wrong.run(model, store=tmp_path / "run", progress=False)
    with torch.no_grad():
        vlm.hf.lm_head.weight[0, 0] += 1
    with pytest.raises(StoreError, match="content_hash"):
        study.run(vlm, store=tmp_path / "run", progress=False)


def test_trials_on_which_nothing_is_selected_are_kept_as_missing(vlm):
    asked = trials(2)
    cells = (Cell({"p": 0}), Cell({"p": -5}, (Ablate("object.erode(5)", "zero"),)))
    result = Study("s", cells, asked, AnswerLikelihood()).run(vlm, progress=False)
    assert not any(math.isnan(v) for v in result.records[0].values["logprob"])
    assert all(math.isnan(v) for v in result.records[1].values["logprob"])
    assert "selects nothing" in result.records[1].notes[0]["left_out"]
    summary = result.summary()
    assert summary[(summary["p"] == -5)]["missing"].tolist() == [4, 4]


def test_recipes_have_the_cells_of_the_paper():
    asked = trials(1)
    ablation = ablate_tokens(asked, paddings=(-1, 0, 2), seeds=(0, 1))
    assert len(ablation.cells) == 1 + 3 * (1 + 2 * 2)
    assert str(ablation.cells[-1].interventions[0].at) == "translate(object.dilate(2), 1)"
    assert layer_windows(6, width=4, stride=4) == ((0, 1, 2, 3), (4, 5))
    assert layer_windows(5, width=2, stride=1) == ((0, 1), (1, 2), (2, 3), (3, 4))
    cells = knockout_windows(asked, width=2).cells.expand(5)
    assert [cell.coordinates["layers"] for cell in cells] == ["none", *["0–1", "2–3", "4–4", "all"] * 3]
    assert cells[-1].interventions[0].layers == (0, 1, 2, 3, 4)
    assert {cell.coordinates["keys"] for cell in cells} == {"none", "object", "random(object, 0)", "translate(object, 0)"}
    effects = token_effects(asked[0], positions=[3, 4])
    assert [str(cell.interventions[0].at) for cell in effects.cells[1:]] == ["position[3]", "position[4]"]


def test_drawn_pairs_become_trials_with_masks():
    pairs = edits.pairs(3, seed=5)
    asked = pair_trials(pairs)
    assert {trial.question.kind for trial in asked} == {"existence", "localization"}
    assert all(trial.mask.any() for trial in asked)
    stimulus = shapes.draw(shapes.compose(5, 1))
    assert make_trials(stimulus, [questions.counting(stimulus)])[0].mask is None


def test_malformed_studies_are_refused(vlm):
    asked = trials(1)
    for make, words in (
        (lambda: Study("s", (), asked), "at least one cell"),
        (lambda: Study("s", CELLS, ()), "at least one trial"),
        (lambda: Study("s", CELLS, (*asked, asked[0])), "different ids"),
        (lambda: Study("s", (CELLS[0], Cell({"other": 1})), asked), "same axes"),
        (lambda: Study("s", (CELLS[0], CELLS[0]), asked), "different coordinates"),
        (lambda: layer_windows(4, width=9, stride=1), "width"),
        (lambda: Study("s", CELLS, asked).run(vlm, batch_size=0, progress=False), "batch size"),
        (lambda: Study("s", CELLS, asked).run(vlm, progress=False).plot("nope"), "metric"),
    ):
        with pytest.raises(StudyError, match=words):
            make()


def test_records_carry_their_provenance(vlm):
    record = Study("s", CELLS[1:2], trials(1), AnswerLikelihood()).run(vlm, progress=False).records[0]
    source = json.loads(record.provenance.to_json())
    assert source["dtype"] == "float32"
    assert source["attention"] == "sdpa"
    assert {"torch", "transformers", "transformer-lens"} <= {name for name, _ in source["versions"]}
    assert all(source[field] for field in ("model_id", "content_hash", "layout_hash", "device", "sightlens"))
    assert record.extras["interventions"] == [CELLS[1].interventions[0].to_dict()]


def test_digests_tell_apart_whatever_a_measurement_depends_on():
    image, question = Image.new("P", (4, 4)), Question("counting", "how many ?", "3", number=3)
    image.putpalette([255, 0, 0])
    green = image.copy()
    green.putpalette([0, 255, 0])
    made = [
        Trial("a", image, question),
        Trial("a", green, question),
        Trial("a", image, replace(question, number=4)),
        Trial("a", image, replace(question, kind="classification")),
    ]
    assert len({trial.digest for trial in made}) == 4
    assert Trial("a", image.convert("RGB"), question).digest == made[0].digest


def test_a_counting_trial_needs_its_number():
    with pytest.raises(StudyError, match="number"):
        Trial("a", Image.new("RGB", (4, 4)), Question("counting", "how many ?", "3"))
