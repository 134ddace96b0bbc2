"""Model families: how each one cuts images, lays out its sequence, and names its hook sites."""

from __future__ import annotations

from sightlens.families.family import Family, ImageOptions
from sightlens.families.images import ImageLike, open_image
from sightlens.families.items import ItemList
from sightlens.families.processing import Processing, Wording
from sightlens.families.prompt import Prompt
from sightlens.families.sites import Site
from sightlens.families.table import FAMILIES, find_family

__all__ = [
    "FAMILIES",
    "Family",
    "ImageLike",
    "ImageOptions",
    "ItemList",
    "Processing",
    "Prompt",
    "Site",
    "Wording",
    "find_family",
    "open_image",
]
