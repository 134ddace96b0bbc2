"""The engine gives each family's own logits and texts: blocks that see themselves, features that come in again, sliding layers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.conftest import hooked, picture
from tests.tiny import EACH, TEXTS

from sightlens.engine import Engine
from sightlens.families import ItemList
from sightlens.interventions import Ablate, Knockout, PatchIn, Shuffle

ROW = "image & row[1]"
SEEN = [
    [],
    [Ablate(ROW, "zero")],
    [Ablate(ROW, "mean")],
    [Ablate(ROW, "zero", reinjected=False)],
    [Ablate(ROW, "zero", site="blocks.1.hook_resid_post")],
    [Ablate("last", "zero", site="blocks.2.attn.hook_z", heads=(1,))],
    [Knockout("post_image", "image & row[0]", layers=(1, 2))],
    [Shuffle(ROW, seed=1)],
]
AGAIN = [
    [Ablate(ROW, "noise", site="hook_deepstack_embed.1")],
    [Ablate("image & row[2]", "zero", site="blocks.0.hook_resid_post")],
    [Ablate("image", "zero", site="blocks.0.attn.hook_z", heads=(0,))],
    [Ablate("image", "zero", site="blocks.1.hook_resid_post"), Shuffle(ROW, seed=2)],
    [PatchIn("hook_merged_embed", at="image & row[0]", source=ROW, reinjected=True)],
]
BACKWARDS = [[Knockout("image & row[0]", ROW, layers=(1,))], [Ablate("image & row[3]", "zero", site="blocks.0.hook_resid_post")]]
READ = [
    [],
    [Ablate("item[1]", "zero")],
    [Knockout("last", "item[0]", layers=(1,))],
    [Ablate("separator[0]", "noise", site="blocks.1.hook_resid_post")],
]


def prepared(variant: Any) -> tuple[Any, Any, list[list[Any]]]:
    """A model, a batch of examples of different sizes, and cells."""
    model = hooked(variant)
    if variant in TEXTS:
        lists = [ItemList(items, "how many ?", separator=" , ") for items in (("red", "star"), ("blue", "circle", "square"))]
        return model, model.prepare(None, lists), READ
    groups = [[picture(), picture(40, 40, 1)], picture(64, 50, 2)]
    prompt = model.prepare(groups, ["is there a red circle ?", "how many green square in the image ?"])
    model.fit_mean([prompt], source="noise")
    return model, prompt, SEEN + (BACKWARDS if model.processing.family.bidirectional_images else [])


@pytest.mark.parametrize("variant", EACH, ids=str)
@torch.no_grad()
def test_patched_scores_and_patterns_are_those_of_full_passes(variant: Any) -> None:
    model, prompt, _ = prepared(variant)
    names = ["blocks.1.attn.hook_pattern", "blocks.2.attn.hook_attn_scores"]
    _, donor = model.run_with_cache(prompt, names_filter=names, interventions=[Ablate(ROW, "zero")])
    cells = [[PatchIn(name, at="post_image")] for name in names]
    plan = Engine(model).plan(prompt, cells, donors={"clean": donor})
    assert not plan.explain().full_runs
    for cell, logits in zip(cells, plan.logits(), strict=True):
        expected = model(prompt, interventions=cell, donors={"clean": donor})[:, -1:]
        assert torch.allclose(logits, expected, atol=1e-5), cell
        assert (expected - model(prompt)[:, -1:]).abs().max() > 1e-5, cell


@torch.no_grad()
def test_features_that_come_in_again_are_no_reason_for_whole_passes() -> None:
    model, prompt, cells = prepared(next(variant for variant in EACH if variant.family == "qwen3_vl"))
    cells += AGAIN
    _, donor = model.run_with_cache(prompt, names_filter=["hook_merged_embed", "hook_deepstack_embed.*"])
    real = prompt.tensors["attention_mask"].bool()
    plan = Engine(model).plan(prompt, cells, donors={"clean": donor}, reads="all")
    assert not plan.explain().full_runs
    untouched = model(prompt)
    for cell, logits in zip(cells, plan.logits(), strict=True):
        expected = model(prompt, interventions=cell, donors={"clean": donor})
        assert torch.allclose(logits[real], expected[real], rtol=0, atol=1e-5), cell
        assert not cell or (expected - untouched)[real].abs().max() > 1e-3, cell


@pytest.mark.parametrize("variant", [*EACH, *TEXTS], ids=str)
@torch.no_grad()
def test_engine_equals_full_passes(variant: Any) -> None:
    model, prompt, cells = prepared(variant)
    real = prompt.tensors["attention_mask"].bool()
    plan = Engine(model).plan(prompt, cells, reads="all")
    for cell, logits in zip(cells, plan.logits(), strict=True):
        assert torch.allclose(logits[real], model(prompt, interventions=cell)[real], rtol=0, atol=1e-5), cell


@pytest.mark.parametrize("variant", [*EACH, *TEXTS[:2]], ids=str)
@torch.no_grad()
def test_engine_writes_the_same_texts(variant: Any) -> None:
    model, prompt, cells = prepared(variant)
    image = model.processing.family.image_token_id(model.hf.config)
    options = {"eos_token_id": None, "suppress_tokens": [0 if image is None else image]}
    model.generate(model.prepare(None, "how many ?"), max_new_tokens=2)  # what it leaves on the model must not matter
    texts = Engine(model).plan(prompt, cells).generate(max_new_tokens=4, options=options)
    for cell, text in zip(cells, texts, strict=True):
        assert text == model.generate(prompt, interventions=cell, max_new_tokens=4, options=options), cell
