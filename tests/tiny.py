"""Tiny random models of every family, built from configs: real HF classes, no weights from anywhere."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    CLIPVisionConfig,
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    Gemma3TextConfig,
    InternVLConfig,
    InternVLForConditionalGeneration,
    InternVLVisionConfig,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    LlavaNextConfig,
    LlavaNextForConditionalGeneration,
    LlavaOnevisionConfig,
    LlavaOnevisionForConditionalGeneration,
    MistralConfig,
    PreTrainedTokenizerFast,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2Config,
    Qwen3Config,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
    SiglipVisionConfig,
)
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil
from transformers.models.llava.image_processing_pil_llava import LlavaImageProcessorPil
from transformers.models.llava_next.image_processing_pil_llava_next import LlavaNextImageProcessorPil
from transformers.models.llava_onevision.image_processing_pil_llava_onevision import LlavaOnevisionImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil

from sightlens.metrics import BinTokens
from sightlens.zoo.vocabulary import word_level

WORDS = (  # noqa: SIM905 - a list of forty quoted words reads worse
    "USER ASSISTANT : . , ? is there a the where how many what colour which red green blue circle square star yes no in image "
    "and system you are helpful <0> <1> <2> <3> <4> <5> <6> <7> <8> <9>"
).split()
BOXES = BinTokens(bins=10, prefixes=("<",) * 4)
SPECIAL = ["<pad>", "<s>", "</s>", "<unk>", "<image>", "<img>", "</img>", "<IMG_CONTEXT>", "<video>", "<|im_start|>", "<|im_end|>"]
SPECIAL += [
    "<start_of_image>",
    "<end_of_image>",
    "<image_soft_token>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
    "<|video_pad|>",
]
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

    family: Literal["llava", "llava_next", "llava_onevision", "internvl", "gemma3", "qwen2_5_vl", "qwen3_vl", "text"]
    text: str = "llama"
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
    Variant("llava_next", "mistral", "clip"),
    Variant("llava_next", "llama", "clip"),
    Variant("llava_onevision", "qwen2", "siglip"),
    Variant("gemma3", "gemma3", "siglip"),
    Variant("qwen2_5_vl", "qwen2", "windows"),
    Variant("qwen3_vl", "qwen3", "deepstack"),
]
TEXTS = [Variant("text", kind, "none") for kind in ("llama", "qwen2", "qwen3", "mistral")]
"""Language models, which see nothing."""
PINPOINTS = [[64, 96], [32, 64], [64, 32], [64, 64], [96, 32], [32, 96], [96, 96]]
DEFAULT = [VARIANTS[0], VARIANTS[4]]
EACH = [next(variant for variant in VARIANTS if variant.family == family) for family in dict.fromkeys(v.family for v in VARIANTS)]
"""One of every family that sees."""

TEXT_TEMPLATE = (
    "{% for m in messages %}<|im_start|> {{ m['role'] }} {{ m['content'] }} <|im_end|> {% endfor %}"
    "{% if add_generation_prompt %}<|im_start|> ASSISTANT{% endif %}"
)
QWEN_TEMPLATE = INTERNVL_TEMPLATE.replace("<IMG_CONTEXT>", "<|vision_start|><|image_pad|><|vision_end|>")
TEMPLATES = {
    "internvl": INTERNVL_TEMPLATE,
    "gemma3": LLAVA_TEMPLATE.replace("<image>", "<start_of_image>"),
    "qwen2_5_vl": QWEN_TEMPLATE,
    "qwen3_vl": QWEN_TEMPLATE,
    "text": TEXT_TEMPLATE,
}
"""Chat templates by family; LLaVA's for the others."""
GEMMA_NAMES = {"image_token": "<image_soft_token>", "boi_token": "<start_of_image>", "eoi_token": "<end_of_image>"}
QWEN_NAMES = {
    "image_token": "<|image_pad|>",
    "video_token": "<|video_pad|>",
    "vision_start_token": "<|vision_start|>",
    "vision_end_token": "<|vision_end|>",
}
NAMES = {"gemma3": GEMMA_NAMES, "qwen2_5_vl": QWEN_NAMES, "qwen3_vl": QWEN_NAMES}
"""What a family's tokenizer calls its special tokens, where it differs."""


def tokenizer(template: str, family: str = "llava") -> PreTrainedTokenizerFast:
    """A word-level tokenizer with the special tokens of all families."""
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
            "other_image_token": "<|image_pad|>",
            "other_video_token": "<|video_pad|>",
            "soft_token": "<image_soft_token>",
            "boi_token": "<start_of_image>",
            "eoi_token": "<end_of_image>",
            "vision_start_token": "<|vision_start|>",
            "vision_end_token": "<|vision_end|>",
            **NAMES.get(family, {}),
        },
    )
    fast.chat_template = template
    return fast


SHAPE = {
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


def _text_config(kind: str) -> LlamaConfig | MistralConfig | Qwen2Config | Qwen3Config:
    shape = SHAPE
    match kind:
        case "llama":
            return LlamaConfig(**shape)
        case "mistral":
            return MistralConfig(**shape, sliding_window=None)
        case "qwen2":
            return Qwen2Config(**shape)
        case _:
            return Qwen3Config(**shape, head_dim=12)


def randomise(model: nn.Module, seed: int) -> nn.Module:
    """Give every parameter a size at which it matters; HF's own initial weights leave many at zero."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        near_one = ("norm" in name and name.endswith("weight")) or "lambda" in name
        centred = isinstance(model.get_submodule(name.rpartition(".")[0]), Gemma3RMSNorm)  # whose gain is 1 + its weight
        parameter.data = (0 if centred else 1) + 0.2 * noise if near_one else noise * (0.3 if parameter.ndim > 1 else 0.1)
    return model.eval()


def gemma3(window: int = 32) -> nn.Module:
    shape = {"hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 2}
    vision = SiglipVisionConfig(**shape, image_size=32, patch_size=4, vision_use_head=False)
    kinds = ["sliding_attention", "full_attention", "sliding_attention"]
    text = Gemma3TextConfig(**SHAPE, head_dim=12, query_pre_attn_scalar=12, sliding_window=window, layer_types=kinds)
    ids = {
        "image_token_index": SPECIAL.index("<image_soft_token>"),
        "boi_token_index": SPECIAL.index("<start_of_image>"),
        "eoi_token_index": SPECIAL.index("<end_of_image>"),
    }
    return Gemma3ForConditionalGeneration(
        Gemma3Config(vision_config=vision, text_config=text, **ids, mm_tokens_per_image=16, tie_word_embeddings=False)
    )


def _qwen(variant: Variant) -> nn.Module:
    shape = {"hidden_size": 24, "intermediate_size": 40, "num_heads": 2, "patch_size": 4, "out_hidden_size": 32}
    ids = {
        "image_token_id": SPECIAL.index("<|image_pad|>"),
        "video_token_id": SPECIAL.index("<|video_pad|>"),
        "vision_start_token_id": SPECIAL.index("<|vision_start|>"),
        "vision_end_token_id": SPECIAL.index("<|vision_end|>"),
    }
    if variant.family == "qwen2_5_vl":
        rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]}
        vision = {**shape, "depth": 3, "window_size": 16, "fullatt_block_indexes": [1]}
        config = Qwen2_5_VLConfig(vision_config=vision, text_config={**SHAPE, "rope_parameters": rope}, **ids)
        return Qwen2_5_VLForConditionalGeneration(config)
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 1, 1], "mrope_interleaved": True}
    vision = {**shape, "depth": 4, "num_position_embeddings": 36, "deepstack_visual_indexes": [0, 2]}
    config = Qwen3VLConfig(vision_config=vision, text_config={**SHAPE, "head_dim": 12, "rope_parameters": rope}, **ids)
    return Qwen3VLForConditionalGeneration(config)


def _llava(variant: Variant, text: object) -> nn.Module:
    shape = {"hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 3, "num_attention_heads": 2}
    shape |= {"image_size": 32, "patch_size": 8}
    vision = CLIPVisionConfig(**shape) if variant.vision == "clip" else SiglipVisionConfig(**shape)
    select = {"vision_feature_select_strategy": "default" if variant.vision == "clip" else "full"}
    base = {"vision_config": vision, "text_config": text, "image_token_index": SPECIAL.index("<image>"), **select}
    if variant.family == "llava":
        return LlavaForConditionalGeneration(LlavaConfig(**base, vision_feature_layer=-2))
    if variant.family == "llava_next":
        return LlavaNextForConditionalGeneration(LlavaNextConfig(**base, vision_feature_layer=-2, image_grid_pinpoints=PINPOINTS))
    video = {"video_token_index": SPECIAL.index("<video>"), "vision_aspect_ratio": "anyres_max_4"}
    return LlavaOnevisionForConditionalGeneration(
        LlavaOnevisionConfig(**base, **video, vision_feature_layer=-1, image_grid_pinpoints=PINPOINTS)
    )


def hf_model(variant: Variant, seed: int = 0) -> nn.Module:
    """A random HF model of the variant."""
    if variant.family == "gemma3":
        return randomise(gemma3(), seed)
    if variant.family.startswith("qwen"):
        return randomise(_qwen(variant), seed)
    text = _text_config(variant.text)
    if variant.family == "text":
        return randomise(AutoModelForCausalLM.from_config(text), seed)
    if variant.family.startswith("llava"):
        return randomise(_llava(variant, text), seed)
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
    return randomise(InternVLForConditionalGeneration(config), seed)


def image_processor(variant: Variant, *, pad: bool = False) -> object:
    """The image processor that belongs to the variant's tower."""
    if variant.family == "internvl":
        return GotOcr2ImageProcessorPil(size={"height": 32, "width": 32}, crop_to_patches=True, min_patches=1, max_patches=6)
    if variant.family == "text":
        return None
    if variant.family.startswith("qwen"):
        return Qwen2VLImageProcessorPil(patch_size=4, size={"shortest_edge": 8 * 8 * 4, "longest_edge": 8 * 8 * 40})
    if variant.family == "gemma3":
        return Gemma3ImageProcessorPil(size={"height": 32, "width": 32}, pan_and_scan_min_crop_size=16)
    if variant.family == "llava_next":
        crop = {"size": {"shortest_edge": 32}, "crop_size": {"height": 32, "width": 32}}
        return LlavaNextImageProcessorPil(**crop, image_grid_pinpoints=PINPOINTS)
    if variant.family == "llava_onevision":
        return LlavaOnevisionImageProcessorPil(size={"height": 32, "width": 32}, image_grid_pinpoints=PINPOINTS)
    if variant.vision == "siglip":
        return SiglipImageProcessorPil(size={"height": 32, "width": 32})
    cls = LlavaImageProcessorPil if pad else CLIPImageProcessorPil
    options = {"do_pad": True} if pad else {}
    return cls(size={"shortest_edge": 32}, crop_size={"height": 32, "width": 32}, **options)
