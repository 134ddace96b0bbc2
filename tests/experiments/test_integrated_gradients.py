"""Integrated gradients against a loop of one's own, and what they say of shipped models."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image
from tests.conftest import hooked, picture
from tests.tiny import VARIANTS

from sightlens.errors import InterventionError, StoreError, StudyError
from sightlens.experiments import (
    AnswerLikelihood,
    Cell,
    Integration,
    Study,
    Trial,
    ablate_tokens,
    bind_norms,
    integrated_gradients,
    pair_trials,
    register_tokens,
    score_trials,
    scored_trials,
)
from sightlens.interventions import Ablate
from sightlens.model import HookedVLM
from sightlens.stimuli import Question, edits

pytest.importorskip("captum")
WHERE = Question("localization", "where is the red circle ?", "", box=(8.0, 4.0, 40.0, 30.0))


def trial() -> Trial:
    return Trial("one", Image.fromarray(picture()), WHERE)


def likelihood(model, *interventions):
    study = Study("likelihood", (Cell({"at": "here"}, interventions),), (trial(),), AnswerLikelihood())
    return study.run(model, progress=False).records[0].values["logprob"][0]


@pytest.mark.parametrize("channels", ["abs_then_sum", "sum_then_abs"])
def test_scores_equal_a_loop_over_the_full_forward(model, channels):
    one = trial()
    bare = model.prepare(one.image, WHERE.text)
    model.fit_mean([bare, model.prepare(picture(seed=3), WHERE.text)], source="noise")
    found = integrated_gradients(model, one, settings=Integration(steps=5, channels=channels, rows=2))
    taught = model.with_answers(bare, one.answer(model.box_format))
    places = torch.as_tensor(found.positions)
    visual = model.run_with_cache(taught, names_filter="hook_merged_embed")[1]["hook_merged_embed"].detach()[:, places]
    baseline, total = model.donors["mean"].vector.expand_as(visual), torch.zeros_like(visual)
    start, ids = bare.layout.length, taught.tensors["input_ids"][0, bare.layout.length :]
    content = ~torch.as_tensor(model.box_format.format_mask([model.tokenizer.decode([k]) for k in ids.tolist()]))
    for step in range(5):
        point = (baseline + (step + 0.5) / 5 * (visual - baseline)).requires_grad_()

        def put(value, hook, point=point):
            return value.index_copy(1, places, point)

        logits = model.run_with_hooks(taught, fwd_hooks=[("hook_merged_embed", put)])
        logprobs = logits[0, start - 1 : -1].log_softmax(-1).gather(-1, ids[:, None])[:, 0]
        total += torch.autograd.grad(logprobs[content].sum(), point)[0]
    signed = ((visual - baseline) * total / 5)[0].detach()
    expected = signed.abs().sum(-1) if channels == "abs_then_sum" else signed.sum(-1).abs()
    assert np.allclose(found.scores, expected.numpy(), rtol=1e-3, atol=1e-5)
    assert found.value == pytest.approx(likelihood(model), abs=1e-4)
    assert found.baseline == pytest.approx(likelihood(model, Ablate("image", "mean")), abs=1e-4)
    assert found.gap == pytest.approx(float(signed.sum()) - (found.value - found.baseline), abs=1e-3)
    assert found.relative_gap == pytest.approx(abs(found.gap / (found.value - found.baseline)))
    assert all(parameter.grad is None for parameter in model.hf.parameters())


def test_top_tokens_are_a_set_of_the_prompt(model):
    found = integrated_gradients(model, trial(), settings=Integration(steps=2, baseline="zero"))
    order = found.positions[np.argsort(-found.scores)]
    assert found.select(3).positions.tolist() == sorted(order[:3].tolist())
    prompt = model.prepare(trial().image, WHERE.text)
    assert not torch.equal(model(prompt, interventions=[Ablate(found.select(3), "zero")]), model(prompt))
    for count in (0, len(found.scores) + 1):
        with pytest.raises(StudyError, match="tokens"):
            found.select(count)
    with pytest.raises(InterventionError, match="fit_mean"):
        integrated_gradients(model, trial())
    with pytest.raises(StudyError, match="steps"):
        Integration(steps=1)
    deep = hooked(next(variant for variant in VARIANTS if variant.family == "qwen3_vl"))
    with pytest.raises(InterventionError, match="adds it again"):
        integrated_gradients(deep, trial(), settings=Integration(steps=2, baseline="zero"))


@pytest.mark.parametrize("name", ["sightlens/tiny-llava", "sightlens/tiny-internvl"])
def test_on_shipped_models_the_gap_closes_and_the_object_comes_first(name):
    model = HookedVLM.from_pretrained(name)
    hits = chance = objects = 0.0
    gaps = {"few": [], "many": []}
    for one in pair_trials(edits.pairs(4, seed=900_001)):
        found = integrated_gradients(model, one, settings=Integration(steps=40, rows=40))
        inside = found.layout.object(one.mask)
        hits += (found.select(inside.count) & inside).count
        chance += inside.count**2 / len(found.scores)
        objects += inside.count
        gaps["many"].append(found.relative_gap)
        gaps["few"].append(integrated_gradients(model, one, settings=Integration(steps=4)).relative_gap)
    assert hits / objects > 0.5 > 2 * chance / objects
    assert np.median(gaps["many"]) < 0.03
    assert np.median(gaps["many"]) < np.median(gaps["few"])


@torch.no_grad()
def test_register_tokens_are_those_of_unusual_norm(model):
    prompt = model.prepare([picture(), picture(seed=1)], ["is there a star ?", "where is the red circle in the image ?"])
    _, cache = model.run_with_cache(prompt, names_filter="hook_merged_embed")
    for k, (layout, found) in enumerate(zip(prompt.layouts, register_tokens(model, prompt, deviations=1.0), strict=True)):
        places = layout.visual_tokens()["position"]
        norms = cache["hook_merged_embed"][k].norm(dim=-1).numpy()[places]
        expected = places[norms > norms.mean() + norms.std(ddof=1)]
        assert len(expected)
        assert found.positions.tolist() == expected.tolist()


def test_a_study_intervenes_on_register_and_on_scored_tokens_whatever_the_batch(model):
    kinds = [
        (Question("existence", text, "yes"), size) for text, size in (("is there a star ?", (48, 64)), ("is there a circle ?", (32, 32)))
    ]
    asked = []
    for k, (question, size) in enumerate(kinds):
        mask = np.zeros(size, dtype=bool)
        mask[4:20, 4:20] = True
        asked.append(Trial(f"{k}", Image.fromarray(picture(*size, seed=k)), question, mask))
    asked = score_trials(model, asked, settings=Integration(steps=2, baseline="zero")).trials
    chosen = {"register": "register(0.5)", "integrated_gradients": "top(object)"}
    study = ablate_tokens(asked, paddings=(), others=chosen, value="zero").measured_by(AnswerLikelihood())
    assert [cell.coordinates["condition"] for cell in study.cells] == ["none", *chosen]
    one, both = (study.run(model, batch_size=size, progress=False) for size in (1, 2))
    for a, b in zip(one.records, both.records, strict=True):
        assert np.allclose(a.values["logprob"], b.values["logprob"], atol=1e-4)
    for k, trial_ in enumerate(asked):
        prompt = bind_norms(model, model.prepare(trial_.image, trial_.question.text).with_objects(trial_.mask))
        count = prompt.layout.select("object").count
        scored = integrated_gradients(model, trial_, settings=Integration(steps=2, baseline="zero")).select(count)
        sets = {"none": None, "register": register_tokens(model, prompt, deviations=0.5)[0], "integrated_gradients": scored}
        for record in both.records:
            tokens = sets[record.coordinates["condition"]]
            do = [] if tokens is None else [Ablate(f"position[{p}]", "zero") for p in tokens.positions]
            taught = model.with_answers(model.prepare(trial_.image, trial_.question.text), "yes")
            with torch.no_grad():
                logits = model(taught, interventions=do)
            by_hand = float(logits[0, -2].log_softmax(-1)[taught.tensors["input_ids"][0, -1]])
            assert record.values["logprob"][k] == pytest.approx(by_hand, abs=1e-4), record.coordinates
    assert len({record.values["logprob"] for record in both.records}) == 3


def test_scores_are_kept_and_belong_to_their_model(model, tmp_path, monkeypatch):
    asked, settings = (trial(), replace(trial(), id="two")), Integration(steps=2, baseline="zero")
    first = score_trials(model, asked[:1], settings=settings).trials[0].scores
    whole = score_trials(model, asked, settings=settings, store=tmp_path)
    assert (whole.trials[0].scores, whole.trials[1].scores) == (first, first)
    assert whole.result.records[0].values["relative_gap"][0] == integrated_gradients(model, asked[0], settings=settings).relative_gap

    def never(*args, **kwargs):
        raise AssertionError("computed again")

    monkeypatch.setattr(scored_trials, "integrated_gradients", never)
    again = score_trials(model, asked, settings=settings, store=tmp_path)
    assert [one.scores for one in again.trials] == [one.scores for one in whole.trials]
    for trials, changed in ((asked[:1], settings), (asked, Integration(steps=3, baseline="zero"))):
        with pytest.raises(StoreError, match=r"trials|settings"):
            score_trials(model, trials, settings=changed, store=tmp_path)
    with torch.no_grad():
        model.hf.lm_head.weight[0, 0] += 1
    with pytest.raises(StoreError, match="content_hash"):
        score_trials(model, asked, settings=settings, store=tmp_path)
