"""The model while it is trained: the Hugging Face module itself, run on packed questions."""

from dataclasses import dataclass

import torch
from einops import rearrange
from jaxtyping import Float
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers import InternVLForConditionalGeneration, LlavaForConditionalGeneration, PreTrainedModel

from sightlens.zoo.batches import Batch, attention_mask
from sightlens.zoo.recipe import Recipe, Sizes, internvl_config, llava_config, tokenizer_for

OVERVIEW_LAYER, NOUN_LAYER = 2, 3
NEIGHBOURS = (
    ((-1, 0), (1, 0), (0, -1), (0, 1)),
    ((-1, -1), (-1, 1), (1, -1), (1, 1)),
    ((-2, 0), (2, 0), (0, -2), (0, 2)),
)


@dataclass(frozen=True, eq=False)
class Reading:
    """What a forward pass returns: logits where there is something to predict, and visual tokens for the helper heads."""

    logits: Float[Tensor, "supervised vocabulary"]
    overview: Float[Tensor, "batch grid width"]
    nouns: Float[Tensor, "questions width"]


def make_network(recipe: Recipe, *, seed: int) -> PreTrainedModel:
    """A freshly initialised Hugging Face model of the recipe."""
    torch.manual_seed(seed)
    tokenizer = tokenizer_for(recipe)
    if recipe.name == "llava":
        network = LlavaForConditionalGeneration(llava_config(recipe.sizes, tokenizer))
    else:
        network = InternVLForConditionalGeneration(internvl_config(recipe.sizes, tokenizer))
    start_weights(network)
    start_tower(network, recipe.sizes)
    return network.train()


@torch.no_grad()
def start_weights(network: PreTrainedModel) -> None:
    """Scale every weight by its fan-in; patches start at half strength, so that positions show."""
    for name, module in network.named_modules():
        if isinstance(module, nn.Linear | nn.Conv2d):
            gain = 0.5 if isinstance(module, nn.Conv2d) else 0.2 if name == "lm_head" else 1.0
            nn.init.normal_(module.weight, std=gain * module.weight[0].numel() ** -0.5)
    nn.init.normal_(network.get_input_embeddings().weight, std=1.0)  # pyright: ignore[reportArgumentType]  # an nn.Embedding


@torch.no_grad()
def start_tower(network: PreTrainedModel, sizes: Sizes) -> None:
    """Let tower positions start as waves, and the heads of its first layers look at fixed neighbours of each patch."""
    side = sizes.view // sizes.patch
    attention = []
    for name, parameter in network.named_parameters():
        if "position_embedding" in name:
            parameter[..., 1:, :] = waves(side, sizes.tower_width)
    for name, module in network.model.vision_tower.named_modules():
        if name.endswith(("self_attn", "attention")) and isinstance(module.q_proj, nn.Linear):
            attention.append(module)
    for layer, offsets in zip(attention, NEIGHBOURS, strict=False):
        look_at(layer.q_proj, layer.k_proj, offsets)


def look_at(query: nn.Linear, key: nn.Linear, offsets: tuple[tuple[int, int], ...]) -> None:
    """Set one layer's queries and keys so that head h looks (down, right) by offsets[h], using the position waves."""
    width = key.weight.shape[1]
    head, quarter = width // len(offsets), width // 4
    picked = torch.linspace(1, quarter - 1, head // 4).round().long()
    turns = frequencies(quarter)[picked]
    for number, offset in enumerate(offsets):
        rows = slice(number * head, (number + 1) * head)
        looked, asked = torch.zeros(head, width), torch.zeros(head, width)
        for axis in (0, 1):
            sine = axis * 2 * quarter + picked
            cosine = sine + quarter
            first = torch.arange(len(picked)) + axis * 2 * len(picked)
            second = first + len(picked)
            looked[first, sine] = looked[second, cosine] = 1.0
            angle = turns * offset[axis]
            asked[first, sine], asked[first, cosine] = angle.cos(), angle.sin()
            asked[second, sine], asked[second, cosine] = -angle.sin(), angle.cos()
        key.weight[rows], query.weight[rows] = looked, asked


def frequencies(number: int) -> Float[Tensor, "number"]:
    """Radians per patch, from half a turn down to a thirty-second."""
    return torch.pi * 2.0 ** -torch.linspace(0, 4, number)


def waves(side: int, width: int) -> Float[Tensor, "patches width"]:
    """Sines and cosines of row and column at several frequencies: the first values of the learnt position embedding."""
    turns = torch.arange(side)[:, None] * frequencies(width // 4)
    line = torch.cat([turns.sin(), turns.cos()], dim=-1)
    rows, columns = line[:, None].expand(-1, side, -1), line[None].expand(side, -1, -1)
    return 2**0.5 * torch.cat([rows, columns], dim=-1).flatten(0, 1)


def see(network: PreTrainedModel, batch: Batch) -> Float[Tensor, "batch visual width"]:
    """Projected visual tokens of each picture, views one after the other."""
    tokens = network.model.get_image_features(pixel_values=batch.pixels, return_dict=True).pooler_output
    return rearrange(torch.stack(list(tokens)), "(batch view) token width -> batch (view token) width", batch=len(batch.ids))


def read(network: PreTrainedModel, batch: Batch, visual: Float[Tensor, "batch visual width"]) -> Reading:
    """Run the language model on the packed questions."""
    words = network.get_input_embeddings()(batch.ids)
    image = (batch.ids == network.config.image_token_id)[..., None]
    merged = words.masked_scatter(image, visual)
    tapped: dict[int, Tensor] = {}
    handles = [_tap(network, layer, tapped) for layer in (OVERVIEW_LAYER, NOUN_LAYER)]
    hidden = network.model.language_model(
        inputs_embeds=merged,
        attention_mask=attention_mask(batch.blocks),
        position_ids=batch.positions,
        use_cache=False,
    ).last_hidden_state
    for handle in handles:
        handle.remove()
    side = network.config.image_seq_length
    last = int(image[0].nonzero()[-1, 0]) + 1
    nouns = tapped[NOUN_LAYER][batch.asked.row, batch.asked.place]
    return Reading(network.lm_head(hidden[batch.weight > 0]), tapped[OVERVIEW_LAYER][:, last - side : last], nouns)


def _tap(network: PreTrainedModel, layer: int, tapped: dict[int, Tensor]) -> RemovableHandle:
    def keep(module: nn.Module, given: tuple, output: Tensor) -> None:
        tapped[layer] = output

    return network.model.language_model.layers[layer].register_forward_hook(keep)
