"""Plans and runs many interventions at the cost of what they change."""

from __future__ import annotations

from sightlens.engine.engine import Engine
from sightlens.engine.explanation import Explanation
from sightlens.engine.plan import Plan
from sightlens.engine.prefix import Keep
from sightlens.engine.reading import Reader, read_states, share_passes

__all__ = ["Engine", "Explanation", "Keep", "Plan", "Reader", "read_states", "share_passes"]
