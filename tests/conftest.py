"""Models that many tests share, and shape checks over the whole suite."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import jaxtyping
import numpy as np
import pytest
import torch
from jaxtyping import install_import_hook
from torch import nn

with install_import_hook("sightlens", "beartype.beartype"):
    from sightlens.model import HookedVLM
    from sightlens.model.loading import processing_for

from tests.tiny import BOXES, DEFAULT, EACH, LLAVA_TEMPLATE, TEMPLATES, VARIANTS, Variant, hf_model, image_processor, tokenizer


def hooked(variant: Variant, *, seed: int = 0, attention: str = "sdpa") -> HookedVLM:
    """A fresh hooked random model."""
    hf = hf_model(variant, seed)
    hf.set_attn_implementation(attention)
    template = TEMPLATES.get(variant.family, LLAVA_TEMPLATE)
    processing = processing_for(hf.config, tokenizer(template, variant.family), image_processor(variant))
    return HookedVLM(hf, processing, name=str(variant), box_format=BOXES)


def plain(model: HookedVLM) -> nn.Module:
    """HF's model of the same weights, made anew: SightLens never touched it."""
    hf = type(model.hf)(copy.deepcopy(model.hf.config))
    hf.load_state_dict(model.hf.state_dict())
    return hf.to(model.hf.dtype).eval()


def picture(height: int = 48, width: int = 64, seed: int = 0) -> np.ndarray:
    """A random image."""
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)


@pytest.fixture(params=DEFAULT, ids=str)
def model(request: pytest.FixtureRequest) -> HookedVLM:
    """One LLaVA and one InternVL."""
    return hooked(request.param)


@pytest.fixture(params=VARIANTS, ids=str)
def any_model(request: pytest.FixtureRequest) -> HookedVLM:
    """Every combination of towers."""
    return hooked(request.param)


@pytest.fixture(params=EACH, ids=str)
def each_model(request: pytest.FixtureRequest) -> HookedVLM:
    """One of every family that sees."""
    return hooked(request.param)


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture
def unchecked() -> Iterator[None]:
    """Switch the shape and type checks of the test suite off."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)
