"""How many heads does a task need? Ablate more and more of them, in a given order."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial

import numpy as np
import pandas as pd
from jaxtyping import Float

from sightlens.errors import StudyError
from sightlens.experiments.outcome import Outcome
from sightlens.experiments.study import Axes, Cell, Study
from sightlens.experiments.trial import Trial
from sightlens.interventions import AblateHeads
from sightlens.metrics import Curve, bootstrap_statistic, nauc

Head = tuple[int, int]
FRACTIONS = (0.01, 0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5)


def ablate_cumulatively(
    trials: Sequence[Trial],
    orders: Mapping[str, Sequence[Head]],
    *,
    fractions: Sequence[float] = FRACTIONS,
    seeds: Sequence[int] = (0, 1, 2),
) -> Study:
    """Set the first heads of each order to zero, a growing share of all, at every position and decoding step.

    Orders: ``none``; those given; and for each, ``random(its name)``: as many heads of the same layers, other ones as far as
    a layer has them. The axis ``share`` holds the share of heads that is truly ablated; fractions below one head are left out.
    Schaumlöffel et al. 2026 (arXiv 2605.19792), cumulative head ablation; `head_curves` gives the areas.

    Args:
        trials: of one task.
        orders: by name, all heads of the model as (layer, head), first the one to go first.
        fractions: of all heads, within 0 to 1.
        seeds: of the random controls; one cell each.

    Raises:
        StudyError: when orders hold different heads or one twice, or no fraction reaches one head.
    """
    total = _count(orders)
    counts = sorted({round(fraction * total) for fraction in fractions} - {0})
    if not counts or counts[-1] > total:
        raise StudyError(f"fractions within 1/{total} and 1", f"{tuple(fractions)}", "Choose others.")
    cells = [Cell({"order": "none", "share": 0.0, "seed": 0})]
    for name, order in orders.items():
        for count in counts:
            chosen, share = tuple(order[:count]), count / total
            cells.append(Cell({"order": name, "share": share, "seed": 0}, (AblateHeads(chosen),)))
            for seed in seeds:
                place = {"order": f"random({name})", "share": share, "seed": seed}
                cells.append(Cell(place, (AblateHeads(matched_heads(order, count, seed=seed)),)))
    return Study("ablate_cumulatively", tuple(cells), tuple(trials), axes=Axes(x="share", group="order", repeats="seed"))


def matched_heads(order: Sequence[Head], count: int, *, seed: int) -> tuple[Head, ...]:
    """Draw as many heads of each layer as the first ``count`` of an order have there; other ones while the layer has them."""
    rng = np.random.default_rng(seed)
    drawn = [order[k] for k in rng.permutation(len(order))]
    first = set(order[:count])
    wanted = Counter(layer for layer, _ in first)
    by_preference = sorted(drawn, key=lambda head: head in first)
    picked = [[head for head in by_preference if head[0] == layer][:number] for layer, number in sorted(wanted.items())]
    return tuple(head for heads in picked for head in heads)


def head_curves(outcome: Outcome, *, metric: str) -> dict[str, Curve]:
    """Return each order's mean score over the share of ablated heads, from 0; ``.nauc`` is its relative area on that grid.

    Raises:
        MetricError: when the untouched model scores 0, so that there is no relative area.
    """
    table = outcome.table(metric)
    untouched = float(table.loc[table["order"] == "none", "mean"].iloc[0])
    rest = table.loc[table["order"] != "none"]
    return {
        str(name): Curve.of([0.0, *group["share"]], [untouched, *group["mean"]])
        for name, group in rest.sort_values("share").groupby("order", sort=False)
    }


def nauc_table(outcome: Outcome, *, metric: str) -> pd.DataFrame:
    """Return each order's relative area with its 95 % bootstrap interval over examples, and the grid of shares it was taken on.

    Raises:
        MetricError: when the untouched model scores 0, so that there is no relative area.
    """
    curves, merged = head_curves(outcome, metric=metric), outcome.average("seed")
    untouched = merged.where({"order": "none"}).records[0]
    rows = []
    for name, curve in curves.items():
        points = sorted(merged.where({"order": name}).records, key=lambda record: float(record.coordinates["share"]))
        values = np.array([record.values[metric] for record in (untouched, *points)]).T
        found = bootstrap_statistic(values, partial(_area, np.array(curve.x)))
        grid = ", ".join(f"{x:.3g}" for x in curve.x)
        rows.append(
            {"order": name, "nauc": curve.nauc, "low": float(found.low), "high": float(found.high), "n": int(found.n), "grid": grid}
        )
    return pd.DataFrame(rows)


def _area(x: Float[np.ndarray, " point"], y: Float[np.ndarray, " point"]) -> float:
    return nauc(x, y) if y[0] else float("nan")  # a draw of examples that the untouched model all fails


def _count(orders: Mapping[str, Sequence[Head]]) -> int:
    if not orders:
        raise StudyError("at least one order of heads", "none", "HeadMediation.ranking gives one.")
    sizes = {len(order) for order in orders.values()}
    known = {head for order in orders.values() for head in order}
    if sizes != {len(known)}:
        raise StudyError("orders of the same heads, none twice", f"{sorted(sizes)} of {len(known)} heads", "Rank all heads of the model.")
    return len(known)
