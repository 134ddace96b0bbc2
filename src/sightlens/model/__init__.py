"""HookedVLM: load, prepare, run, generate; the only place that turns descriptions into hooks."""

from __future__ import annotations

from sightlens.model.cache import Cache
from sightlens.model.checks import Check, hook_contract, self_check, verify_layout
from sightlens.model.fingerprint import fingerprint
from sightlens.model.hooked import HookedVLM

__all__ = ["Cache", "Check", "HookedVLM", "fingerprint", "hook_contract", "self_check", "verify_layout"]
