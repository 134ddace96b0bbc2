"""What is changed in a forward pass, as frozen data. Models turn it into hooks."""

from __future__ import annotations

from sightlens.interventions.intervention import MERGED, Ablate, AblateHeads, Intervention, Knockout, PatchIn, Phase, from_dict
from sightlens.interventions.means import Mean, MeanMeter
from sightlens.interventions.moves import Containerize, Moves, Rearrangement, Shuffle
from sightlens.interventions.where import Fixed, Where, freeze_where, resolve_where

__all__ = [
    "MERGED",
    "Ablate",
    "AblateHeads",
    "Containerize",
    "Fixed",
    "Intervention",
    "Knockout",
    "Mean",
    "MeanMeter",
    "Moves",
    "PatchIn",
    "Phase",
    "Rearrangement",
    "Shuffle",
    "Where",
    "freeze_where",
    "from_dict",
    "resolve_where",
]
