"""Mediation and cumulative ablation of heads, on a circuit that is known and against runs by hand."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image
from tests.conftest import hooked
from tests.tiny import VARIANTS

from sightlens.errors import MetricError, StudyError
from sightlens.experiments import (
    AnswerLikelihood,
    HeadMediation,
    ablate_cumulatively,
    head_curves,
    matched_heads,
    mediate_heads,
    pair_trials,
)
from sightlens.experiments import study as study_module
from sightlens.experiments.mediation import PatchedLikelihood
from sightlens.interventions import PatchIn
from sightlens.model import HookedVLM
from sightlens.stimuli import Pair, Question, Stimulus, edits
from sightlens.zoo import planted

TEMPLATE = (
    "{% for m in messages %}USER: {% for c in m['content'] %}"
    "{% if c['type'] == 'image' %}<image>\n{% else %}{{ c['text'] }}{% endif %}{% endfor %}{% endfor %} ASSISTANT:"
)
PLANTED = planted.PlantedCircuit().heads


@pytest.fixture(scope="module")
def circuit():
    built = planted.build()
    built.processor.tokenizer.chat_template = TEMPLATE
    return HookedVLM.from_hf(built.model, built.processor)


def planted_pairs():
    side = planted.GRID * planted.PATCH
    black = Image.new("RGB", (side, side))
    cells = list(np.ndindex(planted.GRID, planted.GRID))[::3]
    return [
        Pair(
            Stimulus(f"white-{row}{column}", planted.picture(row, column)),
            Stimulus("black", black),
            "remove",
            np.asarray(planted.picture(row, column)).any(-1),
            questions=(Question("classification", "where ?", planted.answer(row, column)),),
        )
        for row, column in cells
    ]


def area_under_roc(fractions):
    """Share of pairs of a planted head and another one in which the planted one has the larger fraction."""
    planted_heads = np.zeros(fractions.shape, dtype=bool)
    planted_heads[tuple(zip(*PLANTED, strict=True))] = True
    return (fractions[planted_heads][:, None] > fractions[~planted_heads]).mean()


@pytest.mark.parametrize("score", ["ppl", "nll"])
@pytest.mark.parametrize("aggregate", ["mean_of_ratios", "ratio_of_means"])
def test_mediation_ranks_the_planted_heads_first(circuit, score, aggregate):
    outcome = mediate_heads(circuit, planted_pairs(), task="classification").run(circuit, progress=False)
    found = HeadMediation.of(outcome, score=score, aggregate=aggregate)
    assert area_under_roc(found.average.fraction) == 1.0
    assert set(found.ranking()[:3]) == set(PLANTED)
    assert set(found.near_zero()[-3:]) == set(PLANTED)
    assert all(area_under_roc(pair) == 1.0 for pair in found.fractions)
    assert min(found.average.fraction[head] for head in PLANTED) > 0.9
    assert (found.average.used, found.average.excluded) == (len(planted_pairs()), 0)


def test_positions_decide_which_heads_mediate(circuit):
    study = mediate_heads(circuit, planted_pairs(), task="classification", positions="last")
    found = HeadMediation.of(study.run(circuit, progress=False))
    assert set(found.ranking()[:2]) == {planted.PlantedCircuit().routing, planted.PlantedCircuit().readout}
    assert abs(found.average.fraction[planted.PlantedCircuit().grounding]) < 0.1


@pytest.mark.parametrize("variant", [VARIANTS[0], VARIANTS[4]], ids=str)
def test_scores_are_those_of_patching_by_hand_whatever_the_batch(variant):
    vlm, pairs = hooked(variant), edits.pairs(2, seed=4)
    study = mediate_heads(vlm, pairs)
    one, many = (study.run(vlm, batch_size=size, progress=False) for size in (1, 2))
    for a, b in zip(one.records, many.records, strict=True):
        assert np.allclose(a.values["nll"], b.values["nll"], atol=1e-4)
    for index, trial in enumerate(study.trials):
        clean = study.measure.clean[trial.id]
        source, base = (
            vlm.with_answers(vlm.prepare(t.image, t.question.text).with_objects(t.mask), t.answer(vlm.box_format)) for t in (clean, trial)
        )
        with torch.no_grad():
            logits, cache = vlm.run_with_cache(source)
            patch = PatchIn("blocks.1.attn.hook_z", at="all", heads=(2,))
            patched = vlm(base, interventions=[patch], donors={"clean": cache})
            runs = {("source", -1, -1): logits, ("base", -1, -1): vlm(base), ("patched", 1, 2): patched}
        for (run, layer, head), found in runs.items():
            record = many.where({"run": run, "layer": layer, "head": head}).records[0]
            assert record.values["nll"][index] == pytest.approx(by_hand(vlm, base, found), abs=1e-4)
            assert record.values["ppl"][index] == pytest.approx(np.exp(record.values["nll"][index]))


def by_hand(vlm, prompt, logits):
    ids = prompt.tensors["input_ids"][0]
    places = prompt.layout.select("answer").positions.tolist()
    format_tokens = vlm.box_format.format_mask([vlm.tokenizer.decode([int(ids[p])]) for p in places])
    kept = [p for p, skip in zip(places, format_tokens, strict=True) if not skip]
    return -np.mean([float(logits[0, p - 1].log_softmax(-1)[ids[p]]) for p in kept])


def test_pairs_without_a_gap_are_left_out_and_counted(circuit):
    pairs = planted_pairs()
    same = replace(pairs[0], corrupted=pairs[0].clean)
    study = mediate_heads(circuit, [same, *pairs[1:3]], task="classification")
    outcome = study.run(circuit, progress=False)
    found = HeadMediation.of(outcome, min_gap=0.01)
    assert (found.average.used, found.average.excluded) == (2, 1)
    assert np.isnan(found.fractions[0]).all()
    assert not np.isnan(found.fractions[1:]).any()
    assert found.pairs == tuple(trial.id for trial in study.trials)
    with pytest.raises(MetricError, match="base - source"):
        HeadMediation.of(outcome, min_gap=1e9)


def test_a_stopped_mediation_goes_on(circuit, tmp_path, monkeypatch):
    study = mediate_heads(circuit, planted_pairs()[:3], task="classification")
    whole, original, seen = study.run(circuit, progress=False), PatchedLikelihood.measure, []

    def counted(self, engine, prompt, trials, cells):
        for cell, numbers in original(self, engine, prompt, trials, cells):
            if len(seen) == 25:
                raise KeyboardInterrupt
            seen.append(cell)
            yield cell, numbers

    monkeypatch.setattr(study_module, "FLUSH_SECONDS", 0.0)
    with monkeypatch.context() as patch:
        patch.setattr(PatchedLikelihood, "measure", counted)
        with pytest.raises(KeyboardInterrupt):
            study.run(circuit, store=tmp_path, batch_size=1, progress=False)
    rest = study.run(circuit, store=tmp_path, batch_size=1, progress=False)
    assert np.allclose(HeadMediation.of(rest).fractions, HeadMediation.of(whole).fractions, atol=1e-4)


def test_pictures_of_different_layouts_are_refused(circuit):
    vlm, pair = hooked(VARIANTS[4]), planted_pairs()[0]
    other = replace(pair.corrupted, image=Image.new("RGB", (128, 32)))
    question = Question("existence", "is there a red star ?", "yes")
    wrong = replace(pair, corrupted=other, questions=(question,))
    with pytest.raises(StudyError, match="one size"):
        mediate_heads(vlm, [wrong], task="existence").run(vlm, progress=False)
    with pytest.raises(StudyError, match="task"):
        mediate_heads(circuit, planted_pairs(), task="counting")


def test_ablating_the_planted_heads_first_has_the_smallest_area(circuit):
    pairs = planted_pairs()
    mediated = HeadMediation.of(mediate_heads(circuit, pairs, task="classification").run(circuit, progress=False))
    orders = {"mediation": mediated.ranking(), "near_zero": mediated.near_zero()}
    study = ablate_cumulatively(pair_trials(pairs), orders, fractions=(0.01, 0.07, 0.2, 0.4, 0.8), seeds=(0, 1))
    outcome = study.run(circuit, progress=False)
    curves = head_curves(outcome, metric="correct")
    assert curves["mediation"].x == (0.0, 1 / 16, 3 / 16, 6 / 16, 13 / 16)
    assert curves["mediation"].y[0] == 1.0
    assert max(curves["mediation"].y[1:]) <= 1 / 6  # without the circuit every picture gets the same answer, right for one of six
    assert curves["near_zero"].y == (1.0, 1.0, 1.0, 1.0, 1.0)
    assert curves["mediation"].nauc < curves["random(mediation)"].nauc < curves["near_zero"].nauc
    likely = head_curves(study.measured_by(AnswerLikelihood()).run(circuit, progress=False), metric="perplexity")
    assert likely["mediation"].nauc > 2 * likely["near_zero"].nauc


def test_random_heads_are_of_the_same_layers_and_others_while_there_are():
    order = tuple((layer, head) for head in (3, 1, 0, 2) for layer in (2, 0, 1))
    for count in range(1, 13):
        for seed in (0, 1):
            drawn = matched_heads(order, count, seed=seed)
            assert len(set(drawn)) == count
            assert sorted(layer for layer, _ in drawn) == sorted(layer for layer, _ in order[:count])
            assert set(drawn).isdisjoint(order[:count]) == (count <= 6)
    assert matched_heads(order, 3, seed=0) != matched_heads(order, 3, seed=1)


def test_malformed_orders_are_refused(circuit):
    asked, heads = pair_trials(planted_pairs()), tuple(np.ndindex(4, 4))
    for orders, fractions, words in (
        ({}, (0.5,), "order"),
        ({"a": heads, "b": heads[1:]}, (0.5,), "same heads"),
        ({"a": (*heads[1:], heads[1])}, (0.5,), "same heads"),
        ({"a": heads}, (0.01,), "fractions"),
        ({"a": heads}, (1.5,), "fractions"),
    ):
        with pytest.raises(StudyError, match=words):
            ablate_cumulatively(asked, orders, fractions=fractions)
