"""Which view is an object read from? Ablate its tokens in the global view, in the tiles, or in both."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd

from sightlens.errors import StudyError
from sightlens.experiments.outcome import Outcome
from sightlens.experiments.study import Axes, Cell, Study
from sightlens.experiments.trial import Trial
from sightlens.interventions import Ablate
from sightlens.metrics import size_bin
from sightlens.metrics.boxes import SizeBin
from sightlens.model import HookedVLM

VIEWS = {"global": "{} & global", "tile": "{} & tile", "both": "{}"}
TOKENS = {"object": "object", "translated": "translate(object, {seed})"}


def ablate_views(trials: Sequence[Trial], *, value: str = "mean", seeds: Sequence[int] = (0, 1, 2)) -> Study:
    """Replace object tokens, or their shape elsewhere, in the global view, in the tiles, or in both; views are not removed.

    Schaumlöffel et al. 2026 (arXiv 2605.19792), global and local views. An image that is not cut into tiles has a global
    view only and would make the conditions uneven: choose trials by `split_by_tiles` first, and report the others apart.

    Args:
        trials: with masks.
        value: what replaces the tokens, see :class:`~sightlens.interventions.Ablate`.
        seeds: of the translated control; one cell each.
    """
    cells = [Cell({"views": "none", "tokens": "none", "seed": 0})]
    for views, place in VIEWS.items():
        for tokens, where in TOKENS.items():
            for seed in seeds if tokens == "translated" else (0,):
                do = (Ablate(place.format(where.format(seed=seed)), value),)
                cells.append(Cell({"views": views, "tokens": tokens, "seed": seed}, do))
    return Study("ablate_views", tuple(cells), tuple(trials), axes=Axes(x="views", group="tokens", repeats="seed"))


def split_by_tiles(model: HookedVLM, trials: Sequence[Trial]) -> tuple[tuple[Trial, ...], tuple[Trial, ...]]:
    """Return the trials whose picture this model cuts into tiles, and the others."""
    tiled = [any(view.kind == "tile" for view in model.prepare(trial.image, trial.question.text).layout.views) for trial in trials]
    with_tiles = tuple(trial for trial, cut in zip(trials, tiled, strict=True) if cut)
    return with_tiles, tuple(trial for trial, cut in zip(trials, tiled, strict=True) if not cut)


def object_size(trial: Trial) -> SizeBin:
    """Return COCO's size class of a trial's object, by the box around its mask.

    Raises:
        StudyError: for a trial without a mask.
    """
    if trial.mask is None or not trial.mask.any():
        raise StudyError("a trial with an object mask", f"{trial.id!r} without", "Leave it out.")
    rows, columns = np.nonzero(trial.mask)
    return size_bin((float(columns.min()), float(rows.min()), float(columns.max() + 1), float(rows.max() + 1)))


def by_size(outcome: Outcome, trials: Sequence[Trial], *, metric: str) -> pd.DataFrame:
    """Return an outcome's table of a metric for each object size apart, in a column ``size``; sizes without trials are left out.

    Args:
        outcome: of a study of these trials.
        trials: with masks.
        metric: one of the outcome's.
    """
    ids: dict[SizeBin, list[str]] = {"small": [], "medium": [], "large": []}
    for trial in trials:
        ids[object_size(trial)].append(trial.id)
    tables = [outcome.restrict(chosen).table(metric).assign(size=size) for size, chosen in ids.items() if chosen]
    return pd.concat(tables, ignore_index=True)
