"""The models that benchmarks time: one random LLaVA of a fixed size, and the shipped ones; each as HF, bridge and HookedVLM."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from PIL import Image
from tests.tiny import LLAVA_TEMPLATE, tokenizer
from torch import nn
from transformer_lens.model_bridge.sources._bridge_builder import build_bridge_from_module
from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig, LlavaForConditionalGeneration
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

from sightlens import HookedVLM
from sightlens.experiments.trial import pair_trials
from sightlens.families import Prompt
from sightlens.stimuli import edits

IMAGE, VOCAB, SIDE = 4, 32_000, 336


@dataclass(frozen=True)
class Subject:
    """One model three times, sharing nothing but its weights' values, and two prompts with an object."""

    name: str
    vlm: HookedVLM
    hf: nn.Module
    bridge: Any
    prompt: Prompt
    other: Prompt
    """The same question about the picture turned by 90 degrees."""


def random_llava() -> nn.Module:
    """Make a LLaVA of 8 layers, width 512, 32,000 tokens of vocabulary and 24 × 24 visual tokens."""
    torch.manual_seed(0)
    tower = {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 4, "num_attention_heads": 4}
    decoder = {"hidden_size": 512, "intermediate_size": 1376, "num_hidden_layers": 8, "num_attention_heads": 8}
    vision = CLIPVisionConfig(**tower, image_size=SIDE, patch_size=14)
    text = LlamaConfig(**decoder, num_key_value_heads=8, vocab_size=VOCAB)
    return LlavaForConditionalGeneration(LlavaConfig(vision_config=vision, text_config=text, image_token_index=IMAGE)).eval()


def bridge_of(hf: nn.Module) -> Any:
    """Wrap a copy of a LLaVA in a TransformerBridge."""
    hf = copy.deepcopy(hf)
    return build_bridge_from_module(hf, "LlavaForConditionalGeneration", hf_config=copy.deepcopy(hf.config), tokenizer=None)


def random_subject(*, words: int) -> Subject:
    """The random model with a prompt of 576 visual tokens and a question of so many words, and a square object."""
    hf = random_llava()
    processor = CLIPImageProcessorPil(size={"shortest_edge": SIDE}, crop_size={"height": SIDE, "width": SIDE})
    vlm = HookedVLM.from_hf(copy.deepcopy(hf), SimpleNamespace(tokenizer=tokenizer(LLAVA_TEMPLATE), image_processor=processor))
    question = " ".join((["where", "is", "the", "red", "circle", "?"] * words)[:words])
    picture = Image.fromarray(np.random.default_rng(0).integers(0, 256, (SIDE, SIDE, 3), dtype=np.uint8))
    mask = np.zeros((SIDE, SIDE), dtype=bool)
    mask[110:200, 100:210] = True
    return Subject("random LLaVA, 8 × 512", vlm, hf, bridge_of(hf), *_prompts(vlm, picture, question, mask))


def _prompts(vlm: HookedVLM, picture: Image.Image, question: str, mask: np.ndarray) -> tuple[Prompt, Prompt]:
    one, other = (vlm.prepare(image, question).with_objects([mask]) for image in (picture, picture.rotate(90)))
    return one, other


def tiny_subject() -> Subject:
    """The shipped LLaVA with a drawn scene and a localization question."""
    vlm = HookedVLM.from_pretrained("sightlens/tiny-llava")
    trial = next(trial for trial in pair_trials(edits.pairs(4, seed=5)) if trial.question.kind == "localization")
    hf = copy.deepcopy(vlm.hf)
    return Subject("tiny-llava", vlm, hf, bridge_of(hf), *_prompts(vlm, trial.image, trial.question.text, trial.mask))
