"""The engine against a plain full forward pass, over families × interventions × sites × batches × ways of reading."""

from __future__ import annotations

import pytest
import torch
from tests.conftest import hooked, picture
from tests.tiny import DEFAULT, VARIANTS

from sightlens.engine import Engine
from sightlens.families.sites import Attention
from sightlens.interventions import Ablate, AblateHeads, Containerize, Knockout, PatchIn, Shuffle
from sightlens.model import fit_head_mean

SHORT, LONG = "is there a red circle ?", "how many green square in the image and where is the blue star ?"
CELLS = {
    "untouched": [],
    "ablate image row": [Ablate("image & row[0]", "mean")],
    "ablate nothing but text": [Ablate("question", "zero")],
    "noise deep inside": [Ablate("last", "noise", site="blocks.2.mlp.hook_post", seed=3)],
    "ablate keys": [Ablate("image & row[1]", "zero", site="blocks.1.attn.hook_k", heads=(1,))],
    "knockout of a window": [Knockout("post_image", "image", layers=(1, 2))],
    "knockout inside the image": [Knockout("image", "image & row[0]", layers=(0,))],
    "knockout of a head": [Knockout("last", "image", layers=(2,), heads=(1,))],
    "patch a head": [PatchIn("blocks.1.attn.hook_z", at="post_image", heads=(1,))],
    "patch a head everywhere": [PatchIn("blocks.0.attn.hook_z", heads=(0, 3))],
    "patch the last residual": [PatchIn("blocks.2.hook_resid_post", at="last")],
    "patch several layers": [PatchIn("blocks.*.hook_resid_mid", layers=(1, 2), at="image", mode="interpolate", alpha=0.5)],
    "shuffle": [Shuffle("image", scope="view", seed=1)],
    "containerize": [Containerize("object", seed=1)],
    "silence heads": [AblateHeads(((1, 0), (2, 3)))],
    "heads to their mean": [AblateHeads(((2, 1),), value="mean", at="post_image")],
    "after the last layer": [Ablate("last", "zero", site="ln_final.hook_out")],
    "two that overlap": [
        Ablate("object", "zero"),
        Knockout("post_image", "object", layers=(1,)),
        PatchIn("blocks.2.hook_mlp_out", at="last"),
    ],
    "shuffle behind the last MLP": [Shuffle("image | question", site="blocks.2.hook_mlp_out", seed=1)],
    "shuffle the last position": [Shuffle("question | last", site="blocks.1.hook_resid_post", seed=2)],
    "shuffle the end": [Knockout("last", "image", layers=(1,)), Shuffle("image | last", site="ln_final.hook_out", seed=1)],
    "before the merge": [Ablate("image & column[0]", "zero", site="hook_visual_embed")],
    "text embeddings": [Ablate("question", "zero", site="hook_embed")],
}


def asked(model, *, batch, seed=0):
    images = [picture(seed=seed), picture(32, 80, seed=seed + 1)][:batch]
    prompt = model.prepare(images, [SHORT, LONG][:batch])
    masks = []
    for image in images:
        mask = torch.zeros(image.shape[:2], dtype=torch.bool).numpy()
        mask[10:26, 20:44] = True
        masks.append(mask)
    return prompt.with_objects(masks)


def scene(model, *, batch=2):
    """A prompt, a donor run of the same layout, and what is needed by name."""
    prompt = asked(model, batch=batch)
    model.fit_mean([prompt], source="itself")
    fit_head_mean(model, [prompt])
    names = ["blocks.*.attn.hook_z", "blocks.*.hook_resid_*", "blocks.2.hook_mlp_out"]
    _, donor = model.run_with_cache(asked(model, batch=batch, seed=7), names_filter=names)
    return prompt, {"clean": donor}


def worst(prompt, got, expected):
    real = prompt.tensors["attention_mask"].bool()[:, -got.shape[1] :, None]
    return float(((got - expected[:, -got.shape[1] :]).abs() * real).max())


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("reads", ["last", "all"])
@torch.no_grad()
def test_logits_are_those_of_full_passes(any_model, batch, reads):
    prompt, donors = scene(any_model, batch=batch)
    plain = any_model(prompt)
    found = Engine(any_model).plan(prompt, list(CELLS.values()), donors=donors, reads=reads).logits()
    for (name, cell), logits in zip(CELLS.items(), found, strict=True):
        expected = any_model(prompt, interventions=cell, donors=donors)
        assert worst(prompt, logits, expected) < 1e-5, name
        assert cell == [] or worst(prompt, plain, expected) > 1e-4, name


@pytest.mark.parametrize("batch", [1, 2])
@torch.no_grad()
def test_every_site_that_can_be_patched(each_model, batch):
    model, prompt = each_model, asked(each_model, batch=batch)
    sites = {
        n: p.site for n, p in model.hook_dict.items() if {"position", "token"} & set(p.site.dims) and not isinstance(p.site.tap, Attention)
    }
    _, donor = model.run_with_cache(asked(model, batch=batch, seed=7), names_filter=list(sites))
    cells = [[PatchIn(name, at="image" if "token" in site.dims else "image | last")] for name, site in sites.items()]
    found = Engine(model).plan(prompt, cells, donors={"clean": donor}, reads="all").logits()
    for cell, logits in zip(cells, found, strict=True):
        assert worst(prompt, logits, model(prompt, interventions=cell, donors={"clean": donor})) < 1e-5, cell


@torch.no_grad()
def test_eager_attention_gives_the_same(model):
    eager = hooked(DEFAULT[0] if "llava" in model.processing.family.name else DEFAULT[1], attention="eager")
    prompt, donors = scene(eager)
    for cell, logits in zip(CELLS.values(), Engine(eager).plan(prompt, list(CELLS.values()), donors=donors).logits(), strict=True):
        assert worst(prompt, logits, eager(prompt, interventions=cell, donors=donors)) < 1e-5


@torch.no_grad()
def test_answers_are_read_where_they_are_predicted(model):
    scene(model)
    taught, other = (model.with_answers(asked(model, batch=2, seed=seed), "the circle is red") for seed in (0, 7))
    names = ["blocks.*.attn.hook_z", "blocks.*.hook_resid_*", "blocks.2.hook_mlp_out"]
    donors = {"clean": model.run_with_cache(other, names_filter=names)[1]}
    cells = [*CELLS.values(), [Ablate("answer", "zero", site="blocks.1.hook_resid_post")]]
    for cell, logits in zip(cells, Engine(model).plan(taught, cells, donors=donors, reads="answer").logits(), strict=True):
        expected = model(taught, interventions=cell, donors=donors)[:, -5:-1]
        assert logits.shape == expected.shape
        assert float((logits - expected).abs().max()) < 1e-5


@torch.no_grad()
def test_a_selector_says_where_logits_are_read(model):
    prompt, donors = scene(model, batch=1)
    cells = list(CELLS.values())
    chosen = prompt.layout.select("question | last").positions
    for cell, logits in zip(cells, Engine(model).plan(prompt, cells, donors=donors, reads="question | last").logits(), strict=True):
        expected = model(prompt, interventions=cell, donors=donors)[:, sorted(chosen)]
        assert logits.shape == expected.shape
        assert float((logits - expected).abs().max()) < 1e-5
    assert Engine(model).plan(asked(model, batch=2), [[]], reads="post_image & last").logits()[0].shape[:2] == (2, 1)


def test_generation_is_that_of_the_model(any_model):
    prompt, donors = scene(any_model)
    cells = [*CELLS.values(), [Knockout("post_image", "image", phases=("decode",))], [Knockout("post_image", "image", phases=("prefill",))]]
    texts = Engine(any_model).plan(prompt, cells, donors=donors).generate(max_new_tokens=6)
    for cell, found in zip(cells, texts, strict=True):
        assert found == any_model.generate(prompt, interventions=cell, donors=donors, max_new_tokens=6), cell
    assert len(set(map(tuple, texts))) > 8


def test_rows_that_end_early_end_as_they_do_alone(model):
    prompt, donors = scene(model)
    options = {"eos_token_id": list(range(10, 40))}
    texts = Engine(model).plan(prompt, list(CELLS.values()), donors=donors).generate(max_new_tokens=8, options=options)
    for cell, found in zip(CELLS.values(), texts, strict=True):
        assert found == model.generate(prompt, interventions=cell, donors=donors, max_new_tokens=8, options=options)
    assert len({len(text.split()) for found in texts for text in found}) > 1
    steps = []
    model.hf.lm_head.register_forward_pre_hook(lambda module, args: steps.append(len(args[0])))
    ends = []
    for cell in CELLS.values():
        steps.clear()
        Engine(model).plan(prompt, [cell], donors=donors).generate(max_new_tokens=8, options=options)
        ends.append(len(steps))
    steps.clear()
    Engine(model).plan(prompt, list(CELLS.values())[:6], donors=donors).generate(max_new_tokens=8, options=options)
    assert min(ends) < 9  # a batch stops when all of its rows have ended …
    assert len(steps) == max(ends[:6])  # … and not before


@torch.no_grad()
def test_cells_may_run_on_some_examples(model):
    prompt, donors = scene(model)
    cells = list(CELLS.values())
    chosen = [[0], [1], [0, 1]] * len(cells)
    examples = chosen[: len(cells)]
    plan = Engine(model).plan(prompt, cells, donors=donors, examples=examples)
    for cell, own, logits, texts in zip(cells, examples, plan.logits(), plan.generate(max_new_tokens=3), strict=True):
        expected = model(prompt, interventions=cell, donors=donors)[own, -1:]
        assert float((logits - expected).abs().max()) < 1e-5
        assert texts == [model.generate(prompt, interventions=cell, donors=donors, max_new_tokens=3)[k] for k in own]


def test_a_sliding_window_stays_one():
    model = hooked(VARIANTS[2])
    model.hf.config.text_config.sliding_window = 8
    model.hf.config.text_config.layer_types = ["sliding_attention"] * 3
    prompt, donors = scene(model)
    with torch.no_grad():
        before = hooked(VARIANTS[2])(prompt)
        assert worst(prompt, model(prompt), before) > 1e-3
        hidden = ("knockout of a head", "shuffle the end")  # the window hides the image from the last position
        cells = [cell for name, cell in CELLS.items() if name not in hidden]
        for cell, logits in zip(cells, Engine(model).plan(prompt, cells, donors=donors).logits(), strict=True):
            assert worst(prompt, logits, model(prompt, interventions=cell, donors=donors)) < 1e-5


def test_gradients_through_the_rows_are_those_of_a_full_pass(model):
    prompt = asked(model, batch=2)
    vector = torch.randn(32, generator=torch.Generator().manual_seed(0), requires_grad=True)
    cell = [Ablate("object", "mine", site="blocks.1.hook_resid_pre"), Knockout("last", "image & row[0]", layers=(2,))]
    weights = torch.randn(model.hf.lm_head.out_features, generator=torch.Generator().manual_seed(1))
    gradients = []
    for logits in (
        Engine(model).plan(prompt, [cell], donors={"mine": vector}).logits(gradients=True)[0],
        model(prompt, interventions=cell, donors={"mine": vector})[:, -1:],
    ):
        gradients += torch.autograd.grad((logits @ weights).sum(), vector)
    assert gradients[0].abs().max() > 1e-3
    assert torch.allclose(*gradients, rtol=1e-4, atol=1e-5)
    assert not Engine(model).plan(prompt, [cell], donors={"mine": vector}).logits()[0].requires_grad
