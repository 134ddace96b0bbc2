"""Questions one can ask of a model; each returns a study."""

from __future__ import annotations

from sightlens.experiments.ablation import ablate_tokens, token_effects
from sightlens.experiments.attribution import Estimates, Screen, attribute
from sightlens.experiments.containers import GrownTruth, container_matrix, containerize_objects
from sightlens.experiments.cumulative import ablate_cumulatively, head_curves, matched_heads, nauc_table
from sightlens.experiments.integrated_gradients import Attribution, Integration, integrated_gradients, register_tokens
from sightlens.experiments.measures import AnswerLikelihood, GeneratedAnswer, Measure
from sightlens.experiments.mediation import HeadMediation, PatchedLikelihood, mediate_heads
from sightlens.experiments.norms import bind_norms
from sightlens.experiments.outcome import Outcome
from sightlens.experiments.paper_data import Chosen, drawn_pairs, photo_pairs, read_photos
from sightlens.experiments.position_probes import ProbeOutcome, Viewing, position_probes, untrained
from sightlens.experiments.published import published_numbers
from sightlens.experiments.reproduce import Reproduction, Section
from sightlens.experiments.scored_trials import ScoredTrials, score_trials
from sightlens.experiments.shuffles import shuffle_tokens
from sightlens.experiments.study import Axes, Cell, Study
from sightlens.experiments.trial import Trial, make_trials, pair_trials
from sightlens.experiments.views import ablate_views, by_size, object_size, split_by_tiles
from sightlens.experiments.windows import knockout_heads, knockout_windows, layer_windows

__all__ = [
    "AnswerLikelihood",
    "Attribution",
    "Axes",
    "Cell",
    "Chosen",
    "Estimates",
    "GeneratedAnswer",
    "GrownTruth",
    "HeadMediation",
    "Integration",
    "Measure",
    "Outcome",
    "PatchedLikelihood",
    "ProbeOutcome",
    "Reproduction",
    "ScoredTrials",
    "Screen",
    "Section",
    "Study",
    "Trial",
    "Viewing",
    "ablate_cumulatively",
    "ablate_tokens",
    "ablate_views",
    "attribute",
    "bind_norms",
    "by_size",
    "container_matrix",
    "containerize_objects",
    "drawn_pairs",
    "head_curves",
    "integrated_gradients",
    "knockout_heads",
    "knockout_windows",
    "layer_windows",
    "make_trials",
    "matched_heads",
    "mediate_heads",
    "nauc_table",
    "object_size",
    "pair_trials",
    "photo_pairs",
    "position_probes",
    "published_numbers",
    "read_photos",
    "register_tokens",
    "score_trials",
    "shuffle_tokens",
    "split_by_tiles",
    "token_effects",
    "untrained",
]
