"""Generation equals HF's, token for token, and interventions act at absolute positions at every step."""

from __future__ import annotations

import pytest
import torch
from tests.conftest import picture, plain

from sightlens.engine import Engine
from sightlens.errors import InterventionError, PromptError
from sightlens.interventions import Ablate, Knockout

QUESTIONS = ["is there a red circle ?", "how many green square in the image and where is the blue star ?"]
LENGTH = 6


def hf_ids(model, prompt, **options):
    hf, inputs = plain(model), {name: tensor for name, tensor in prompt.tensors.items() if name != "position_ids"}
    torch.manual_seed(0)
    ids = hf.generate(**inputs, **{"do_sample": False, "max_new_tokens": LENGTH, **options})
    return ids[:, inputs["input_ids"].shape[1] :]


@pytest.mark.parametrize("options", [{}, {"use_cache": False}, {"do_sample": True, "temperature": 1.5}], ids=str)
def test_equals_hf_for_batches_and_several_images(any_model, options):
    single = any_model.prepare(picture(), QUESTIONS[0])
    batch = any_model.prepare([picture(), [picture(40, 90, 1), picture(64, 64, 2)], None], [*QUESTIONS, "is there a red circle ?"])
    assert len({layout.length for layout in batch.layouts}) == 1
    options = no_images(any_model, **options)
    for prompt in (single, batch):
        expected = hf_ids(any_model, prompt, **options)
        torch.manual_seed(0)
        assert torch.equal(any_model.generate_ids(prompt, max_new_tokens=LENGTH, options=options), expected)


@torch.no_grad()
def test_a_padded_batch_gives_the_logits_of_each_example_alone(any_model):
    groups = [picture(), [picture(40, 90, 1), picture(64, 64, 2)]]
    batch = any_model.prepare(groups, QUESTIONS)
    together = any_model(batch)
    for k, (group, question) in enumerate(zip(groups, QUESTIONS, strict=True)):
        alone = any_model(any_model.prepare(group, question))[0]
        assert torch.allclose(together[k, -alone.shape[0] :], alone, atol=2e-5)


def no_images(model, **options):
    """Options of generation under which a random model does not write an image token, which has no image."""
    image = model.processing.family.image_token_id(model.hf.config)
    return {**options, **({} if image is None else {"suppress_tokens": [image]})}


def greedy_by_full_passes(model, prompt, interventions):
    """Every token from a forward pass over the whole sequence so far: no cache anywhere."""
    ids = []
    for _ in range(LENGTH):
        logits = model(prompt, interventions=interventions)[0, -1]
        logits[no_images(model).get("suppress_tokens", [])] = -torch.inf
        ids.append(int(logits.argmax()))
        prompt = prompt.with_answers([ids[-1:]], [["x"]])
    return ids


@pytest.mark.parametrize(
    "interventions",
    [
        [Knockout("post_image", "image", layers=(1, 2))],
        [Knockout("post_image", "image", heads=(0, 3))],
        [Knockout("last", "image & row[0]", layers=(0,))],
        [Ablate("image & row[1]", "zero"), Knockout("post_image", "image & column[0]")],
        [Ablate("image", "noise", seed=3)],
        [Ablate("answer", "zero", site="blocks.1.hook_attn_out")],
        [Ablate("post_image", "zero", site="blocks.1.attn.hook_z", heads=(1,))],
    ],
    ids=lambda value: str(value[0])[:50],
)
@torch.no_grad()
def test_cached_decoding_under_interventions_equals_full_passes(each_model, interventions):
    model = each_model
    prompt = model.prepare(picture(), QUESTIONS[0])
    expected = greedy_by_full_passes(model, prompt, [] if "answer" in str(interventions[0]) else interventions)
    options = no_images(model, eos_token_id=None)
    got = model.generate_ids(prompt, interventions=interventions, max_new_tokens=LENGTH, options=options)
    if "answer" in str(interventions[0]):
        uncached = model.generate_ids(prompt, interventions=interventions, max_new_tokens=LENGTH, options={**options, "use_cache": False})
        assert torch.equal(got, uncached)
        assert got[0].tolist() != expected
        assert got[0, 0] == expected[0]
    else:
        assert got[0].tolist() == expected


@torch.no_grad()
def test_decode_phase_alone_leaves_the_first_token(model):
    prompt = model.prepare(picture(), QUESTIONS[0])
    plain = model.generate_ids(prompt, max_new_tokens=LENGTH, options={"eos_token_id": None})
    cut = [Knockout("post_image", "image", phases=("decode",))]
    got = model.generate_ids(prompt, interventions=cut, max_new_tokens=LENGTH, options={"eos_token_id": None})
    assert got[0, 0] == plain[0, 0]
    with pytest.raises(InterventionError, match="touched none"):
        model(prompt, interventions=cut)


@pytest.mark.parametrize(
    "own",
    [
        {"num_beams": 3},
        {"num_beams": 2, "num_return_sequences": 2},
        {"return_dict_in_generate": True, "output_scores": True},
        {"cache_implementation": "static"},
        {"use_cache": False},
        {"do_sample": True, "temperature": 2.0},
        {"prompt_lookup_num_tokens": 2},
    ],
    ids=str,
)
@torch.no_grad()
def test_what_a_checkpoint_prefers_does_not_reach_rows(model, own):
    prompt = model.prepare([picture(), picture(40, 90, 1)], QUESTIONS)
    cells = [[Ablate("image", "zero")], [Knockout("post_image", "image")]]
    options = no_images(model, eos_token_id=None)
    expected = [model.generate(prompt, interventions=cell, max_new_tokens=LENGTH, options=options) for cell in cells]
    assert expected[0] != expected[1]
    model.hf.generation_config.update(**own)
    assert [model.generate(prompt, interventions=cell, max_new_tokens=LENGTH, options=options) for cell in cells] == expected
    assert Engine(model).plan(prompt, cells).generate(max_new_tokens=LENGTH, options=options) == expected


def test_beams_are_refused(model):
    with pytest.raises(PromptError, match="one row per example"):
        model.generate(model.prepare(picture(), QUESTIONS[0]), options={"num_beams": 2})


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@torch.no_grad()
def test_bfloat16_agrees_with_hf(any_model, attention):
    model = any_model
    model.hf.set_attn_implementation(attention)
    model.hf.to(torch.bfloat16)
    prompt = model.prepare(picture(), QUESTIONS[0])
    logits = model(prompt)
    assert torch.equal(logits, plain(model)(**prompt.tensors).logits)
    stepwise, _ = model.run_with_cache(prompt, names_filter="blocks.*.attn.hook_pattern")
    exact = plain(model).float()(**prompt.tensors).logits
    first, second = exact.topk(2).values.unbind(-1)
    clear = first - second > 3 * (logits - exact).abs().amax(-1)  # no tie within what bfloat16 makes of HF's own numbers
    assert clear.sum() >= 5
    assert torch.equal(stepwise.argmax(-1)[clear], logits.argmax(-1)[clear])
