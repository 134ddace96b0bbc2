"""Tables of the localization paper: each task apart, with intervals, paired against the untouched model, and by object size."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import pandas as pd
from jaxtyping import Float

from sightlens.errors import ExtraError, MetricError
from sightlens.experiments.outcome import Outcome
from sightlens.experiments.trial import Trial
from sightlens.experiments.views import object_size
from sightlens.metrics import bootstrap_difference, bootstrap_mean, names_object, paired_test
from sightlens.stimuli import Task
from sightlens.store import Result

TASKS: Mapping[Task, Mapping[str, str]] = {
    "localization": {"loc": "loc", "iou": "iou"},
    "existence": {"yes_no": "correct"},
    "classification": {"cls": "correct", "cls_word": "whole_word"},
}
"""By task, the columns of a table and the metrics they show; ``cls`` counts substrings, ``cls_word`` whole words."""
PERCENT = 100.0


def task_table(outcome: Outcome, trials: Sequence[Trial]) -> pd.DataFrame:
    """Return each task's scores per cell, repetitions averaged, beside their change from the first cell, which is untouched.

    Columns: the axes, ``metric``, ``mean``, ``low``, ``high`` (percent, with a 95 % bootstrap interval over examples), ``n``;
    ``change`` with its interval over the same examples, and ``p`` of a paired permutation test (NaN without SciPy).
    """
    tables = []
    for task, metrics in TASKS.items():
        asked = [trial for trial in trials if trial.question.kind == task]
        if asked:
            part = _with_words(outcome.restrict([trial.id for trial in asked]), asked)
            tables += [score_table(part, metric, name=name) for name, metric in metrics.items()]
    return pd.concat(tables, ignore_index=True)


def score_table(outcome: Outcome, metric: str, *, name: str) -> pd.DataFrame:
    """Return one metric's rows of `task_table`."""
    merged = outcome.average(outcome.repeats) if outcome.repeats is not None else Result(outcome.records)
    values = PERCENT * np.array([record.values[metric] for record in merged.records]).T
    cells = pd.DataFrame([dict(record.coordinates) for record in merged.records]).assign(metric=name)
    return cells.assign(**intervals(values), **changes(values))


def intervals(values: Float[np.ndarray, "example cell"]) -> dict[str, np.ndarray]:
    """Return means and intervals as columns."""
    found = bootstrap_mean(values)
    return {"mean": found.mean, "low": found.low, "high": found.high, "n": found.n}


def changes(values: Float[np.ndarray, "example cell"]) -> dict[str, object]:
    """Return the change of each cell from the first, paired by example, as columns."""
    found = bootstrap_difference(values, np.repeat(values[:, :1], values.shape[1], axis=1))
    p = [_p(values[:, cell], values[:, 0]) for cell in range(values.shape[1])]
    return {"change": found.mean, "change_low": found.low, "change_high": found.high, "p": p}


def sized_table(outcome: Outcome, trials: Sequence[Trial]) -> pd.DataFrame:
    """Return `task_table` of all trials and, when objects are of several of COCO's sizes, of each size; column ``size``."""
    bins: dict[str, list[Trial]] = {"small": [], "medium": [], "large": []}
    for trial in trials:
        bins[object_size(trial)].append(trial)
    found = {size: chosen for size, chosen in bins.items() if chosen}
    groups = {"all": list(trials), **found} if len(found) > 1 else {f"all ({next(iter(found))})": list(trials)}
    return pd.concat([task_table(outcome, chosen).assign(size=size) for size, chosen in groups.items()], ignore_index=True)


def _with_words(outcome: Outcome, trials: Sequence[Trial]) -> Outcome:
    """Add the metric ``whole_word`` to list answers, read off the texts that the records keep."""
    answers = {trial.id: trial.question.answer for trial in trials if trial.question.kind == "classification"}
    if not answers:
        return outcome
    records = []
    for record in outcome.records:
        pairs = zip(record.examples, record.notes, strict=True)
        hits = [float(names_object(str(n["text"]), answers[k], match="word")) if "text" in n else float("nan") for k, n in pairs]
        records.append(replace(record, values={**record.values, "whole_word": tuple(hits)}))
    return replace(outcome, records=tuple(records))


def _p(a: Float[np.ndarray, " example"], b: Float[np.ndarray, " example"]) -> float:
    try:
        return paired_test(a, b).p
    except (MetricError, ExtraError):  # one pair has no spread; SciPy is an extra
        return float("nan")
