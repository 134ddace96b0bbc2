"""The planted model answers every cell, and only its three heads matter."""

from pathlib import Path

import pytest
import torch
from transformers import LlavaForConditionalGeneration, LlavaProcessor

from sightlens.errors import StimulusError
from sightlens.zoo import planted
from sightlens.zoo.planted import GRID, HEAD, HEADS, LAYERS, PlantedCircuit

EVERY = [(row, column) for row in range(GRID) for column in range(GRID)]


@pytest.fixture(scope="module")
def built() -> planted.Planted:
    return planted.build()


def right(model: LlavaForConditionalGeneration, processor: LlavaProcessor) -> float:
    """Fraction of the cells that are named."""
    images = [planted.picture(row, column) for row, column in EVERY]
    inputs = processor(images=images, text=[planted.QUESTION] * len(images), return_tensors="pt")
    with torch.no_grad():
        said = model(**inputs).logits[:, -1].argmax(-1)
    named = [processor.tokenizer.convert_tokens_to_ids(planted.answer(row, column)) for row, column in EVERY]
    return float((said == torch.tensor(named)).float().mean())


def without(built: planted.Planted, layer: int, head: int) -> float:
    """Fraction of the cells that are named with one head's output set to zero."""

    def silence(module: torch.nn.Module, given: tuple) -> tuple:
        values = given[0].clone()
        values[..., head * HEAD : (head + 1) * HEAD] = 0
        return (values,)

    handle = built.model.model.language_model.layers[layer].self_attn.o_proj.register_forward_pre_hook(silence)
    try:
        return right(built.model, built.processor)
    finally:
        handle.remove()


def test_every_cell_is_named(built: planted.Planted) -> None:
    assert right(built.model, built.processor) == 1.0


def test_the_answer_ends(built: planted.Planted) -> None:
    inputs = built.processor(images=planted.picture(2, 1), text=planted.QUESTION, return_tensors="pt")
    said = built.model.generate(**inputs, max_new_tokens=4, do_sample=False)[0, inputs["input_ids"].shape[1] :]
    assert built.processor.tokenizer.convert_ids_to_tokens(said.tolist()) == ["<cell21>", "<eos>"]


@pytest.mark.parametrize("layer", range(LAYERS))
@pytest.mark.parametrize("head", range(HEADS))
def test_only_the_planted_heads_matter(built: planted.Planted, layer: int, head: int) -> None:
    score = without(built, layer, head)
    assert score <= 2 / 16 if (layer, head) in built.circuit.heads else score == 1.0


@pytest.mark.parametrize("row", range(GRID))
def test_the_heads_attend_where_they_should(built: planted.Planted, row: int) -> None:
    built.model.set_attn_implementation("eager")
    inputs = built.processor(images=planted.picture(row, 3), text=planted.QUESTION, return_tensors="pt")
    with torch.no_grad():
        patterns = built.model(**inputs, output_attentions=True).attentions
    built.model.set_attn_implementation("sdpa")
    visual = (inputs["input_ids"][0] == built.model.config.image_token_id).nonzero()[:, 0]
    thing = int(visual[row * GRID + 3])
    (g_layer, g_head), (r_layer, r_head), (o_layer, o_head) = built.circuit.heads
    grounding = patterns[g_layer][0, g_head]
    assert grounding[thing, thing] > 0.95
    assert all(grounding[other, 0] > 0.95 for other in visual.tolist() if other != thing)
    assert patterns[r_layer][0, r_head, -1, thing] > 0.95
    assert patterns[o_layer][0, o_head, -1, -1] > 0.95


def test_another_placement_works_too() -> None:
    circuit = PlantedCircuit(grounding=(1, 3), routing=(2, 0), readout=(3, 3))
    other = planted.build(circuit=circuit, seed=4)
    assert right(other.model, other.processor) == 1.0
    assert without(other, 1, 3) < 0.2
    assert without(other, 0, 1) == 1.0


def test_it_survives_a_folder(built: planted.Planted, tmp_path: Path) -> None:
    planted.save(built, tmp_path)
    model = LlavaForConditionalGeneration.from_pretrained(tmp_path).eval()
    assert right(model, LlavaProcessor.from_pretrained(tmp_path)) == 1.0


def test_a_cell_outside_the_grid_is_refused() -> None:
    with pytest.raises(StimulusError, match="expected row and column"):
        planted.picture(4, 0)
