"""Integrated gradients of many trials, kept in a store, as scores that the selector ``top(…)`` ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import cast

from sightlens.experiments.integrated_gradients import Attribution, Integration, integrated_gradients
from sightlens.experiments.study import provenance_of
from sightlens.experiments.trial import Trial
from sightlens.model import HookedVLM
from sightlens.model.fingerprint import donor_digest
from sightlens.store import Manifest, Provenance, Record, Result, open_store

STUDY = "integrated_gradients"


@dataclass(frozen=True, eq=False)
class ScoredTrials:
    """Trials with their integrated gradients as scores, so that a study can intervene at ``top(object)``.

    Attributes:
        trials: with scores.
        result: one cell; ``value``, ``baseline``, ``gap`` and ``relative_gap`` of each trial, see `Attribution`.
    """

    trials: tuple[Trial, ...]
    result: Result


def score_trials(
    model: HookedVLM, trials: Sequence[Trial], *, settings: Integration | None = None, store: str | Path | None = None
) -> ScoredTrials:
    """Compute integrated gradients of every trial.

    Args:
        model: that answers.
        trials: what is asked.
        settings: of the integration.
        store: a folder; what it holds is not computed again. In memory when None.

    Raises:
        ExtraError, InterventionError: as `integrated_gradients`.
        StoreError: when the folder belongs to another model, or to other trials or settings.
    """
    chosen = settings or Integration()
    layout = model.prepare(trials[0].image, trials[0].question.text).layout
    provenance = provenance_of(model, seed=0, layout_hash=layout.hash)
    donor = {"mean": donor_digest(model.donors["mean"])} if chosen.baseline == "mean" and "mean" in model.donors else {}
    about = {"trials": [trial.digest for trial in trials], "settings": asdict(chosen), **donor}
    with open_store(store, Manifest.of(STUDY, about, provenance=provenance)) as records:
        done = {example for examples in records.done().values() for example in examples}
        for trial in trials:
            if trial.id not in done:
                records.append([_record(trial, integrated_gradients(model, trial, settings=chosen), provenance)])
        result = records.read()
    record = result.records[0]
    scores = {example: tuple(cast(list[float], note["scores"])) for example, note in zip(record.examples, record.notes, strict=True)}
    return ScoredTrials(tuple(replace(trial, scores=scores[trial.id]) for trial in trials), result)


def _record(trial: Trial, found: Attribution, provenance: Provenance) -> Record:
    return Record(
        study=STUDY,
        coordinates={"scores": "all"},
        examples=(trial.id,),
        values={name: (float(getattr(found, name)),) for name in ("value", "baseline", "gap", "relative_gap")},
        provenance=provenance,
        notes=({"scores": found.scores.tolist()},),
    )
