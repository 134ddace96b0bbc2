"""Shuffles, containers and head ablations, against closed forms."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from PIL import Image
from tests.conftest import hooked, picture
from tests.tiny import DEFAULT

from sightlens.errors import InterventionError, SelectorError
from sightlens.experiments import AnswerLikelihood, Cell, Study, Trial
from sightlens.interventions import Ablate, AblateHeads, Containerize, Shuffle
from sightlens.model import fit_head_mean
from sightlens.stimuli import Question

QUESTION = "is there a red circle ?"
MERGED = "hook_merged_embed"


def bound(model, image=None, question=QUESTION, *, side=20):
    mask = np.zeros((48, 64), dtype=bool)
    mask[14 : 14 + side, 20 : 20 + side] = True
    return model.prepare(picture() if image is None else image, question).with_objects(mask)


def seen(model, prompt, *interventions, site=MERGED):
    return model.run_with_cache(prompt, names_filter=site, interventions=interventions)[1][site]


@pytest.mark.parametrize("scope", ["selection", "view", "image"])
@torch.no_grad()
def test_shuffle_permutes_within_its_scope_and_its_inverse_undoes_it(any_model, scope):
    prompt = bound(any_model)
    plain, table = seen(any_model, prompt)[0], prompt.layout.visual_tokens()
    shuffle = Shuffle("image", scope=scope, seed=5)
    shuffled = seen(any_model, prompt, shuffle)[0]
    assert not torch.equal(shuffled, plain)
    places = table["position"]
    for group in np.unique(table["view" if scope == "view" else "image"]):
        own = places[table["view" if scope == "view" else "image"] == group]
        assert torch.equal(shuffled[own].sum(-1).sort().values, plain[own].sum(-1).sort().values)
    moves, view = shuffle.moves(prompt.layout), dict(zip(places.tolist(), table["view"].tolist(), strict=True))
    crossing = [view[t] != view[s] for t, s in zip(moves.targets.tolist(), moves.sources.tolist(), strict=True)]
    assert any(crossing) == (scope != "view" and len(prompt.layout.views) > 1)
    outside = np.setdiff1d(np.arange(len(plain)), places)
    assert torch.equal(shuffled[outside], plain[outside])
    logits = any_model(prompt)
    assert (any_model(prompt, interventions=[shuffle]) - logits).abs().max() > 1e-3
    for there_and_back in ([shuffle, shuffle.inverse()], [shuffle.inverse(), shuffle]):
        assert torch.equal(any_model(prompt, interventions=there_and_back), logits)


@torch.no_grad()
def test_shuffle_moves_what_it_says_and_counts_what_stays(model):
    prompt = bound(model)
    plain = seen(model, prompt)[0]
    for seed in range(6):
        shuffle = Shuffle("object", scope="view", seed=seed)
        moves = shuffle.moves(prompt.layout)
        expected = plain.clone()
        expected[moves.targets] = plain[moves.sources]
        assert torch.equal(seen(model, prompt, shuffle)[0], expected)
        stays = (expected[moves.targets] == plain[moves.targets]).all(-1).double().mean()
        assert shuffle.fixed_points(prompt.layout) == pytest.approx(float(stays))
    assert len({tuple(Shuffle("image", seed=seed).moves(prompt.layout).sources) for seed in range(6)}) == 6


def test_a_shuffle_of_two_tokens_always_swaps_them_and_of_one_is_refused(model):
    layout = bound(model).layout
    two = layout.at(layout.select("image").positions.ravel()[:2])
    for seed in range(8):
        assert Shuffle(two, seed=seed).fixed_points(layout) == 0
    one = layout.at(layout.select("image").positions.ravel()[:1])
    with pytest.raises(SelectorError, match="two or more tokens"):
        Shuffle(one).moves(layout)
    with pytest.raises(SelectorError, match="Leave this example out"):
        model(bound(model), interventions=[Shuffle(one)])
    with pytest.raises(SelectorError, match="visual tokens for scope view"):
        Shuffle("all", scope="view").moves(layout)


@pytest.mark.parametrize("padding", [1, 2])
@torch.no_grad()
def test_containerize_fills_the_ring_from_its_own_plane(any_model, padding):
    prompt = bound(any_model, side=8)
    layout, plain = prompt.layout, seen(any_model, prompt)[0]
    ring, inside = layout.select(f"object.ring({padding})"), layout.select("object")
    moves = Containerize("object", padding=padding, seed=2).moves(layout)
    assert sorted(moves.targets) == np.flatnonzero(ring.mask).tolist()
    assert set(moves.sources) <= set(np.flatnonzero(inside.mask))
    plane = {int(place): k for k, sheet in enumerate(layout.structure.sheets) for place in sheet.positions.ravel()}
    assert [plane[int(t)] for t in moves.targets] == [plane[int(s)] for s in moves.sources]
    got = seen(any_model, prompt, Containerize("object", padding=padding, seed=2))[0]
    expected = plain.clone()
    expected[moves.targets] = plain[moves.sources]
    assert torch.equal(got, expected)
    assert torch.equal(got[~ring.mask], plain[~ring.mask])
    assert not torch.equal(got[moves.targets], plain[moves.targets])
    others = [tuple(Containerize("object", padding=padding, seed=seed).moves(layout).sources) for seed in range(8)]
    assert len(set(others)) > 1 or inside.count <= len(layout.structure.sheets)


@pytest.mark.parametrize("site", ["hook_visual_embed", MERGED])
@torch.no_grad()
def test_rearranging_before_and_after_the_merge_is_the_same(model, site):
    prompt = bound(model)
    for make in (lambda site: Shuffle("image", seed=1, site=site), lambda site: Containerize("object", seed=1, site=site)):
        assert torch.equal(seen(model, prompt, make(site)), seen(model, prompt, make(MERGED)))


@pytest.mark.parametrize(
    "intervention",
    [
        Shuffle("object", scope="view"),
        Shuffle("image", scope="image", site="hook_visual_embed"),
        Containerize("object"),
        AblateHeads(((0, 1), (2, 3))),
    ],
    ids=lambda intervention: intervention.kind,
)
@torch.no_grad()
def test_a_padded_batch_equals_one_by_one(any_model, intervention):
    questions = [QUESTION, "how many green square in the image and where is the blue star ?"]
    images = [picture(), picture(seed=1)]
    masks = [np.zeros((48, 64), dtype=bool) for _ in images]
    masks[0][14:22, 21:40], masks[1][26:34, 24:44] = True, True
    together = any_model(any_model.prepare(images, questions).with_objects(masks), interventions=[intervention])
    for k in range(2):
        prompt = any_model.prepare(images[k], questions[k]).with_objects(masks[k])
        alone = any_model(prompt, interventions=[intervention])[0]
        assert torch.allclose(together[k, -alone.shape[0] :], alone, atol=2e-5)


@pytest.mark.parametrize("value", ["zero", "mean"])
@torch.no_grad()
def test_ablate_heads_replaces_exactly_those(model, value):
    prompt, names = bound(model), [f"blocks.{layer}.attn.hook_z" for layer in range(3)]
    means = fit_head_mean(model, [bound(model), bound(model, picture(seed=1))])
    heads = ((0, 1), (0, 3), (1, 2))
    _, plain = model.run_with_cache(prompt, names_filter=names)
    _, cut = model.run_with_cache(prompt, names_filter=names, interventions=[AblateHeads(heads, value)])
    for layer, head in heads:
        expected = torch.zeros(()) if value == "zero" else means[layer, head]
        assert torch.equal(cut[names[layer]][:, :, head], expected.expand_as(cut[names[layer]][:, :, head]))
    assert torch.equal(cut[names[0]][:, :, [0, 2]], plain[names[0]][:, :, [0, 2]])
    one_by_one = [Ablate("all", "zero", site=names[layer], heads=(head,)) for layer, head in heads]
    if value == "zero":
        assert torch.equal(model(prompt, interventions=[AblateHeads(heads)]), model(prompt, interventions=one_by_one))


@pytest.mark.parametrize("variant", DEFAULT, ids=str)
@torch.no_grad()
def test_head_mean_is_the_mean_over_real_positions(variant):
    model = hooked(variant, attention="eager")  # whose padding rows are not zero
    questions = [QUESTION, "how many green square in the image and where is the blue star ?"]
    batch = model.prepare([picture(), picture(seed=1)], questions)
    means = fit_head_mean(model, [batch])
    alone = [model.prepare(picture(seed=k), question) for k, question in enumerate(questions)]
    rows = torch.cat([model.run_with_cache(prompt, names_filter="blocks.1.attn.hook_z")[1]["blocks.1.attn.hook_z"][0] for prompt in alone])
    assert torch.allclose(means[1], rows.mean(0), atol=1e-5)
    with pytest.raises(InterventionError, match="at least one prompt"):
        fit_head_mean(model, [])


@torch.no_grad()
def test_ablate_heads_acts_in_the_phases_it_names(model):
    prompt = bound(model)
    options = {"min_new_tokens": 5, "output_logits": True}
    heads = tuple((layer, head) for layer in range(3) for head in range(4))

    def steps(*interventions):
        with model._running(prompt, interventions, None):
            inputs = {name: tensor for name, tensor in prompt.tensors.items() if name != "position_ids"}
            out = model.hf.generate(**inputs, do_sample=False, max_new_tokens=5, return_dict_in_generate=True, **options)
        return torch.stack(out.logits)[:, 0]

    plain, decode = steps(), steps(AblateHeads(heads, phases=("decode",)))
    assert torch.equal(plain[0], decode[0])
    assert (plain[1] - decode[1]).abs().max() > 1e-3
    prefill, both = steps(AblateHeads(heads, phases=("prefill",))), steps(AblateHeads(heads))
    assert torch.equal(prefill[0], both[0])
    assert (prefill[0] - plain[0]).abs().max() > 1e-3
    logits = model(prompt, interventions=[AblateHeads(heads)])
    assert torch.allclose(both[0], logits[0, -1], atol=1e-5)


@torch.no_grad()
def test_what_cannot_act_says_so(model):
    prompt = bound(model)
    for intervention, error, words in (
        (AblateHeads(((3, 0),)), InterventionError, "layers below 3"),
        (AblateHeads(((0, 4),)), InterventionError, "heads below 4"),
        (AblateHeads(((0, 0),), "mean"), InterventionError, "fit_head_mean"),
        (AblateHeads(((0, 0),), at="answer", phases=("prefill",)), InterventionError, "touched none"),
        (Shuffle("image", site="blocks.0.attn.hook_pattern"), InterventionError, "positions or visual tokens"),
        (Shuffle("all", site="hook_visual_embed"), InterventionError, "visual tokens at hook_visual_embed"),
        (Containerize("image"), SelectorError, "a ring around the object"),
        (Containerize("question"), SelectorError, "only visual tokens"),
    ):
        with pytest.raises(error, match=words):
            model(prompt, interventions=[intervention])
    assert not any(point.has_hooks() for point in model.hook_dict.values())
    for wrong, words in (
        (lambda: Shuffle("image", seed=-1), "seed"),
        (lambda: Containerize("object", padding=0), "padding"),
        (lambda: AblateHeads(()), "at least one"),
        (lambda: AblateHeads(((0, 1), (0, 1))), "none twice"),
        (lambda: AblateHeads(((0, -1),)), "not negative"),
        (lambda: AblateHeads(((0, 1),), phases=()), "phases"),
    ):
        with pytest.raises(InterventionError, match=words):
            wrong()


def test_a_study_leaves_out_trials_that_cannot_be_shuffled():
    model = hooked(DEFAULT[0])
    mask = np.zeros((48, 64), dtype=bool)
    mask[14:22, 22:30] = True  # one of the 12-pixel cells
    wide = mask.copy()
    wide[14:22, 22:44] = True
    question = Question("existence", QUESTION, "yes")
    trials = (Trial("one", Image.fromarray(picture()), question, mask), Trial("three", Image.fromarray(picture()), question, wide))
    cells = (Cell({"at": "none"}), Cell({"at": "shuffled"}, (Shuffle("object"),)))
    records = Study("shuffle", cells, trials, AnswerLikelihood()).run(model, progress=False).records
    values = {record.coordinates["at"]: record.values["logprob"] for record in records}
    assert np.isnan(values["shuffled"]).tolist() == [True, False]
    assert values["shuffled"][1] != values["none"][1]
    assert "two or more tokens" in records[1].notes[0]["left_out"]
