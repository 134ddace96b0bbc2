"""The table of families: one line each."""

from __future__ import annotations

from sightlens.errors import FamilyError
from sightlens.families.family import Family
from sightlens.families.internvl import InternVL
from sightlens.families.llava import Llava

FAMILIES: dict[str, Family] = {family.model_type: family for family in (Llava(), InternVL())}
"""Families by HF's ``config.model_type``."""


def find_family(model_type: str) -> Family:
    """Return the family of a model type.

    Raises:
        FamilyError: naming the known ones.
    """
    if model_type not in FAMILIES:
        raise FamilyError(f"a model type among {', '.join(FAMILIES)}", repr(model_type), "CONTRIBUTING.md tells how to add a family.")
    return FAMILIES[model_type]
