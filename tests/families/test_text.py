"""Language models without pictures, and lists whose items have names."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.conftest import hooked, picture, plain
from tests.families.test_preparation import words
from tests.tiny import TEXT_TEMPLATE, TEXTS, VARIANTS, hf_model, tokenizer
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from sightlens.errors import FamilyError, PromptError, SelectorError
from sightlens.families import ItemList
from sightlens.families.items import mark_text
from sightlens.interventions import Ablate, Knockout, PatchIn
from sightlens.layout import Layout, parse
from sightlens.model import HookedVLM, hook_contract, verify_layout

ALL = pytest.mark.parametrize("variant", TEXTS, ids=str)
MODELS = {variant: hooked(variant) for variant in TEXTS}
FRUIT = ItemList(("red circle", "star", "blue square"), "how many ?", separator=" , ", opening="image : ", closing=" .")
LENGTH = 5


@ALL
@torch.no_grad()
def test_logits_hooks_and_residuals_are_hfs(variant: Any) -> None:
    model, prompt = MODELS[variant], MODELS[variant].prepare(None, FRUIT)
    out = hooked(variant, attention="eager").hf(**prompt.tensors, output_hidden_states=True, output_attentions=True)
    logits, cache = hooked(variant, attention="eager").run_with_cache(prompt)
    assert torch.allclose(logits, out.logits, atol=1e-5)
    assert torch.equal(model(prompt), plain(model)(**prompt.tensors).logits)
    for layer in range(3):
        assert torch.allclose(cache[f"blocks.{layer}.hook_resid_pre"], out.hidden_states[layer], atol=1e-5)
        assert torch.allclose(cache[f"blocks.{layer}.attn.hook_pattern"], out.attentions[layer], atol=1e-6)
    assert torch.equal(cache["hook_merged_embed"], cache["hook_embed"])
    assert [check for check in hook_contract(model, prompt) if not check.passed] == []
    assert verify_layout(model, prompt) == ()
    assert all(check.passed for check in model.self_check())


@ALL
@torch.no_grad()
def test_interventions_act_and_cached_decoding_agrees(variant: Any) -> None:
    model, prompt = MODELS[variant], MODELS[variant].prepare(None, FRUIT)
    longer = model.prepare(None, ItemList(FRUIT.items[::-1], "how many ?", separator=" , ", opening="image : ", closing=" ."))
    _, donor = model.run_with_cache(longer, names_filter=["hook_merged_embed", "blocks.*.hook_resid_post"])
    options = {"eos_token_id": None}
    for change in (
        Ablate("item[1]", "zero"),
        Ablate("separator", "noise"),
        Knockout("last", "item", layers=(1,)),
        PatchIn("blocks.*.hook_resid_post", at="item[-1]"),
        PatchIn("hook_merged_embed", at="context"),
    ):
        changed = model(prompt, interventions=[change], donors={"clean": donor})
        assert (changed - model(prompt)).abs().max() > 1e-3
        ids, step = [], prompt
        for _ in range(LENGTH):
            ids.append(int(model(step, interventions=[change], donors={"clean": donor})[0, -1].argmax()))
            step = step.with_answers([ids[-1:]], [["x"]])
        got = model.generate_ids(prompt, interventions=[change], donors={"clean": donor}, max_new_tokens=LENGTH, options=options)
        assert got[0].tolist() == ids
    same = model(prompt, interventions=[PatchIn("hook_merged_embed")], donors={"clean": model.run_with_cache(prompt)[1]})
    assert torch.equal(same, model(prompt))


@ALL
@torch.no_grad()
def test_generation_and_padded_batches_are_hfs(variant: Any) -> None:
    model = MODELS[variant]
    batch = model.prepare(None, [FRUIT, "where is the star ?"])
    for options in ({}, {"use_cache": False}, {"do_sample": True, "temperature": 1.5}):
        torch.manual_seed(0)
        expected = model.hf.generate(**batch.generation_inputs(), **{"do_sample": False, "max_new_tokens": LENGTH, **options})
        torch.manual_seed(0)
        assert torch.equal(model.generate_ids(batch, max_new_tokens=LENGTH, options=options), expected[:, batch.layouts[0].length :])
    together = model(batch)
    for k, text in enumerate((FRUIT, "where is the star ?")):
        alone = model(model.prepare(None, text))[0]
        assert torch.allclose(together[k, -alone.shape[0] :], alone, atol=2e-5)


@pytest.mark.parametrize("order", ["list_first", "question_first"])
@pytest.mark.parametrize("template", ["chat", "raw"])
def test_items_separators_context_and_question_have_names(order: Any, template: Any) -> None:
    model = MODELS[TEXTS[0]]
    listed = ItemList(FRUIT.items, "how many ?", separator=" , ", opening="image : ", closing=" .", order=order)
    layout = model.prepare(None, listed, template=template).layout
    assert words(layout, "item") == "circle star square"
    assert words(layout, "item[0]") == "circle"
    assert words(layout, "item[-1]") == "square"
    assert words(layout, "separator") == ", ,"
    assert layout.select("separator[1]").positions[0] == layout.select("item[1]").positions[0] + 1
    assert words(layout, "context") == "image : red circle , star , blue square ."
    assert words(layout, "question") == "how many ?"
    before = layout.select("context").positions[-1] < layout.select("question").positions[0]
    assert before == (order == "list_first")
    assert words(layout, "last") == ("ASSISTANT" if template == "chat" else "." if order == "question_first" else "?")
    assert Layout.from_dict(layout.to_dict()) == layout
    assert layout.select("text").count == layout.length - layout.select("special").count
    assert str(parse("item[0] | separator[list]")) == "item[0] | separator[list]"
    with pytest.raises(SelectorError, match="3 items"):
        layout.select("item[3]")
    with pytest.raises(SelectorError, match="image"):
        layout.select("post_image")


def test_a_list_beside_a_picture_leaves_the_picture_its_own_span() -> None:
    model = hooked(VARIANTS[4])
    layout = model.prepare(picture(), FRUIT, system="you are helpful").layout
    assert words(layout, "item") == "circle star square"
    assert words(layout, "separator[list]") == ", ,"
    assert words(layout, "separator[start]") == "<img>"
    assert words(layout, "post_image").startswith("image : red circle")
    assert words(layout, "system") == "you are helpful"
    two = model.prepare([picture(), None], [FRUIT, "how many ?"])
    assert words(two.layouts[0], "question") == words(two.layouts[1], "question") == "how many ?"


def bytes_tokenizer(merges: list[tuple[str, str]]) -> PreTrainedTokenizerFast:
    """A byte-level BPE, whose tokens take the space before them."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: k for k, token in enumerate(dict.fromkeys([*letters, *("".join(pair) for pair in merges)]))}
    core = Tokenizer(models.BPE(vocab, merges))
    core.pre_tokenizer, core.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=core)


def marked(listed: ItemList, merges: list[tuple[str, str]]) -> list[tuple[str, str]]:
    """Each segment of a list's text and its tokens."""
    fast = bytes_tokenizer(merges)
    encoded = fast(listed.text, return_offsets_mapping=True)
    segments = mark_text(encoded["offset_mapping"], listed.text, listed.spans())
    return [(type(s).__name__, fast.decode(encoded["input_ids"][s.start : s.stop])) for s in segments]


def test_items_of_several_sub_tokens_and_spaces_that_belong_to_the_next_word() -> None:
    listed = ItemList(("fig", "kiwi", "fig"), "How many?", opening="List: ")
    found = marked(listed, [("Ġ", "k"), ("Ġk", "i"), ("w", "i")])
    assert found == [
        ("Text", "How many?"),
        ("Text", "List: fig, kiwi, fig."),
        ("Item", "fig"),
        ("Separator", ","),
        ("Item", " kiwi"),
        ("Separator", ","),
        ("Item", "fig"),
    ]
    lines = ItemList(("fig", "kiwi"), "How many?", separator="\n")
    assert ("Separator", "\n") in marked(lines, [])
    with pytest.raises(PromptError, match="another separator"):
        marked(ItemList(("fig", "kiwi"), "How many?", separator=" "), [("Ġ", "k")])
    with pytest.raises(PromptError, match="another separator"):
        marked(ItemList(("fi.", "kiwi"), "How many?", separator=","), [(".", ",")])


@settings(max_examples=60, deadline=None)
@given(
    items=st.lists(st.sampled_from(["fig", "kiwi", "sour plum", "a"]), min_size=1, max_size=9),
    separator=st.sampled_from([", ", ",", " and ", "\n", " | ", "; "]),
    opening=st.sampled_from(["", "Items: ", "("]),
    order=st.sampled_from(["list_first", "question_first"]),
)
def test_spans_are_what_they_say(items: list[str], separator: str, opening: str, order: Any) -> None:
    listed = ItemList(tuple(items), "How many?", separator=separator, opening=opening, order=order)
    parts = [(listed.text[start:stop], what) for start, stop, what in listed.spans()]
    assert [text for text, what in parts if what == "item"] == items
    assert [text for text, what in parts if what == "separator"] == [separator] * (len(items) - 1)
    assert ("How many?", "question") in parts
    assert (opening + separator.join(items) + ".", "context") in parts


@pytest.mark.parametrize(
    "fields",
    [{"items": ()}, {"items": (" a",)}, {"items": ("",)}, {"separator": ""}, {"order": "first"}, {"opening": " a "}],
    ids=str,
)
def test_lists_that_cannot_be(fields: dict[str, Any]) -> None:
    with pytest.raises((PromptError, TypeError)):
        _ = ItemList(**{"items": ("a",), "question": "how many ?", **fields}).text


def test_pictures_and_boxes_are_refused() -> None:
    model = MODELS[TEXTS[0]]
    with pytest.raises(PromptError, match="text alone"):
        model.prepare(picture(), "where ?")
    with pytest.raises(FamilyError, match="text alone"):
        _ = model.processing.box_format


@ALL
def test_checkpoints_load_strictly_and_again_from_hf(variant: Any, tmp_path: Any) -> None:
    hf, fast = hf_model(variant), tokenizer(TEXT_TEMPLATE, "text")
    hf.save_pretrained(tmp_path)
    fast.save_pretrained(tmp_path)
    loaded = HookedVLM.from_pretrained(tmp_path)
    wrapped = HookedVLM.from_hf(hf, fast)
    prompt = wrapped.prepare(None, FRUIT)
    assert torch.equal(loaded(prompt), wrapped(prompt))
