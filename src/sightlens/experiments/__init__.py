"""Questions one can ask of a model; each returns a study."""

from __future__ import annotations

from sightlens.experiments.ablation import ablate_tokens, token_effects
from sightlens.experiments.attribution import Estimates, Screen, attribute
from sightlens.experiments.integrated_gradients import Attribution, Integration, integrated_gradients, register_tokens
from sightlens.experiments.measures import AnswerLikelihood, GeneratedAnswer, Measure
from sightlens.experiments.outcome import Outcome
from sightlens.experiments.position_probes import ProbeOutcome, Viewing, position_probes, untrained
from sightlens.experiments.published import published_numbers
from sightlens.experiments.study import Axes, Cell, Study
from sightlens.experiments.trial import Trial, make_trials, pair_trials
from sightlens.experiments.windows import knockout_windows, layer_windows

__all__ = [
    "AnswerLikelihood",
    "Attribution",
    "Axes",
    "Cell",
    "Estimates",
    "GeneratedAnswer",
    "Integration",
    "Measure",
    "Outcome",
    "ProbeOutcome",
    "Screen",
    "Study",
    "Trial",
    "Viewing",
    "ablate_tokens",
    "attribute",
    "integrated_gradients",
    "knockout_windows",
    "layer_windows",
    "make_trials",
    "pair_trials",
    "position_probes",
    "published_numbers",
    "register_tokens",
    "token_effects",
    "untrained",
]
