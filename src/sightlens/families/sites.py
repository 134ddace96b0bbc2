"""Where a hook name lives in an HF model: sites as data.

A site says which module carries an activation, how it is tapped there, and what its dimensions are called. The model
package turns sites into working hook points; a family only lists them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

from jaxtyping import Int
from torch import Tensor
from transformers import PreTrainedConfig

AttentionTensor = Literal["rot_q", "rot_k", "attn_mask", "attn_scores", "pattern"]

RESIDUAL = ("batch", "position", "d_model")
HEADS = ("batch", "position", "head", "d_head")
HEAD_RESULT = ("batch", "position", "head", "d_model")
NEURONS = ("batch", "position", "d_mlp")
PATTERN = ("batch", "head", "query", "key")
KEYS = ("batch", "key", "head", "d_head")
VISUAL = ("view", "token", "d_model")
PIXELS = ("view", "channel", "height", "width")


@dataclass(frozen=True)
class Input:
    """The tensor a module receives."""

    argument: str = "hidden_states"
    heads: int | None = None
    shared: bool = False
    """The caller goes on using the same tensor (a residual stream), so a write must reach it in place."""
    first: bool = False
    """Whether it acts before the other hooks on the same input."""


@dataclass(frozen=True)
class Output:
    """The tensor a module returns."""

    index: int | None = None
    """Element of the returned tuple, None when the module returns a bare tensor."""
    heads: int | None = None
    scale: str | None = None
    """Path of a parameter, relative to the layer, that multiplies the output before it joins the residual stream."""
    part: tuple[int, int] | None = None
    """``(k, n)``: the k-th of n equal parts that a fused projection returns side by side."""
    last: bool = False
    """Whether it acts after the other hooks on the same output."""


@dataclass(frozen=True)
class Attention:
    """A tensor that exists only inside the attention function."""

    tensor: AttentionTensor


@dataclass(frozen=True)
class HeadResult:
    """Each head's own contribution to the residual stream, ``z @ W_O`` without bias; made only when asked for.

    Where a norm stands between the attention layer and the residual stream, each contribution is multiplied by what that
    norm multiplies their sum with, so that they still add up to what joins the stream.
    """

    heads: int
    norm: str | None = None
    """Path of an RMSNorm of the form ``x · (1 + weight) / rms(x)`` that the output passes."""


@dataclass(frozen=True)
class Weight:
    """A parameter of the module that it puts into the sequence as it is."""

    parameter: str


Tap = Input | Output | Attention | HeadResult | Weight


@dataclass(frozen=True)
class Order(ABC):
    """How a tower that packs its pictures into one sequence orders them; hooks see raster order, picture after picture."""

    tower: str
    """Path of the module whose ``grid_thw`` argument gives each picture's rows and columns of patches."""

    @abstractmethod
    def indices(self, grids: Int[Tensor, "picture 3"]) -> Int[Tensor, " row"]:
        """Return where in the model's order each row stands, rows taken picture after picture in raster order."""


@dataclass(frozen=True)
class Site:
    """One hook name: where it is tapped and what its dimensions are.

    Attributes:
        name: the hook name, TransformerLens' own where one exists.
        module: dotted path of the module in the HF model.
        tap: how the activation is read and written there.
        dims: names of its dimensions, in order.
        hf: what HF itself calls this tensor, or None; used in the table of hook names.
        order: how the model orders the patches or tokens, where that is not raster order.
        companions: sites that bring the same content in again later; an intervention here acts there too.
    """

    name: str
    module: str
    tap: Tap
    dims: tuple[str, ...]
    hf: str | None = None
    order: Order | None = None
    companions: tuple[str, ...] = ()

    @property
    def layer(self) -> int | None:
        """Index of the language-model layer, or None outside of it."""
        parts = self.name.split(".")
        return int(parts[1]) if parts[0] == "blocks" else None

    @property
    def positional(self) -> bool:
        """Whether a selector can address this site's dimensions."""
        return bool({"position", "query", "key", "token"} & set(self.dims))


@dataclass(frozen=True)
class DecoderNames:
    """What a decoder calls its parts, so that one function can list the sites of any of them."""

    layers: str = "model.language_model.layers"
    norm: str = "model.language_model.norm"
    embed: str = "model.language_model.embed_tokens"
    decoder: str = "model.language_model"
    attention: str = "self_attn"
    output: str = "o_proj"
    before_mlp: str = "post_attention_layernorm"
    before_attention: str = "input_layernorm"
    after_attention: str | None = None
    """A norm between the attention layer and the residual stream."""
    after_mlp: str | None = None
    companions: tuple[str, ...] = ()
    """Sites that bring visual features in again after the merge, one per early layer."""


@dataclass(frozen=True)
class DecoderShape:
    """Head and layer counts of a decoder."""

    layers: int
    heads: int
    key_heads: int


def decoder_shape(config: PreTrainedConfig) -> DecoderShape:
    """Read the layer and head counts off a decoder's configuration."""
    return DecoderShape(config.num_hidden_layers, config.num_attention_heads, config.num_key_value_heads)


def decoder_sites(shape: DecoderShape, names: DecoderNames | None = None) -> Iterator[Site]:
    """List the sites of a Llama-shaped decoder (Llama, Mistral, Qwen2, Qwen3) under TransformerLens' names."""
    n = names or DecoderNames()
    yield Site("hook_embed", n.embed, Output(), RESIDUAL, "embed_tokens output, before image features are placed")
    merged = Input("inputs_embeds")
    yield Site("hook_merged_embed", n.decoder, merged, RESIDUAL, "inputs_embeds of the decoder", companions=n.companions)
    for layer in range(shape.layers):
        yield from _block_sites(f"blocks.{layer}", shape, n, layer=layer)
    yield Site("ln_final.hook_out", n.norm, Output(), RESIDUAL, "hidden_states[-1]")


def _block_sites(block: str, shape: DecoderShape, n: DecoderNames, *, layer: int) -> Iterator[Site]:
    path = f"{n.layers}.{layer}"
    norm = n.after_attention and f"{path}.{n.after_attention}"
    yield Site(f"{block}.hook_resid_pre", path, Input(), RESIDUAL, f"hidden_states[{layer}]")
    yield Site(f"{block}.ln1.hook_out", f"{path}.{n.before_attention}", Output(), RESIDUAL)
    yield from attention_sites(f"{block}.attn", f"{path}.{n.attention}", shape, output=n.output, norm=norm)
    attention = Site(f"{block}.hook_attn_out", f"{path}.{n.attention}", Output(0), RESIDUAL, f"layers.{layer}.{n.attention} output")
    yield (
        attention
        if norm is None
        else Site(f"{block}.hook_attn_out", norm, Output(last=True), RESIDUAL, f"layers.{layer}.{n.after_attention} output")
    )
    yield Site(f"{block}.hook_resid_mid", f"{path}.{n.before_mlp}", Input(shared=True), RESIDUAL)
    yield Site(f"{block}.ln2.hook_out", f"{path}.{n.before_mlp}", Output(), RESIDUAL)
    yield from _gated_mlp_sites(block, path)
    mlp = n.after_mlp or "mlp"
    yield Site(f"{block}.hook_mlp_out", f"{path}.{mlp}", Output(), RESIDUAL, f"layers.{layer}.{mlp} output")
    post = Site(f"{block}.hook_resid_post", path, Output(), RESIDUAL, f"hidden_states[{layer + 1}] (the last one before the final norm)")
    # what is added between two layers belongs to the first one's output, which is read where the second receives it
    reinjected = layer < len(n.companions)
    yield replace(post, module=f"{n.layers}.{layer + 1}", tap=Input(first=True), hf=None) if reinjected else post


def attention_sites(block: str, path: str, shape: DecoderShape, *, output: str, norm: str | None = None) -> Iterator[Site]:
    """List the sites of one attention layer with separate q, k, v projections; ``norm`` is one that its output passes."""
    for letter, heads in (("q", shape.heads), ("k", shape.key_heads), ("v", shape.key_heads)):
        yield Site(f"{block}.hook_{letter}", f"{path}.{letter}_proj", Output(heads=heads), HEADS, f"{letter}_proj output")
    yield Site(f"{block}.hook_rot_q", path, Attention("rot_q"), HEADS)
    yield Site(f"{block}.hook_rot_k", path, Attention("rot_k"), KEYS)
    yield Site(f"{block}.hook_attn_mask", path, Attention("attn_mask"), PATTERN)
    yield Site(f"{block}.hook_attn_scores", path, Attention("attn_scores"), PATTERN)
    yield Site(f"{block}.hook_pattern", path, Attention("pattern"), PATTERN, "attentions (eager)")
    yield Site(f"{block}.hook_z", f"{path}.{output}", Input("input", heads=shape.heads), HEADS, f"{output} input")
    yield Site(f"{block}.hook_result", f"{path}.{output}", HeadResult(shape.heads, norm), HEAD_RESULT)


def _gated_mlp_sites(block: str, path: str) -> Iterator[Site]:
    yield Site(f"{block}.mlp.hook_pre", f"{path}.mlp.gate_proj", Output(), NEURONS, "gate_proj output")
    yield Site(f"{block}.mlp.hook_pre_linear", f"{path}.mlp.up_proj", Output(), NEURONS, "up_proj output")
    yield Site(f"{block}.mlp.hook_post", f"{path}.mlp.down_proj", Input("input"), NEURONS, "down_proj input")


@dataclass(frozen=True)
class TowerNames:
    """What a vision tower calls its parts."""

    embeddings: str
    layers: str
    attention: str
    output: str
    before_attention: str
    before_mlp: str
    attention_scale: str | None = None
    mlp_scale: str | None = None


def tower_sites(shape: DecoderShape, names: TowerNames, *, tower: str) -> Iterator[Site]:
    """List the sites of a vision transformer whose states reach the projector.

    Args:
        shape: layers whose output can reach the projector, and heads. Later layers have no effect and get no name.
        names: what the tower calls its parts.
        tower: dotted path of the tower.
    """
    yield Site("vision_encoder.hook_in", tower, Input("pixel_values"), PIXELS, "pixel_values")
    yield Site("vision_encoder.embeddings.hook_out", f"{tower}.{names.embeddings}", Output(), VISION_STATE)
    for layer in range(shape.layers):
        path, block = f"{tower}.{names.layers}.{layer}", f"vision_encoder.encoder_layers.{layer}"
        yield Site(f"{block}.hook_resid_pre", path, Input(), VISION_STATE, f"vision hidden_states[{layer}]")
        for site in attention_sites(f"{block}.attn", f"{path}.{names.attention}", shape, output=names.output):
            if "hook_rot" not in site.name:  # towers of this shape do not rotate
                yield replace(site, dims=_in_view(site.dims))
        attention_out = Output(0, scale=names.attention_scale and f"{path}.{names.attention_scale}")
        yield Site(f"{block}.hook_attn_out", f"{path}.{names.attention}", attention_out, VISION_STATE)
        yield Site(f"{block}.hook_resid_mid", f"{path}.{names.before_mlp}", Input(shared=True), VISION_STATE)
        yield Site(f"{block}.mlp.hook_pre", f"{path}.mlp.fc1", Output(), ("view", "patch", "d_mlp"))
        yield Site(f"{block}.mlp.hook_post", f"{path}.mlp.fc2", Input("input"), ("view", "patch", "d_mlp"))
        mlp_out = Output(scale=names.mlp_scale and f"{path}.{names.mlp_scale}")
        yield Site(f"{block}.hook_mlp_out", f"{path}.mlp", mlp_out, VISION_STATE)
        yield Site(f"{block}.hook_resid_post", path, Output(), VISION_STATE, f"vision hidden_states[{layer + 1}]")


VISION_STATE = ("view", "patch", "d_vision")
_IN_VIEW = {"batch": "view", "position": "patch", "query": "query_patch", "key": "key_patch", "d_model": "d_vision"}


def _in_view(dims: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(_IN_VIEW.get(dim, dim) for dim in dims)


def projector_sites(path: str, *, argument: str = "image_features", received: str = "token") -> Iterator[Site]:
    """List the sites around the projector; ``hook_visual_embed`` is its output, before the merge.

    Args:
        path: of the projector.
        argument: what it calls its input.
        received: whether that is one row per ``"token"`` or per ``"patch"``.
    """
    yield Site("vision_projector.hook_in", path, Input(argument), ("view", received, "d_vision"), "projector input")
    yield Site("vision_projector.hook_out", path, Output(), VISUAL, "get_image_features().pooler_output")
    yield Site("hook_visual_embed", path, Output(), VISUAL, "get_image_features().pooler_output")
