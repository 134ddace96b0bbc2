"""The contract of patching at every hook name of every family: what it leaves, what it writes, where, and what it refuses."""

from __future__ import annotations

from fnmatch import fnmatchcase

import numpy as np
import pytest
import torch
from tests.conftest import hooked, picture
from tests.tiny import EACH, SPECIAL, TEXTS, VARIANTS

from sightlens.engine import Engine
from sightlens.errors import InterventionError, SelectorError
from sightlens.families.sites import Attention
from sightlens.interventions import Ablate, Containerize, Knockout, PatchIn, Shuffle
from sightlens.model.apply import changes
from sightlens.model.rows import Row

QUESTION, OTHER, LONG = (
    "is there a red circle ?",
    "is there a blue square ?",
    "how many green square in the image and where is the blue star ?",
)
TOWER = "vision_encoder.encoder_layers.0"
MASK, EDGES, ROT_K = "*attn.hook_attn_mask", "*attn.hook_attn_scores *attn.hook_pattern", "blocks.*.attn.hook_rot_k"
WHOLE = "hook_newline vision_encoder.hook_in"
PACKED_EDGES = "vision_encoder.*.attn.hook_attn_scores vision_encoder.*.attn.hook_pattern"
HINTS = ("Use Knockout for attention", "Use a hook function there", "Patch hook_z", "Rearrange hook_k")


def is_packed(model):
    return model.hook_dict["vision_encoder.hook_in"].site.dims[0] == "patch" if "vision_encoder.hook_in" in model.hook_dict else False


def matching(model, patterns):
    names = {name for name in model.hook_dict if any(fnmatchcase(name, pattern) for pattern in patterns.split())}
    return names - ({"vision_encoder.hook_in"} if is_packed(model) else set())


def refusals(model, kind):
    """Hook names by the hint that refuses them."""
    none = {hint: set() for hint in HINTS}
    masks, whole, edges = matching(model, MASK), matching(model, WHOLE), matching(model, EDGES)
    packed = matching(model, PACKED_EDGES) if is_packed(model) else set()
    if kind == "patch":
        return {**none, HINTS[0]: masks, HINTS[1]: whole, HINTS[2]: packed}
    keys = matching(model, ROT_K) if kind == "shuffle" else set()
    return {**none, HINTS[0]: masks | edges, HINTS[1]: whole, HINTS[3]: keys}


def pair(model):
    """Two prompts of one layout that show and ask other things."""
    seen = model.processing.family.images
    return tuple(
        model.prepare(picture(seed=seed) if seen else None, question, template="chat") for seed, question in enumerate((QUESTION, OTHER))
    )


def flat(value, dims):
    """One leading dimension of places, of one example."""
    if "query" in dims or "query_patch" in dims:
        value = value.transpose(1, 2)
    return value.flatten(0, 1) if dims[0] in ("batch", "view") else value


def places_of(value, layout, where, dims):
    """The mask of a selector over the flat places of an activation, from the layout's grids alone."""
    tokens, table, structure = layout.select(where) if isinstance(where, str) else where, layout.visual_tokens(), layout.structure
    if not {"token", "patch", "query_patch"} & set(dims):
        return torch.as_tensor(tokens.mask.copy())
    own = tokens.mask[table["position"]]
    if structure.features is not None:
        outputs = np.zeros(structure.feature_rows, dtype=bool)
        outputs[np.array(structure.features.of)[own]] = True
        crops = list(outputs.reshape(value.shape[0], -1))
    else:
        crops = []
        for index, view in enumerate(layout.views):
            grid, chosen = np.zeros(view.grid, dtype=bool), table[own & (table["view"] == index)]
            grid[chosen["row"], chosen["column"]] = True
            merge = 1 if "token" in dims else view.merge
            crops.append(grid.repeat(merge, 0).repeat(merge, 1).ravel())
    extra = len(flat(value, dims)) // len(crops) - len(crops[0]) if dims[0] == "view" else 0  # a class token
    return torch.as_tensor(np.concatenate([np.pad(crop, (extra, 0)) for crop in crops]))


@pytest.mark.usefixtures("unchecked")  # thousands of passes
@pytest.mark.parametrize("variant", [*EACH, *TEXTS], ids=str)
@torch.no_grad()
def test_every_site_keeps_what_is_its_own_and_takes_what_is_given(variant):
    model = hooked(variant)
    prompt, other = pair(model)
    names = sorted(set(model.hook_dict) - set().union(*refusals(model, "patch").values()))
    plain_logits, cache = model.run_with_cache(
        prompt, names_filter=[n for n in names if not isinstance(model.hook_dict[n].site.tap, Attention)]
    )
    donors = {"other": model.run_with_cache(other, names_filter=names)[1]}
    for name in names:
        dims, own, plain = model.hook_dict[name].site.dims, cache, plain_logits
        if name not in cache:  # looking inside attention leaves the fused path
            plain, own = model.run_with_cache(prompt, names_filter=name)
        same = model(prompt, interventions=[PatchIn(name, donor="self")], donors={"self": own})
        assert torch.equal(same, plain), name
        for at in ("all", "image & row[0]" if prompt.layout.views and name != "hook_embed" else "question"):
            patch = PatchIn(name, donor="other", at=at)
            logits, seen = model.run_with_cache(prompt, names_filter=name, interventions=[patch], donors=donors)
            after, before, given = (flat(value[name], dims) for value in (seen, own, donors["other"]))
            inside = places_of(own[name], prompt.layout, at, dims)
            assert inside.any()
            assert torch.equal(after[inside], given[inside]), (name, at)
            assert torch.equal(after[~inside], before[~inside]), (name, at)
            if at == "all":
                assert (logits - plain).abs().max() > 1e-5, name
    assert len(names) > 40


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("variant", EACH, ids=str)
@torch.no_grad()
def test_patching_an_eager_run_with_itself_changes_nothing_bit_for_bit(variant):
    model = hooked(variant, attention="eager")
    prompt = model.prepare(picture(), QUESTION)
    names = [name for name in model.hook_dict if fnmatchcase(name, "*.1.*") or "." not in name]
    names = sorted(set(names) - set().union(*refusals(model, "patch").values()))
    for name in names:
        logits, cache = model.run_with_cache(prompt, names_filter=[name, *model.hook_dict[name].site.companions])
        assert torch.equal(model(prompt, interventions=[PatchIn(name, donor="self")], donors={"self": cache}), logits), name


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("variant", [*EACH, *TEXTS], ids=str)
@torch.no_grad()
def test_sites_that_cannot_be_written_are_these_and_say_why(variant):
    model = hooked(variant)
    prompt, _ = pair(model)
    at = "image" if prompt.layout.views else "question"
    donors = {"self": model.run_with_cache(prompt, names_filter=list(model.hook_dict))[1]}
    kinds = {"patch": lambda name: PatchIn(name, at=at, donor="self"), "ablate": lambda name: Ablate(at, "zero", site=name)}
    kinds["shuffle"] = lambda name: Shuffle(at, site=name)
    with model.sites.window.showing(prompt.layouts, [0]):
        for kind, make in kinds.items():
            refused = {hint: set() for hint in HINTS}
            for name in model.hook_dict:
                try:
                    list(changes(model.sites, [Row(0, (make(name),))], donors))
                except InterventionError as problem:
                    refused[next(hint for hint in HINTS if hint in str(problem))].add(name)
            assert refused == refusals(model, kind), kind


@torch.no_grad()
def test_modes_and_heads_act_on_patches(each_model):
    prompt, other = pair(each_model)
    site, at = f"{TOWER}.attn.hook_z", "image & column[1]"
    dims, name = each_model.hook_dict[site].site.dims, {"names_filter": site}
    own, donor = (each_model.run_with_cache(one, **name)[1] for one in (prompt, other))
    inside = places_of(own[site], prompt.layout, at, dims)
    a, b = flat(own[site], dims)[inside][:, 1], flat(donor[site], dims)[inside][:, 1]
    for mode, expected in (("replace", b), ("add", a + 0.5 * b), ("interpolate", a + 0.5 * (b - a))):
        patch = PatchIn(site, at=at, heads=(1,), mode=mode, alpha=0.5)
        seen = flat(each_model.run_with_cache(prompt, **name, interventions=[patch], donors={"clean": donor})[1][site], dims)
        assert torch.allclose(seen[inside][:, 1], expected)
        assert torch.equal(seen[:, 0], flat(own[site], dims)[:, 0])


@torch.no_grad()
def test_means_are_measured_and_put_where_they_belong(each_model):
    prompt, other = pair(each_model)
    for site in (f"{TOWER}.hook_resid_post", "blocks.1.hook_resid_post", "vision_projector.hook_out"):
        dims = each_model.hook_dict[site].site.dims
        mean = each_model.fit_mean([prompt, other], source="two", site=site)
        rows = []
        for one in (prompt, other):
            value = each_model.run_with_cache(one, names_filter=site)[1][site]
            rows.append(flat(value, dims)[places_of(value, one.layout, "image", dims)])
        assert mean.tokens == len(torch.cat(rows))
        assert torch.allclose(mean.vector, torch.cat(rows).mean(0), atol=1e-5)
        _, seen = each_model.run_with_cache(prompt, names_filter=site, interventions=[Ablate("image & row[0]", "mean", site=site)])
        inside = places_of(seen[site], prompt.layout, "image & row[0]", dims)
        assert torch.allclose(flat(seen[site], dims)[inside], mean.vector.expand(int(inside.sum()), -1))
        with pytest.raises(InterventionError, match="a mean measured at hook_merged_embed"):
            each_model(prompt, interventions=[Ablate("image", "mean")])
    with pytest.raises(InterventionError, match="fit_head_mean"):
        each_model.fit_mean([prompt], source="one", site="blocks.0.attn.hook_z")


@torch.no_grad()
def test_shuffles_carry_the_patches_of_each_token_together(each_model):
    prompt, site = pair(each_model)[0], f"{TOWER}.hook_resid_pre"
    dims, plain = each_model.hook_dict[site].site.dims, each_model.run_with_cache(prompt, names_filter=site)[1][site]
    shuffle = Shuffle("image", scope="view", seed=1, site=site)
    seen = each_model.run_with_cache(prompt, names_filter=site, interventions=[shuffle])[1][site]
    moves, layout = shuffle.moves(prompt.layout), prompt.layout
    for target, source in list(zip(moves.targets, moves.sources, strict=True))[:6]:
        there, here = (places_of(plain, layout, layout.at([place]), dims) for place in (target, source))
        assert torch.equal(flat(seen, dims)[there], flat(plain, dims)[here])
    assert torch.equal(each_model(prompt, interventions=[shuffle, shuffle.inverse()]), each_model(prompt))
    logits = each_model(prompt)
    assert (each_model(prompt, interventions=[shuffle]) - logits).abs().max() > 1e-4


@pytest.mark.parametrize(
    "make",
    [
        lambda donor: Ablate("image & column[0]", "noise", site=f"{TOWER}.hook_resid_post", seed=2),
        lambda donor: Ablate("image & column[0]", "noise", site="hook_visual_embed", seed=2),
        lambda donor: Ablate("last", "zero", site="blocks.1.attn.hook_rot_q", heads=(1,)),
        lambda donor: PatchIn(f"{TOWER}.attn.hook_q", at="image", donor=donor),
        lambda donor: PatchIn("blocks.1.attn.hook_rot_k", at="image", donor=donor),
        lambda donor: PatchIn("blocks.1.attn.hook_pattern", at="last", heads=(0, 3), donor=donor),
    ],
)
@torch.no_grad()
def test_a_padded_batch_equals_one_by_one(each_model, make):
    images, questions = [[picture(seed=k), picture(64, 64, seed=k + 1)] for k in (0, 5)], [QUESTION, LONG]
    site = make("clean").site
    donors = {"clean": each_model.run_with_cache(each_model.prepare(images[1], questions), names_filter=site)[1]}
    batch = each_model.prepare(images[0], questions)
    together = each_model(batch, interventions=[make("clean")], donors=donors)
    assert (together - each_model(batch)).abs().amax((1, 2)).min() > 1e-4
    for k in range(2):
        _, donor = each_model.run_with_cache(each_model.prepare(images[1][k], questions[k]), names_filter=site)
        alone = each_model(each_model.prepare(images[0][k], questions[k]), interventions=[make("clean")], donors={"clean": donor})[0]
        assert torch.allclose(together[k, -alone.shape[0] :], alone, atol=2e-5)


def test_patched_keys_stay_patched_while_decoding(model):
    prompt, other = pair(model)
    donors = {"clean": model.run_with_cache(other, names_filter="blocks.*.attn.hook_rot_k")[1]}
    cell = {"interventions": [PatchIn("blocks.*.attn.hook_rot_k", at="image")], "donors": donors, "max_new_tokens": 12}
    options = {"eos_token_id": None, "suppress_tokens": list(range(len(SPECIAL)))}
    cached, plain = (model.generate_ids(prompt, **cell, options={**options, "use_cache": kept}) for kept in (True, False))
    assert torch.equal(cached, plain)


@torch.no_grad()
def test_donors_that_do_not_fit_are_refused(model):
    prompt, site = pair(model)[0], f"{TOWER}.hook_resid_post"
    _, cache = model.run_with_cache(prompt, names_filter=[site, "blocks.1.attn.hook_pattern"])
    _, longer = model.run_with_cache(model.prepare(picture(), LONG), names_filter="blocks.1.attn.hook_pattern")
    for intervention, donor, words in (
        (Ablate("image", "clean", site=site), torch.zeros(32), r"a vector \[24\]"),
        (PatchIn(site, at="image & row[0]", source="image & cell[0,0]"), cache, "equally many"),
        (PatchIn("blocks.1.attn.hook_pattern", at="last"), longer, "same length"),
        (PatchIn("blocks.1.attn.hook_pattern", at="last", heads=(4,)), cache, "heads below 4"),
        (Ablate("last", "zero", site="blocks.1.attn.hook_pattern"), cache, "Knockout"),
    ):
        with pytest.raises(InterventionError, match=words):
            model(prompt, interventions=[intervention], donors={"clean": donor})


@torch.no_grad()
def test_tokens_that_blend_several_outputs_show_no_patches_of_their_own():
    model = hooked(next(variant for variant in VARIANTS if variant.family == "llava_onevision"))
    prompt = model.prepare(picture(96, 96), QUESTION)
    assert -1 in prompt.layout.structure.features.of
    model(prompt, interventions=[Ablate("global & row[0]", "zero", site=f"{TOWER}.hook_resid_post")])
    for intervention in (Ablate("tile", "zero", site=f"{TOWER}.hook_resid_post"), Shuffle("tile", site=f"{TOWER}.hook_resid_post")):
        with pytest.raises(SelectorError, match="carry one output"):
            model(prompt, interventions=[intervention])


@torch.no_grad()
def test_the_engine_runs_tower_cells_whole(each_model):
    prompt, other = pair(each_model)
    site = f"{TOWER}.hook_resid_post"
    donors = {"clean": each_model.run_with_cache(other, names_filter=[site, "blocks.*.attn.hook_rot_*"])[1]}
    cells = [[PatchIn(site, at="image & row[0]")], [Containerize("global & row[0]", site=site, seed=1)]]
    cells += [[PatchIn(f"blocks.1.attn.hook_rot_{letter}", at="image & row[0]")] for letter in "qk"]
    plan = Engine(each_model).plan(prompt, cells, donors=donors)
    assert "the vision tower or the merge runs again" in str(plan.explain())
    for cell, logits in zip(cells, plan.logits(), strict=True):
        assert torch.allclose(logits[:, -1], each_model(prompt, interventions=cell, donors=donors)[:, -1], atol=1e-5), cell


@pytest.mark.parametrize("tensor", ["attn_mask", "attn_scores", "pattern"])
@torch.no_grad()
def test_an_edge_that_a_knockout_removed_cannot_come_back(model, tensor):
    prompt = model.prepare(picture(), QUESTION)
    site, knockout = f"blocks.1.attn.hook_{tensor}", Knockout("last", "image & row[0]", layers=(1,))

    def put_back(value, hook):
        return torch.zeros_like(value) if tensor != "pattern" else value + 1e-3

    def elsewhere(value, hook):
        value[:, :, :-1] *= 0.5

    with pytest.raises(InterventionError, match="put back"):
        model.run_with_hooks(prompt, fwd_hooks=[(site, put_back)], interventions=[knockout])
    model.run_with_hooks(prompt, fwd_hooks=[(site, elsewhere)], interventions=[knockout])
    if tensor != "attn_mask":
        _, cache = model.run_with_cache(prompt, names_filter=site)
        with pytest.raises(InterventionError, match="put back"):
            model(prompt, interventions=[knockout, PatchIn(site, at="last")], donors={"clean": cache})
