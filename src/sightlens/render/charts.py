"""Curves and bars with confidence intervals, from a result's summary."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure as Canvas

from sightlens.errors import SightLensError
from sightlens.render.figure import Plot
from sightlens.render.style import INK, MARKERS, NO_LABELS, QUIET, SERIES, Labels, house_style


def plot_curves(table: pd.DataFrame, *, x: str, group: str | None = None, labels: Labels = NO_LABELS, apart: Sequence[str] = ()) -> Plot:
    """Draw the mean over x as a curve per group, with the interval as a band.

    Args:
        table: rows of `Result.summary()` for one metric: columns `mean`, `low`, `high`, x and the group.
        x: column for the horizontal axis; text (such as layer windows) keeps the order of the rows.
        group: column that tells curves apart; None draws one.
        labels: the words; without them the names of the columns.
        apart: places on a text axis that do not continue the others (such as "all" after windows of layers): points, not joined.

    Raises:
        SightLensError: when a column is missing or a place of a curve has several rows.
    """
    series = _series(table, x=x, group=group)
    with house_style():
        canvas = Canvas(figsize=(7.6, 4.2))
        axes = canvas.subplots()
        places = _places(table[x])
        for number, (name, rows) in enumerate(series):
            rows = rows if places else rows.sort_values(x)
            where = rows[x].map(places) if places else rows[x]
            style = {"color": SERIES[number % len(SERIES)], "marker": MARKERS[number % len(MARKERS)], "markersize": 5, "linewidth": 1.8}
            joined = ~rows[x].isin(apart)
            band = rows[joined]
            axes.fill_between(where[joined], band["low"], band["high"], color=style["color"], alpha=0.16, linewidth=0)
            axes.plot(where[joined], band["mean"], label=name, **style)
            for place, row in zip(where[~joined], rows[~joined].itertuples(), strict=True):
                shift = 0.09 * (number - (len(series) - 1) / 2)
                axes.errorbar(place + shift, row.mean, yerr=[[row.mean - row.low], [row.high - row.mean]], capsize=3, **style)
        if places:
            _name_places(axes, places)
        _finish(axes, table, labels=_named(labels, table, x=x), groups=group)
    return Plot(canvas, labels.title or f"{_metric(table)} over {x}")


def plot_bars(table: pd.DataFrame, *, x: str, group: str | None = None, labels: Labels = NO_LABELS) -> Plot:
    """Draw the mean as a bar per x and group, with the interval as a whisker.

    Args:
        table: rows of `Result.summary()` for one metric: columns `mean`, `low`, `high`, x and the group.
        x: column of the clusters of bars.
        group: column of the bars within a cluster; None draws one bar each.
        labels: the words; without them the names of the columns.

    Raises:
        SightLensError: when a column is missing or a bar has several rows.
    """
    series, places = _series(table, x=x, group=group), {place: row for row, place in enumerate(dict.fromkeys(table[x]))}
    with house_style():
        canvas = Canvas(figsize=(min(12.0, max(5.0, 1.6 + 0.42 * len(places) * (len(series) + 0.8))), 4.2))
        axes = canvas.subplots()
        width = 0.8 / len(series)
        for number, (name, rows) in enumerate(series):
            where = rows[x].map(places) + (number - (len(series) - 1) / 2) * width
            reach = [rows["mean"] - rows["low"], rows["high"] - rows["mean"]]
            style = {"error_kw": {"elinewidth": 1.2, "ecolor": INK}, "capsize": 3, "edgecolor": "white"}
            colour = SERIES[number % len(SERIES)]
            axes.bar(where, rows["mean"], width, yerr=np.clip(reach, 0, None), color=colour, label=name, **style)
        _name_places(axes, places)
        axes.axhline(0, color=INK, linewidth=0.8)
        _finish(axes, table, labels=_named(labels, table, x=x), groups=group)
    return Plot(canvas, labels.title or f"{_metric(table)} by {x}")


def _series(table: pd.DataFrame, *, x: str, group: str | None) -> list[tuple[str, pd.DataFrame]]:
    """Return the rows of each curve, checked to hold each place once."""
    keys = [x] if group is None else [group, x]
    missing = [name for name in [*keys, "mean", "low", "high"] if name not in table]
    if missing or table.empty:
        got = f"no {missing} among {list(table.columns)}" if missing else "no rows"
        raise SightLensError("the rows of a summary", got, "Pass result.summary(), and name its columns.")
    if table.duplicated(keys).any():
        first = table[table.duplicated(keys)].iloc[0]
        got = f"several at {', '.join(f'{name}={first[name]}' for name in keys)}"
        do = "Choose one metric and one place on the other axes first, or name the axis in `group`."
        raise SightLensError("one row per place of a curve", got, do)
    if group is None:
        return [("", table)]
    return [(f"{name}", rows) for name, rows in table.groupby(group, sort=False, dropna=False)]


def _places(column: pd.Series) -> dict[object, int]:
    """Return where text stands on an axis; nothing for numbers."""
    return {} if pd.api.types.is_numeric_dtype(column) else {place: row for row, place in enumerate(dict.fromkeys(column))}


def _name_places(axes: Axes, places: dict[object, int]) -> None:
    """Write the places under the axis, slanted where they are crowded."""
    axes.set_xticks(list(places.values()), list(map(str, places)))
    if sum(len(str(place)) + 2 for place in places) > 70:
        axes.tick_params("x", rotation=35)


def _metric(table: pd.DataFrame) -> str:
    """Return the metric's name where the rows tell one."""
    names = table["metric"].unique() if "metric" in table else []
    return str(names[0]) if len(names) == 1 else "mean"


def _named(labels: Labels, table: pd.DataFrame, *, x: str) -> Labels:
    return Labels(title=labels.title, x=labels.x or x, y=labels.y or _metric(table))


def _finish(axes: Axes, table: pd.DataFrame, *, labels: Labels, groups: str | None) -> None:
    """Add the words, the grid and the number of examples."""
    axes.set(xlabel=labels.x, ylabel=labels.y)
    axes.set_title(labels.title)
    axes.grid(axis="y")
    axes.set_axisbelow(True)
    if groups is not None:
        axes.legend(title=groups, loc="upper left", bbox_to_anchor=(1.0, 1.0), alignment="left")
    if "n" in table:
        low, high = int(table["n"].min()), int(table["n"].max())
        count = f"n = {low}" if low == high else f"n = {low} to {high}"
        axes.figure.supxlabel(f"{count} examples; bootstrap intervals", x=0.99, ha="right", fontsize=8, color=QUIET)
