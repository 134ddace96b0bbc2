r"""A LLaVA whose circuit is set by hand, so that a method can be asked for the heads, layers and tokens that are truly at work.

Task: a black picture of 4 x 4 cells, one of them white; "USER: <image>\nwhere ? ASSISTANT:" is answered by the name of the
white cell, `<cell21>` for row 2, column 1, then <eos>. Three heads do all of it:

- grounding (layer 0): the object's visual token, and no other, attends to itself and writes its row and column into the
  `found` subspace; every other token attends to <bos>, whose value is zero;
- routing (layer 2): the last token attends to the token that carries `found` and copies it into its own `moved` subspace;
- readout (layer 3): the last token attends to itself and writes `moved` into `answer`, the only subspace the output reads.

All other heads, the MLPs and the vision layers are random and small. Each subspace is a range of residual dimensions; the
`constant` dimension is large at every token, which keeps every norm nearly the identity. The rotary base is large and queries
and keys use the slowest rotary pairs, so positions do not matter.
"""

from pathlib import Path
from typing import NamedTuple

import torch
from PIL import Image
from torch import Tensor, nn
from transformers import LlavaConfig, LlavaForConditionalGeneration, LlavaProcessor, PreTrainedTokenizerFast
from transformers.models.llava.image_processing_pil_llava import LlavaImageProcessorPil

from sightlens.errors import StimulusError
from sightlens.zoo.vocabulary import word_level

GRID, PATCH = 4, 8
WIDTH, HEADS, HEAD, LAYERS = 64, 4, 16, 4
TOWER = 32
QUESTION = "USER: <image>\nwhere ? ASSISTANT:"
SPECIALS = ("<pad>", "<unk>", "<bos>", "<eos>", "<image>")
CELLS = tuple(f"<cell{row}{column}>" for row in range(GRID) for column in range(GRID))
WORDS = ("USER", "ASSISTANT", ":", "where", "?")
CONSTANT, LOUD, MATCH, REST = 20.0, 12.0, 7, 6
SUBSPACES = {
    "constant": slice(0, 1),
    "bos": slice(1, 2),
    "last": slice(2, 3),
    "object": slice(3, 4),
    "grounded": slice(4, 5),
    "routed": slice(5, 6),
    "done": slice(6, 7),
    "place": slice(8, 16),
    "found": slice(16, 24),
    "moved": slice(24, 32),
    "answer": slice(32, 40),
}


class PlantedCircuit(NamedTuple):
    """The heads that are at work, as (layer, head), and the residual dimensions they read and write."""

    grounding: tuple[int, int] = (0, 1)
    routing: tuple[int, int] = (2, 2)
    readout: tuple[int, int] = (3, 0)
    subspaces: dict[str, slice] = SUBSPACES

    @property
    def heads(self) -> tuple[tuple[int, int], ...]:
        """The three heads in the order in which they act."""
        return self.grounding, self.routing, self.readout


class Planted(NamedTuple):
    """The model with its processor and the truth about it."""

    model: LlavaForConditionalGeneration
    processor: LlavaProcessor
    circuit: PlantedCircuit


def build(*, circuit: PlantedCircuit | None = None, noise: float = 0.02, seed: int = 0) -> Planted:
    """Make the planted model; `noise` scales the weights of everything that is not part of the circuit."""
    circuit = circuit or PlantedCircuit()
    processor = _processor()
    torch.manual_seed(seed)
    model = LlavaForConditionalGeneration(_config(processor.tokenizer)).eval()
    with torch.no_grad():
        _quiet(model, noise)
        _tower(model)
        _projector(model)
        _words(model, processor.tokenizer)
        _head(model, circuit.grounding, query="object", key="object", moves={"place": "found", "object": "grounded"})
        _head(model, circuit.routing, query="last", key="grounded", moves={"found": "moved", "grounded": "routed"})
        _head(model, circuit.readout, query="last", key="routed", moves={"moved": "answer"})
    return Planted(model, processor, circuit)


def save(planted: Planted, folder: Path) -> None:
    """Write it as a Hugging Face checkpoint folder."""
    planted.model.save_pretrained(folder)
    planted.processor.save_pretrained(folder)


def picture(row: int, column: int) -> Image.Image:
    """A black picture, 32 pixels wide and high, whose cell at this row and column is white."""
    if not (0 <= row < GRID and 0 <= column < GRID):
        raise StimulusError(f"row and column from 0 to {GRID - 1}", f"{row} and {column}", "Choose a cell of the grid.")
    image = Image.new("RGB", (GRID * PATCH, GRID * PATCH))
    image.paste((255, 255, 255), (column * PATCH, row * PATCH, (column + 1) * PATCH, (row + 1) * PATCH))
    return image


def answer(row: int, column: int) -> str:
    """The token that names a cell."""
    return f"<cell{row}{column}>"


def _head(model: LlavaForConditionalGeneration, place: tuple[int, int], *, query: str, key: str, moves: dict[str, str]) -> None:
    """Set one head: tokens with the query mark attend to tokens with the key mark, all others to <bos>."""
    layer, head = place
    attention = model.model.language_model.layers[layer].self_attn
    rows = slice(head * HEAD, (head + 1) * HEAD)
    for weight in (attention.q_proj.weight, attention.k_proj.weight, attention.v_proj.weight):
        weight[rows] = 0
    attention.o_proj.weight[:, rows] = 0
    attention.q_proj.weight[head * HEAD + MATCH, SUBSPACES[query]] = LOUD
    attention.k_proj.weight[head * HEAD + MATCH, SUBSPACES[key]] = LOUD
    attention.q_proj.weight[head * HEAD + REST, SUBSPACES["constant"]] = LOUD / CONSTANT
    attention.k_proj.weight[head * HEAD + REST, SUBSPACES["bos"]] = LOUD / 2
    free = head * HEAD
    for source, target in moves.items():
        size = SUBSPACES[source].stop - SUBSPACES[source].start
        attention.v_proj.weight[free : free + size, SUBSPACES[source]] = torch.eye(size)
        attention.o_proj.weight[SUBSPACES[target], free : free + size] = torch.eye(size)
        free += size


def _quiet(model: LlavaForConditionalGeneration, noise: float) -> None:
    """Random weights whose contribution to the residual is small, and norms that hardly change their input."""
    language = model.model.language_model
    loudness = (CONSTANT**2 / WIDTH) ** 0.5
    for layer in language.layers:
        for name, module in layer.named_modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=noise if name.endswith(("o_proj", "down_proj")) else WIDTH**-0.5)
                if not name.endswith(("o_proj", "down_proj")):
                    module.weight[:, SUBSPACES["constant"]] = 0
        layer.input_layernorm.weight.fill_(loudness)
        layer.post_attention_layernorm.weight.fill_(loudness)
    language.norm.weight.fill_(loudness)
    for layer in model.model.vision_tower.encoder.layers:
        for module in (layer.self_attn.out_proj, layer.mlp.fc2):
            nn.init.normal_(module.weight, std=noise / 10)
            module.bias.zero_()


def _tower(model: LlavaForConditionalGeneration) -> None:
    """Patch brightness in dimension 1, row and column as one-hot vectors in 2 to 9, a constant in 0."""
    tower = model.model.vision_tower
    patches = tower.embeddings.patch_embedding.weight
    patches.zero_()
    patches[1] = 1 / patches[1].numel()
    positions = tower.embeddings.position_embedding.weight
    positions.zero_()
    positions[:, 0] = CONSTANT
    for row in range(GRID):
        for column in range(GRID):
            positions[1 + row * GRID + column, [2 + row, 2 + GRID + column]] = 1.0
    usual = positions[1]
    tower.pre_layrnorm.weight.fill_(usual.std(correction=0))
    tower.pre_layrnorm.bias.fill_(usual.mean())


def _projector(model: LlavaForConditionalGeneration) -> None:
    """Turn brightness into an object mark of 0 or 1, and pass the place on; GELU is the identity far above zero."""
    first, second = model.model.multi_modal_projector.linear_1, model.model.multi_modal_projector.linear_2
    for tensor in (first.weight, first.bias, second.weight, second.bias):
        tensor.zero_()
    for unit, shift in ((0, 0.0), (1, 5.0)):
        first.weight[unit, 1] = 10.0
        first.bias[unit] = -5.0 - shift
        second.weight[SUBSPACES["object"], unit] = 0.2 - 0.4 * unit
    start, stop = SUBSPACES["place"].start, SUBSPACES["place"].stop
    first.weight[start:stop, 2 : 2 + 2 * GRID] = torch.eye(2 * GRID)
    first.bias[start:stop] = 20.0
    second.weight[start:stop, start:stop] = torch.eye(2 * GRID)
    second.bias[start:stop] = -20.0
    second.bias[SUBSPACES["constant"]] = CONSTANT


def _words(model: LlavaForConditionalGeneration, tokenizer: PreTrainedTokenizerFast) -> None:
    """Embeddings with their marks, and an output that reads `answer` and `done` only."""
    words, output = model.model.language_model.embed_tokens.weight, model.lm_head.weight
    nn.init.normal_(words, std=0.1)
    words[:, : SUBSPACES["answer"].stop] = 0
    words[:, SUBSPACES["constant"]] = CONSTANT
    output.zero_()
    for mark, token in (("bos", "<bos>"), ("last", ":")):
        words[tokenizer.convert_tokens_to_ids(token), SUBSPACES[mark]] = 1.0
    output[tokenizer.eos_token_id, SUBSPACES["done"]] = 30.0  # pyright: ignore[reportArgumentType]  # one id
    named: Tensor = output[:, SUBSPACES["answer"]]
    for row in range(GRID):
        for column in range(GRID):
            token = tokenizer.convert_tokens_to_ids(answer(row, column))
            words[token, SUBSPACES["done"]] = 1.0
            named[token, [row, GRID + column]] = 10.0


def _config(tokenizer: PreTrainedTokenizerFast) -> LlavaConfig:
    vision = {
        "model_type": "clip_vision_model",
        "hidden_size": TOWER,
        "intermediate_size": TOWER,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "image_size": GRID * PATCH,
        "patch_size": PATCH,
    }
    text = {
        "model_type": "llama",
        "hidden_size": WIDTH,
        "intermediate_size": WIDTH,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": HEADS,
        "head_dim": HEAD,
        "vocab_size": len(tokenizer),
        "max_position_embeddings": 256,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e8},
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    return LlavaConfig(
        vision_config=vision,
        text_config=text,
        image_token_index=tokenizer.convert_tokens_to_ids("<image>"),  # pyright: ignore[reportArgumentType]  # one id for one token
        image_seq_length=GRID**2,
        vision_feature_layer=-1,
    )


def _processor() -> LlavaProcessor:
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=word_level(SPECIALS, WORDS, whole=CELLS, bos="<bos>"),
        bos_token="<bos>",
        eos_token="<eos>",
        unk_token="<unk>",
        pad_token="<pad>",
        extra_special_tokens={"image_token": "<image>"},
        padding_side="left",
        model_input_names=["input_ids", "attention_mask"],
    )
    side = GRID * PATCH
    pixels = LlavaImageProcessorPil(do_pad=True, size={"shortest_edge": side}, crop_size={"height": side, "width": side})
    return LlavaProcessor(
        image_processor=pixels,
        tokenizer=tokenizer,
        patch_size=PATCH,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
    )
