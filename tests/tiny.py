"""Tiny random models of every family, built from configs: real HF classes, no weights from anywhere."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn
from transformers import (
    CLIPVisionConfig,
    InternVLConfig,
    InternVLForConditionalGeneration,
    InternVLVisionConfig,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    MistralConfig,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen3Config,
    SiglipVisionConfig,
)
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil
from transformers.models.llava.image_processing_pil_llava import LlavaImageProcessorPil
from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil

from sightlens.metrics import BinTokens
from sightlens.zoo.vocabulary import word_level

WORDS = (  # noqa: SIM905 - a list of forty quoted words reads worse
    "USER ASSISTANT : . , ? is there a the where how many what colour which red green blue circle square star yes no in image "
    "and system you are helpful <0> <1> <2> <3> <4> <5> <6> <7> <8> <9>"
).split()
BOXES = BinTokens(bins=10, prefixes=("<",) * 4)
SPECIAL = ["<pad>", "<s>", "</s>", "<unk>", "<image>", "<img>", "</img>", "<IMG_CONTEXT>", "<video>", "<|im_start|>", "<|im_end|>"]
LLAVA_TEMPLATE = (
    "{% for m in messages %}{% if m['role'] == 'system' %}{% for c in m['content'] %}{{ c['text'] }} {% endfor %}"
    "{% elif m['role'] == 'user' %}USER : {% for c in m['content'] %}"
    "{% if c['type'] == 'image' %}<image> {% else %}{{ c['text'] }} {% endif %}"
    "{% endfor %}{% else %}ASSISTANT : {% for c in m['content'] %}{{ c['text'] }} {% endfor %}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}ASSISTANT :{% endif %}"
)
INTERNVL_TEMPLATE = (
    "{% for m in messages %}<|im_start|> {{ m['role'] }} {% for c in m['content'] %}"
    "{% if c['type'] == 'image' %}<IMG_CONTEXT> {% else %}{{ c['text'] }} {% endif %}"
    "{% endfor %}<|im_end|> {% endfor %}{% if add_generation_prompt %}<|im_start|> ASSISTANT{% endif %}"
)


@dataclass(frozen=True)
class Variant:
    """One combination of towers."""

    family: Literal["llava", "internvl"]
    text: Literal["llama", "mistral", "qwen2", "qwen3"] = "llama"
    vision: str = "clip"

    def __str__(self) -> str:
        return f"{self.family}-{self.vision}-{self.text}"


VARIANTS = [
    Variant("llava", "llama", "clip"),
    Variant("llava", "qwen2", "siglip"),
    Variant("llava", "mistral", "clip"),
    Variant("internvl", "qwen2", "layer_norm"),
    Variant("internvl", "qwen3", "rms_norm"),
    Variant("internvl", "llama", "layer_norm"),
]
DEFAULT = [VARIANTS[0], VARIANTS[4]]


def tokenizer(template: str) -> PreTrainedTokenizerFast:
    """A word-level tokenizer with the special tokens of both families."""
    fast = PreTrainedTokenizerFast(
        tokenizer_object=word_level(SPECIAL, WORDS[:-10], whole=WORDS[-10:]),
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
        extra_special_tokens={
            "image_token": "<image>",
            "start_image_token": "<img>",
            "end_image_token": "</img>",
            "context_image_token": "<IMG_CONTEXT>",
            "video_token": "<video>",
            "turn_start_token": "<|im_start|>",
            "turn_end_token": "<|im_end|>",
        },
    )
    fast.chat_template = template
    return fast


def _text_config(kind: str) -> LlamaConfig | MistralConfig | Qwen2Config | Qwen3Config:
    shape = {
        "vocab_size": len(WORDS) + len(SPECIAL),
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "tie_word_embeddings": False,
    }
    match kind:
        case "llama":
            return LlamaConfig(**shape)
        case "mistral":
            return MistralConfig(**shape, sliding_window=None)
        case "qwen2":
            return Qwen2Config(**shape)
        case _:
            return Qwen3Config(**shape, head_dim=12)


def _randomise(model: nn.Module, seed: int) -> nn.Module:
    """Give every parameter a size at which it matters; HF's own initial weights leave many at zero."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        near_one = ("norm" in name and name.endswith("weight")) or "lambda" in name
        parameter.data = 1 + 0.2 * noise if near_one else noise * (0.3 if parameter.ndim > 1 else 0.1)
    return model.eval()


def hf_model(variant: Variant, seed: int = 0) -> nn.Module:
    """A random HF model of the variant."""
    text = _text_config(variant.text)
    if variant.family == "llava":
        shape = {"hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 3, "num_attention_heads": 2}
        shape |= {"image_size": 32, "patch_size": 8}
        vision = CLIPVisionConfig(**shape) if variant.vision == "clip" else SiglipVisionConfig(**shape)
        select = {"vision_feature_select_strategy": "default" if variant.vision == "clip" else "full"}
        config = LlavaConfig(
            vision_config=vision, text_config=text, image_token_index=SPECIAL.index("<image>"), vision_feature_layer=-2, **select
        )
        return _randomise(LlavaForConditionalGeneration(config), seed)
    vision = InternVLVisionConfig(
        hidden_size=24,
        intermediate_size=40,
        num_hidden_layers=2,
        num_attention_heads=2,
        image_size=[32, 32],
        patch_size=[8, 8],
        norm_type=variant.vision,
        use_qk_norm=variant.vision == "rms_norm",
        attention_bias=variant.vision == "layer_norm",
        use_mean_pooling=True,
    )
    config = InternVLConfig(
        vision_config=vision, text_config=text, image_token_id=SPECIAL.index("<IMG_CONTEXT>"), image_seq_length=4, downsample_ratio=0.5
    )
    return _randomise(InternVLForConditionalGeneration(config), seed)


def image_processor(variant: Variant, *, pad: bool = False) -> object:
    """The image processor that belongs to the variant's tower."""
    if variant.family == "internvl":
        return GotOcr2ImageProcessorPil(size={"height": 32, "width": 32}, crop_to_patches=True, min_patches=1, max_patches=6)
    if variant.vision == "siglip":
        return SiglipImageProcessorPil(size={"height": 32, "width": 32})
    cls = LlavaImageProcessorPil if pad else CLIPImageProcessorPil
    options = {"do_pad": True} if pad else {}
    return cls(size={"shortest_edge": 32}, crop_size={"height": 32, "width": 32}, **options)
