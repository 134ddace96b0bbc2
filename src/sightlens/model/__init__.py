"""HookedVLM: load, prepare, run, generate; the only place that turns descriptions into hooks."""

from __future__ import annotations

from sightlens.model.agreement import Check
from sightlens.model.cache import Cache
from sightlens.model.checks import hook_contract, verify_layout
from sightlens.model.fingerprint import fingerprint
from sightlens.model.head_mean import fit_head_mean
from sightlens.model.hooked import HookedVLM

__all__ = ["Cache", "Check", "HookedVLM", "fingerprint", "fit_head_mean", "hook_contract", "verify_layout"]
