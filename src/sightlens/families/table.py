"""The table of families: one line each."""

from __future__ import annotations

from sightlens.errors import FamilyError
from sightlens.families.family import Family
from sightlens.families.gemma3 import Gemma3
from sightlens.families.internvl import InternVL
from sightlens.families.llava import Llava
from sightlens.families.llava_next import LlavaNext
from sightlens.families.llava_onevision import LlavaOnevision
from sightlens.families.qwen2_5_vl import Qwen25VL
from sightlens.families.qwen3_vl import Qwen3VL
from sightlens.families.text import Llama, Mistral, Qwen2, Qwen3

_ALL: tuple[Family, ...] = (
    Llava(),
    LlavaNext(),
    LlavaOnevision(),
    InternVL(),
    Gemma3(),
    Qwen25VL(),
    Qwen3VL(),
    Llama(),
    Mistral(),
    Qwen2(),
    Qwen3(),
)
FAMILIES: dict[str, Family] = {family.model_type: family for family in _ALL}
"""Families by HF's ``config.model_type``."""


def find_family(model_type: str) -> Family:
    """Return the family of a model type.

    Raises:
        FamilyError: naming the known ones.
    """
    if model_type not in FAMILIES:
        raise FamilyError(f"a model type among {', '.join(FAMILIES)}", repr(model_type), "CONTRIBUTING.md tells how to add a family.")
    return FAMILIES[model_type]
