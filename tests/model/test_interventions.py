"""What each intervention does, against closed forms and HF's own numbers (invariants that need no trained weights)."""

from __future__ import annotations

import copy
import json

import pytest
import torch
from tests.conftest import hooked, picture
from tests.tiny import VARIANTS

from sightlens.engine import Engine
from sightlens.errors import InterventionError, PromptError, SelectorError
from sightlens.interventions import Ablate, AblateHeads, Containerize, Knockout, PatchIn, Shuffle, from_dict
from sightlens.interventions.means import load_mean, part_names, save_mean
from sightlens.model import HookedVLM

QUESTION = "is there a red circle ?"
ALL = [
    Ablate("image & row[0]", "zero"),
    Ablate("object.dilate(1)", "noise", scale=2.0, seed=4),
    Ablate("image", "mean", site="blocks.1.attn.hook_z", heads=(0, 2)),
    PatchIn("blocks.*.hook_resid_post", layers=(0, 1), at="image", mode="interpolate", alpha=0.5),
    PatchIn("blocks.2.attn.hook_z", donor="corrupted", at="last", source="position[3]", heads=(1,)),
    Knockout("post_image", "object | separator", layers=(0, 2), heads=(1,), phases=("prefill",)),
    Shuffle("object & global", scope="view", seed=3).inverse(),
    Containerize("object", padding=2, seed=1, site="hook_visual_embed"),
    AblateHeads(((0, 1), (0, 3), (2, 0)), "mean", at="post_image", phases=("decode",)),
]


@pytest.mark.parametrize("intervention", ALL, ids=lambda i: type(i).__name__)
def test_survive_json_and_compare(intervention):
    again = from_dict(json.loads(json.dumps(intervention.to_dict())))
    assert again == intervention
    assert hash(again) == hash(intervention)
    assert repr(again) == repr(intervention)


@pytest.mark.parametrize("site", ["hook_merged_embed", "blocks.0.hook_resid_post", "blocks.2.hook_resid_mid", "blocks.2.hook_resid_post"])
@torch.no_grad()
def test_patching_all_positions_gives_the_donors_logits(model, site):
    clean, other = (model.prepare(picture(seed=seed), QUESTION) for seed in (0, 1))
    expected, cache = model.run_with_cache(clean, names_filter=site)
    got = model(other, interventions=[PatchIn(site)], donors={"clean": cache})
    assert (expected - model(other)).abs().max() > 1e-3
    assert torch.allclose(got, expected, atol=1e-5)


@torch.no_grad()
def test_patch_modes_heads_and_sources(model):
    clean, other = (model.prepare(picture(seed=seed), QUESTION) for seed in (0, 1))
    site = "blocks.1.attn.hook_z"
    _, donor = model.run_with_cache(clean, names_filter=site)
    _, own = model.run_with_cache(other, names_filter=site)
    patch = PatchIn(site, at="last", source="position[2]", heads=(1, 3))
    _, seen = model.run_with_cache(other, names_filter=site, interventions=[patch], donors={"clean": donor})
    expected = own[site].clone()
    expected[:, -1, [1, 3]] = donor[site][:, 2, [1, 3]]
    assert torch.equal(seen[site], expected)
    for mode, formula in (("add", lambda a, b: a + 0.5 * b), ("interpolate", lambda a, b: a + 0.5 * (b - a))):
        patch = PatchIn(site, at="image", mode=mode, alpha=0.5)
        _, seen = model.run_with_cache(other, names_filter=site, interventions=[patch], donors={"clean": donor})
        assert torch.allclose(seen[f"{site}@image"], formula(own[f"{site}@image"], donor[f"{site}@image"]))


@torch.no_grad()
def test_ablation_values(model):
    prompt = model.prepare(picture(), QUESTION)
    site, at = "hook_merged_embed", "image & column[1]"
    model.fit_mean([model.prepare(picture(seed=seed), QUESTION) for seed in range(3)], source="noise")
    visual = [model.run_with_cache(model.prepare(picture(seed=s), QUESTION), names_filter=site)[1][f"{site}@image"] for s in range(3)]
    _, plain = model.run_with_cache(prompt, names_filter=site)
    vector = torch.arange(32.0)

    def seen(intervention, **donors):
        return model.run_with_cache(prompt, names_filter=site, interventions=[intervention], donors=donors)[1]

    mean = torch.cat([v.reshape(-1, 32) for v in visual]).mean(0)
    for value, expected in (("zero", torch.zeros(32)), ("mean", mean), ("mine", vector)):
        cache = seen(Ablate(at, value), mine=vector)
        assert torch.allclose(cache[f"{site}@{at}"], expected.expand_as(cache[f"{site}@{at}"]), atol=1e-6)
        assert torch.equal(cache[f"{site}@~({at})"], plain[f"{site}@~({at})"])
    noised = seen(Ablate(at, "noise", seed=1))
    assert torch.equal(noised[site], seen(Ablate(at, "noise", seed=1))[site])
    assert not torch.equal(noised[site], seen(Ablate(at, "noise", seed=2))[site])


@torch.no_grad()
def test_means_of_parts_of_the_picture(each_model, tmp_path):
    model = each_model
    prompts = [model.prepare(picture(48, 160, seed=seed), QUESTION) for seed in range(3)]
    names = ["hook_merged_embed", *model.hook_dict["hook_merged_embed"].site.companions]
    table, views = prompts[0].layout.visual_tokens(), prompts[0].layout.views
    caches = [model.run_with_cache(prompt, names_filter=names)[1] for prompt in prompts]
    embedded = torch.cat([cache["hook_merged_embed"] for cache in caches])[:, table["position"].tolist()]
    kinds = [views[view].kind for view in table["view"]]
    for by, labels in (("view", kinds), ("position", list(zip(kinds, table["row"].tolist(), table["column"].tolist(), strict=True)))):
        model.fit_mean(prompts, source="three", by=by)
        save_mean(model.donors["mean"], tmp_path / by)
        model.donors["mean"] = load_mean(tmp_path / by)
        _, cache = model.run_with_cache(prompts[0], names_filter="hook_merged_embed", interventions=[Ablate("image", "mean")])
        found = cache["hook_merged_embed"][0, table["position"].tolist()]
        for label in set(labels):
            chosen = [k for k, other in enumerate(labels) if other == label]
            assert torch.allclose(found[chosen], embedded[:, chosen].mean((0, 1)).expand(len(chosen), -1), atol=1e-5), label
    larger = model.prepare(picture(200, 40), QUESTION)
    unseen = {"[", *part_names(larger.layout, larger.layout.visual_tokens()["position"], "position")} - set(
        model.donors["mean"].parts["hook_merged_embed"]
    )
    if len(unseen) > 1:
        with pytest.raises(InterventionError, match="a mean of every part"):
            model(larger, interventions=[Ablate("image", "mean")])
    with pytest.raises(InterventionError, match="Restrict it"):
        model(prompts[0], interventions=[Ablate("image | last", "mean")])


@torch.no_grad()
def test_ablating_with_own_embeddings_is_no_change(model):
    prompt = model.prepare(picture(), QUESTION)
    logits, cache = model.run_with_cache(prompt, names_filter="hook_visual_embed")
    one = "image & cell[0,0]" if not prompt.layout.select("global & cell[0,0]").count else "global & cell[0,0]"
    own = cache[f"hook_visual_embed@{one}"].flatten()
    assert torch.equal(model(prompt, interventions=[Ablate(one, "own")], donors={"own": own}), logits)


@pytest.mark.parametrize("heads", [None, (1, 3)])
@torch.no_grad()
def test_knockout_removes_exactly_the_edges_on_both_paths(any_model, heads):
    prompt = any_model.prepare(picture(), QUESTION)
    knockout = Knockout("post_image", "image & row[0]", layers=(0, 2), heads=heads)
    fused = any_model(prompt, interventions=[knockout])
    plain, before = any_model.run_with_cache(prompt, names_filter="blocks.*.attn.hook_pattern")
    stepwise, after = any_model.run_with_cache(prompt, names_filter="blocks.*.attn.hook_pattern", interventions=[knockout])
    assert torch.allclose(fused, stepwise, atol=1e-5)
    assert (fused - plain).abs().max() > 1e-3
    cut = range(4) if heads is None else heads
    queries, keys = prompt.layout.select("post_image").positions, prompt.layout.select("image & row[0]").positions
    for layer in range(3):
        pattern = after[f"blocks.{layer}.attn.hook_pattern"]
        assert torch.allclose(pattern.sum(-1), torch.ones(()))
        blocked = pattern[:, :, queries][..., keys]
        for head in range(4):
            removed = layer in (0, 2) and head in cut
            assert (blocked[:, head] == 0).all() == removed
    first = before["blocks.0.attn.hook_pattern"].clone()
    first[:, list(cut)] = _cut(first[:, list(cut)], queries, keys)
    assert torch.allclose(after["blocks.0.attn.hook_pattern"], first, atol=1e-6)
    early = prompt.layout.select("pre_image | image").positions
    assert torch.allclose(fused[:, early], plain[:, early], atol=1e-5)


def _cut(pattern, queries, keys):
    pattern = pattern.clone()
    pattern[:, :, torch.as_tensor(queries)[:, None], torch.as_tensor(keys)] = 0
    return pattern / pattern.sum(-1, keepdim=True)


@torch.no_grad()
def test_knockout_in_a_padded_batch_equals_one_by_one(any_model):
    questions = [QUESTION, "how many green square in the image and where is the blue star ?"]
    images = [picture(), picture(64, 64, 1)]
    knockout = [Knockout("post_image", "image & column[0]", layers=(1,))]
    together = any_model(any_model.prepare(images, questions), interventions=knockout)
    for k in range(2):
        alone = any_model(any_model.prepare(images[k], questions[k]), interventions=knockout)[0]
        assert torch.allclose(together[k, -alone.shape[0] :], alone, atol=2e-5)


@torch.no_grad()
def test_interventions_that_touch_nothing_or_cannot_work_say_so(model):
    prompt = model.prepare(picture(), QUESTION)
    _, cache = model.run_with_cache(prompt, names_filter="blocks.0.hook_resid_post")
    bad = [
        (Ablate("answer", "zero"), "touched none"),
        (Knockout("pre_image", "image"), "touched none"),
        (Knockout("all", "all"), "at least one key left"),
        (Knockout("post_image", "image", layers=(7,)), "layers below 3"),
        (Knockout("post_image", "image", heads=(4,)), "heads below 4"),
        (Ablate("image", "mean"), "fit_mean"),
        (Ablate("image", "zero", site="blocks.0.attn.hook_z", heads=(4,)), "heads below 4"),
        (Ablate("image", "zero", site="blocks.0.attn.hook_k", heads=(2,)), "heads below 2"),
        (Ablate("image", "clean"), "cache"),
        (Ablate("image", "zero", site="blocks.0.attn.hook_pattern"), "Knockout"),
        (Ablate("image", "zero", site="hook_merged_embed", heads=(0,)), "heads"),
        (PatchIn("blocks.0.hook_resid_post", donor="nobody"), "nobody"),
        (PatchIn("blocks.1.hook_resid_post", donor="clean"), "blocks.1.hook_resid_post"),
        (PatchIn("blocks.0.hook_resid_post", at="image", source="last"), "equally many"),
    ]
    for intervention, words in bad:
        with pytest.raises(InterventionError, match=words):
            model(prompt, interventions=[intervention], donors={"clean": cache})
    assert not any(point.has_hooks() for point in model.hook_dict.values())
    assert model.hf.model.language_model.config._attn_implementation == "sdpa"


@torch.no_grad()
def test_what_belongs_to_another_model_or_batch_is_refused(model):
    prompt = model.prepare(picture(), QUESTION)
    twin = HookedVLM(copy.deepcopy(model.hf), model.processing)
    assert torch.equal(twin(prompt), model(prompt))
    for variant in (VARIANTS[7], VARIANTS[-1]):
        foreign = hooked(variant).prepare(picture(), QUESTION)
        for run in (model, model.run_with_cache, model.generate, lambda given: Engine(model).plan(given, [[]])):
            with pytest.raises(PromptError, match=f"prepared for {model.processing.family.name},.* got one for {foreign.origin.family}"):
                run(foreign)
    pair = model.prepare([picture(), picture()], [QUESTION, QUESTION])
    cell = [PatchIn("blocks.0.hook_resid_post")]
    _, cache = model.run_with_cache(pair, names_filter="blocks.0.hook_resid_post")
    for given in (prompt, model.prepare([picture()] * 3, [QUESTION] * 3)):
        words = f"a donor of one example, or of {len(given)}; got 2 in 'clean'"
        with pytest.raises(InterventionError, match=words):
            model(given, interventions=cell, donors={"clean": cache})
        with pytest.raises(InterventionError, match=words):
            Engine(model).plan(given, [cell], donors={"clean": cache})


@pytest.mark.usefixtures("unchecked")
def test_values_of_wrong_types_are_refused(model):
    prompt = model.prepare(picture(), QUESTION)
    for strange in (Ablate("image", "zero"), ["image"], "image", None):
        with pytest.raises(InterventionError, match="a list of interventions"):
            model.generate(prompt, interventions=strange)
    with pytest.raises(InterventionError, match="donors by name"):
        model(prompt, donors=["clean"])
    with pytest.raises(PromptError, match="ImageOptions"):
        model.prepare(picture(), QUESTION, options={"image_mode": "pad"})


def test_bad_descriptions_fail_where_they_are_written():
    with pytest.raises(SelectorError, match="imgae"):
        Ablate("imgae", "zero")
    with pytest.raises(InterventionError, match="phases"):
        Knockout("last", "image", phases=())
    with pytest.raises(InterventionError, match="none twice"):
        Knockout("last", "image", layers=(1, 1))
    with pytest.raises(InterventionError, match="positive scale"):
        Ablate("image", "noise", scale=0.0)
    for scale in (float("nan"), float("inf")):
        with pytest.raises(InterventionError, match="finite positive scale"):
            Ablate("image", "noise", scale=scale)
    with pytest.raises(InterventionError, match="kind"):
        from_dict({"kind": "abalte"})
    with pytest.raises(InterventionError, match="fields"):
        from_dict({"kind": "ablate", "att": "image"})


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ({"kind": "ablate"}, "'at'"),
        ({"kind": ["x"]}, "kind"),
        ({}, "kind"),
        ({"kind": "ablate", "at": {"positions": [1]}}, "layout"),
        ({"kind": "ablate", "at": 3}, "text"),
        ({"kind": "ablate", "at": "image", "seed": "x"}, "parameter 'seed'"),
        ({"kind": "ablate", "at": "image", "scale": "x"}, "parameter 'scale'"),
        ({"kind": "ablate", "at": "image", "value": 3}, "parameter 'value'"),
        ({"kind": "knockout", "queries": "last", "keys": "image", "layers": ["x"]}, "parameter 'layers'"),
        ({"kind": "knockout", "queries": "last", "keys": "image", "layers": 3}, "parameter 'layers'"),
        ({"kind": "ablate_heads", "heads": [1, 2]}, "parameter 'heads'"),
    ],
)
def test_bad_data_are_refused(data, words):
    with pytest.raises(InterventionError, match=words):
        from_dict(data)


@torch.no_grad()
def test_token_sets_fit_only_their_own_layout(model):
    prompt, other = model.prepare(picture(), QUESTION), model.prepare(picture(), "is there a circle ?")
    red = prompt.layout.select("image & row[0]")
    by_set, by_name = Ablate(red, "zero"), Ablate("image & row[0]", "zero")
    assert torch.equal(model(prompt, interventions=[by_set]), model(prompt, interventions=[by_name]))
    assert from_dict(json.loads(json.dumps(by_set.to_dict()))) == by_set
    with pytest.raises(InterventionError, match="layout"):
        model(other, interventions=[by_set])
