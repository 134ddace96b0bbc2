"""The contract of patching at every hook name of every family: what it leaves, what it writes, where, and what it refuses."""

from __future__ import annotations

from fnmatch import fnmatchcase

import numpy as np
import pytest
import torch
from tests.conftest import hooked, picture
from tests.tiny import EACH, TEXTS

from sightlens.errors import InterventionError
from sightlens.families.sites import Attention
from sightlens.interventions import Ablate, PatchIn, Shuffle

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
    tokens, table, structure = layout.select(where), layout.visual_tokens(), layout.structure
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
    names = [name for name in model.hook_dict if fnmatchcase(name, "*.[01].*") or "." not in name]
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
    _, cache = model.run_with_cache(prompt)
    kinds = {"patch": lambda name: PatchIn(name, at=at, donor="self"), "ablate": lambda name: Ablate(at, "zero", site=name)}
    kinds["shuffle"] = lambda name: Shuffle(at, site=name)
    for kind, make in kinds.items():
        refused = {hint: set() for hint in HINTS}
        for name in model.hook_dict:
            donors = {"self": cache if name in cache else model.run_with_cache(prompt, names_filter=name)[1]}
            try:
                model(prompt, interventions=[make(name)], donors=donors)
            except InterventionError as problem:
                if name == "hook_embed" and "touched none" in str(problem):
                    continue  # image features replace what stands there
                refused[next(hint for hint in HINTS if hint in str(problem))].add(name)
        assert refused == refusals(model, kind), kind
