"""HookedVLM: load, prepare, run, generate; the only place that turns descriptions into hooks."""

from __future__ import annotations

from sightlens.model.cache import Cache
from sightlens.model.hooked import HookedVLM

__all__ = ["Cache", "HookedVLM"]
