"""``InternVLChatModel`` checkpoints of InternVL-2.5, 3 and 3.5 with a Qwen2, Qwen3 or Llama decoder.

Facts from the remote code of OpenGVLab/InternVL3-8B and HF's ``convert_internvl_weights_to_hf.py``: the tower's q, k, v are
one fused matrix, cut in three along the output; pixel shuffle in its second version (``ps_version: v2``) is HF's.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from transformers import InternVLConfig, InternVLVisionConfig, PreTrainedConfig
from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil
from transformers.utils.constants import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD

from sightlens.errors import FamilyError
from sightlens.families.convert_format import OriginalFormat, refuse, require, text_config

_OLD, _NEW = r"vision_model\.encoder\.layers\.(\d+)\.", r"model.vision_tower.encoder.layer.\1."
_PROJECTOR = "model.multi_modal_projector"
VISION_FIELDS = {
    "hidden_size": "hidden_size",
    "intermediate_size": "intermediate_size",
    "num_hidden_layers": "num_hidden_layers",
    "num_attention_heads": "num_attention_heads",
    "num_channels": "num_channels",
    "hidden_act": "hidden_act",
    "layer_norm_eps": "layer_norm_eps",
    "norm_type": "norm_type",
    "image_size": "image_size",
    "patch_size": "patch_size",
    "qkv_bias": "attention_bias",
    "qk_normalization": "use_qk_norm",
}
"""The tower's fields in the original configuration and in HF's."""
DECODERS = {"Qwen2ForCausalLM": "qwen2", "Qwen3ForCausalLM": "qwen3", "LlamaForCausalLM": "llama"}


class InternVLChat(OriginalFormat):
    """``InternVLChatModel``; its default conversation, without the default Chinese system message, is ChatML."""

    architecture = "InternVLChatModel"
    model_type = "internvl_chat"
    family = "internvl"
    image_token = "<IMG_CONTEXT>"
    template = (
        "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}"
        "{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for part in message['content'] %}"
        "{% if part['type'] == 'image' %}{{ '<IMG_CONTEXT>\n' }}{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}"
        "{{ '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    )
    rules = (
        (r"vision_model\.embeddings\.class_embedding", ("model.vision_tower.embeddings.cls_token",)),
        (r"vision_model\.embeddings\.position_embedding", ("model.vision_tower.embeddings.position_embeddings",)),
        (r"vision_model\.embeddings\.patch_embedding\.(weight|bias)", (r"model.vision_tower.embeddings.patch_embeddings.projection.\1",)),
        (_OLD + r"attn\.qkv\.(weight|bias)", tuple(_NEW + rf"attention.{letter}_proj.\2" for letter in "qkv")),
        (_OLD + r"attn\.proj\.(weight|bias)", (_NEW + r"attention.projection_layer.\2",)),
        (_OLD + r"attn\.([qk])_norm\.weight", (_NEW + r"attention.\2_norm.weight",)),
        (_OLD + r"norm1\.(weight|bias)", (_NEW + r"layernorm_before.\2",)),
        (_OLD + r"norm2\.(weight|bias)", (_NEW + r"layernorm_after.\2",)),
        (_OLD + r"ls([12])", (_NEW + r"lambda_\2",)),
        (_OLD + r"mlp\.fc([12])\.(weight|bias)", (_NEW + r"mlp.fc\2.\3",)),
        (r"language_model\.model\.(.+)", (r"model.language_model.\1",)),
        (r"language_model\.lm_head\.weight", ("lm_head.weight",)),
        (r"mlp1\.0\.(weight|bias)", (_PROJECTOR + r".layer_norm.\1",)),
        (r"mlp1\.1\.(weight|bias)", (_PROJECTOR + r".linear_1.\1",)),
        (r"mlp1\.3\.(weight|bias)", (_PROJECTOR + r".linear_2.\1",)),
    )
    dropped = (r".*\.rotary_emb\.inv_freq",)

    def config(self, data: Mapping[str, Any], *, image_token_id: int, tower: Mapping[str, Any] | None) -> PreTrainedConfig:
        """Translate ``vision_config`` and ``llm_config``."""
        require(data, ("vision_config", "llm_config", "downsample_ratio"), "InternVLChatModel")
        vision, language = data["vision_config"], data["llm_config"]
        require(vision, tuple(field for field in VISION_FIELDS if field != "num_channels"), "the vision tower")
        size = vision["image_size"]
        refuse(data, {"ps_version": ("v2",), "select_layer": (-1,), "force_image_size": (size, None), "pad2square": (False,)})
        refuse(data, {"use_thumbnail": (True,), "use_backbone_lora": (0,), "use_llm_lora": (0,)})
        named = (language.get("architectures") or [None])[0]
        if named not in DECODERS:
            raise FamilyError(
                f"a decoder among {', '.join(DECODERS)} in llm_config", repr(named), "Use the checkpoint in HF's format, if there is one."
            )
        side = round(size // vision["patch_size"] * data["downsample_ratio"])
        return InternVLConfig(
            vision_config=InternVLVisionConfig(
                **{VISION_FIELDS[field]: value for field, value in vision.items() if field in VISION_FIELDS}
            ),
            text_config=text_config(language, DECODERS[named]),
            image_token_id=image_token_id,
            image_seq_length=side * side,
            downsample_ratio=data["downsample_ratio"],
            tie_word_embeddings=bool(language.get("tie_word_embeddings", False)),
            architectures=["InternVLForConditionalGeneration"],
        )

    def image_processor(self, data: Mapping[str, Any], config: PreTrainedConfig) -> Any:
        """Tile as ``dynamic_preprocess`` does, or not at all without ``dynamic_image_size``."""
        height, width = config.vision_config.image_size
        tiled = bool(data.get("dynamic_image_size", True))
        return GotOcr2ImageProcessorPil(
            size={"height": height, "width": width},
            crop_to_patches=True,
            min_patches=data.get("min_dynamic_patch", 1),
            max_patches=data.get("max_dynamic_patch", 12) if tiled else 1,
            image_mean=list(IMAGENET_DEFAULT_MEAN),
            image_std=list(IMAGENET_DEFAULT_STD),
        )
