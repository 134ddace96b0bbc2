"""``LlavaLlamaForCausalLM`` checkpoints of LLaVA-1.5, as the original code wrote them.

Facts from haotian-liu/LLaVA and HF's ``convert_llava_weights_to_hf.py``: the file holds the decoder and the projector, mostly
without the vision tower, which ``mm_vision_tower`` names; the image's place is a negative id that is no token, so the
tokenizer gets ``<image>`` and the vocabulary one row; with ``image_aspect_ratio: pad`` images are padded to a square.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from transformers import CLIPVisionConfig, LlavaConfig, PreTrainedConfig
from transformers.models.llava.image_processing_pil_llava import LlavaImageProcessorPil

from sightlens.errors import CheckpointError
from sightlens.families.convert_format import OriginalFormat, refuse, text_config

_LARGE = {
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "projection_dim": 768,
    "patch_size": 14,
}
TOWERS = {
    "openai/clip-vit-large-patch14-336": {**_LARGE, "image_size": 336},
    "openai/clip-vit-large-patch14": {**_LARGE, "image_size": 224},
}
"""Configurations of the towers that the original code uses, for checkpoints that hold its weights but not its configuration."""
VISION_FIELDS = [
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_channels",
    "image_size",
    "patch_size",
    "hidden_act",
    "layer_norm_eps",
    "projection_dim",
]
_SYSTEM = (
    "A chat between a curious user and an artificial intelligence assistant. "
    "The assistant gives helpful, detailed, and polite answers to the user's questions."
)


class LlavaLlama(OriginalFormat):
    """``LlavaLlamaForCausalLM``, one view per image; its default conversation is ``vicuna_v1``."""

    architecture = "LlavaLlamaForCausalLM"
    model_type = "llava_llama"
    family = "llava"
    image_token = "<image>"
    adds_image_token = True
    template = (
        "{% if messages[0]['role'] != 'system' %}" + _SYSTEM + " {% endif %}"
        "{% for message in messages %}"
        "{% if message['role'] == 'user' %}USER: {% elif message['role'] == 'assistant' %}ASSISTANT: {% endif %}"
        "{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for part in message['content'] %}"
        "{% if part['type'] == 'image' %}{{ '<image>\n' }}{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}"
        "{% if message['role'] == 'assistant' %}</s>{% else %} {% endif %}{% endfor %}{% if add_generation_prompt %}ASSISTANT:{% endif %}"
    )
    rules = (
        (r"model\.mm_projector\.0\.(weight|bias)", (r"model.multi_modal_projector.linear_1.\1",)),
        (r"model\.mm_projector\.2\.(weight|bias)", (r"model.multi_modal_projector.linear_2.\1",)),
        (
            r"model\.vision_tower\.vision_tower\.(?:vision_model\.)?((?:embeddings|encoder|pre_layrnorm|post_layernorm)\..+)",
            (r"model.vision_tower.\1",),
        ),
        (r"model\.((?:embed_tokens|layers|norm)\..+)", (r"model.language_model.\1",)),
        (r"lm_head\.weight", ("lm_head.weight",)),
    )
    dropped = (
        r".*\.rotary_emb\.inv_freq",
        r".*\.position_ids",
        r"model\.vision_tower\.vision_tower\.(?:text_model\..+|logit_scale|(?:text|visual)_projection\.weight)",
    )
    separate_tower = "mm_vision_tower"
    tower_prefix = "model.vision_tower.vision_tower."

    def config(self, data: Mapping[str, Any], *, image_token_id: int, tower: Mapping[str, Any] | None) -> PreTrainedConfig:
        """Translate the flat configuration, and the tower's."""
        refuse(data, {"mm_projector_type": ("mlp2x_gelu",), "mm_use_im_start_end": (False,), "mm_vision_select_feature": ("patch",)})
        refuse(
            data, {"image_aspect_ratio": ("pad", None, "square"), "mm_patch_merge_type": ("flat",), "tune_mm_vision_resampler": (False,)}
        )
        language = text_config({**data, "vocab_size": max(int(data.get("vocab_size", 0)), image_token_id + 1)}, "llama")
        vision = _tower_config(data, tower)
        return LlavaConfig(
            vision_config=vision,
            text_config=language,
            image_token_index=image_token_id,
            # HF also lets these be pairs; a CLIP tower has numbers
            image_seq_length=(vision.image_size // vision.patch_size) ** 2,  # pyright: ignore[reportOperatorIssue]
            vision_feature_layer=data.get("mm_vision_select_layer", -2),
            vision_feature_select_strategy="default",
            tie_word_embeddings=bool(data.get("tie_word_embeddings", False)),
            architectures=["LlavaForConditionalGeneration"],
        )

    def image_processor(self, data: Mapping[str, Any], config: PreTrainedConfig) -> Any:
        """Pad to a square for ``image_aspect_ratio: pad``, crop the centre otherwise."""
        side = config.vision_config.image_size
        return LlavaImageProcessorPil(
            size={"shortest_edge": side}, crop_size={"height": side, "width": side}, do_pad=data.get("image_aspect_ratio") == "pad"
        )


def _tower_config(data: Mapping[str, Any], tower: Mapping[str, Any] | None) -> CLIPVisionConfig:
    name = data.get("mm_vision_tower")
    fields = TOWERS.get(str(name)) if tower is None else tower.get("vision_config", tower)
    if fields is None:
        raise CheckpointError(
            f"the configuration of the vision tower {name!r}",
            "none beside the weights",
            "Put the tower's config.json into the folder vision_tower of the checkpoint.",
        )
    values: dict[str, Any] = {field: fields[field] for field in VISION_FIELDS if field in fields}
    return CLIPVisionConfig(**values)
