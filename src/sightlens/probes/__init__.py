"""Small estimators that are read off activations; they know no model."""

from __future__ import annotations

from sightlens.probes.position import PositionProbes, ProbeShape, load_probes
from sightlens.probes.report import AxisScores, ProbeReport
from sightlens.probes.tokens import ProbeBatch, ProbeSettings, SiteTokens, held_out

__all__ = [
    "AxisScores",
    "PositionProbes",
    "ProbeBatch",
    "ProbeReport",
    "ProbeSettings",
    "ProbeShape",
    "SiteTokens",
    "held_out",
    "load_probes",
]
