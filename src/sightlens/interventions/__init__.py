"""What is changed in a forward pass, as frozen data. Models turn it into hooks."""

from __future__ import annotations

from sightlens.interventions.intervention import Ablate, Intervention, Knockout, PatchIn, from_dict
from sightlens.interventions.means import Mean, MeanMeter
from sightlens.interventions.where import Fixed, Where, freeze_where, resolve_where

__all__ = [
    "Ablate",
    "Fixed",
    "Intervention",
    "Knockout",
    "Mean",
    "MeanMeter",
    "PatchIn",
    "Where",
    "freeze_where",
    "from_dict",
    "resolve_where",
]
