"""Confidence intervals of means, by resampling examples."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np
from jaxtyping import Float, Int

from sightlens.errors import MetricError


@dataclasses.dataclass(frozen=True)
class Interval:
    """Means with their confidence intervals, one per cell (0-dimensional for a single cell).

    Attributes:
        mean: over the examples that have a value; NaN where none has.
        low: lower end of the interval.
        high: upper end of the interval.
        n: examples with a value.
        missing: examples without one.
    """

    mean: Float[np.ndarray, "*cell"]
    low: Float[np.ndarray, "*cell"]
    high: Float[np.ndarray, "*cell"]
    n: Int[np.ndarray, "*cell"]
    missing: Int[np.ndarray, "*cell"]


def bootstrap_mean(values: Float[np.ndarray, "example *cell"], *, level: float = 0.95, resamples: int = 2000, seed: int = 0) -> Interval:
    """Return means over examples with percentile bootstrap intervals (Efron & Tibshirani 1993, chapter 13).

    Each resample draws the examples once for all cells, so cells stay paired. NaN counts as missing. Identical values
    give an interval of width 0: the bootstrap cannot see what never varied.

    Args:
        values: one value per example and cell.
        level: the share of resampled means within the interval.
        resamples: how many times to resample.
        seed: of the random generator.

    Raises:
        MetricError: for no examples, an infinite value, a level outside 0..1, or no resamples.
    """
    if len(values) == 0 or np.isinf(values).any() or not 0 < level < 1 or resamples < 1:
        got = f"{len(values)} examples, {int(np.isinf(values).sum())} infinite, level {level}, {resamples} resamples"
        raise MetricError("finite values of one or more examples and 0 < level < 1", got, "Leave a missing value NaN.")
    flat = values.reshape(len(values), -1).astype(np.float64)
    present = ~np.isnan(flat)
    totals, counts = np.where(present, flat, 0.0), present.astype(np.float64)
    mean, n = _ratio(totals.sum(0), counts.sum(0)), present.sum(0)
    draws = _draws(len(values), resamples=resamples, seed=seed)
    resampled = _ratio(draws @ totals, draws @ counts)
    low, high = _ends(resampled, level)
    cells = values.shape[1:]
    return Interval(*(part.reshape(cells) for part in (mean, low, high, n, len(values) - n)))


def bootstrap_difference(
    a: Float[np.ndarray, "example *cell"], b: Float[np.ndarray, "example *cell"], *, level: float = 0.95, seed: int = 0
) -> Interval:
    """Return the mean of ``a - b`` over the same examples with its interval; a pair with a NaN is missing.

    Raises:
        MetricError: when the shapes differ, or as for `bootstrap_mean`.
    """
    if a.shape != b.shape:
        got = f"{a.shape} and {b.shape}"
        raise MetricError("two arrays over the same examples and cells", got, "Pair the values by example first.")
    return bootstrap_mean(a - b, level=level, seed=seed)


def bootstrap_statistic(
    values: Float[np.ndarray, "example cell"],
    statistic: Callable[[Float[np.ndarray, " cell"]], float],
    *,
    level: float = 0.95,
    resamples: int = 2000,
    seed: int = 0,
) -> Interval:
    """Return a number made from the cells' means, such as the area under a curve, with its interval over examples.

    Args:
        values: one value per example and cell; examples that lack one are left out and counted.
        statistic: from means to a number; NaN where it has none.
        level: the share of resampled numbers within the interval.
        resamples: how many times to resample.
        seed: of the random generator.

    Raises:
        MetricError: when no example has all values.
    """
    whole = values[np.isfinite(values).all(axis=1)]
    if len(whole) == 0:
        raise MetricError("an example with a value in every cell", f"none of {len(values)}", "Finish the study first.")
    means = _draws(len(whole), resamples=resamples, seed=seed) @ whole / len(whole)
    low, high = _ends(np.array([[statistic(row)] for row in means]), level)
    count, lost = np.array(len(whole)), np.array(len(values) - len(whole))
    return Interval(np.array(statistic(whole.mean(axis=0))), low[0, ...], high[0, ...], count, lost)


def _draws(examples: int, *, resamples: int, seed: int) -> Float[np.ndarray, "resample example"]:
    """Return how often each example occurs in each resample."""
    chances = np.full(examples, 1 / examples)
    return np.random.default_rng(seed).multinomial(examples, chances, size=resamples).astype(np.float64)


def _ratio(totals: Float[np.ndarray, "*n"], counts: Float[np.ndarray, "*n"]) -> Float[np.ndarray, "*n"]:
    return np.where(counts > 0, totals / np.maximum(counts, 1), np.nan)


def _ends(resampled: Float[np.ndarray, "resample cell"], level: float) -> tuple[Float[np.ndarray, " cell"], Float[np.ndarray, " cell"]]:
    """Return the percentiles per cell, NaN for a cell without any value."""
    tail = (1 - level) / 2
    empty = np.isnan(resampled).all(axis=0)
    low, high = np.nanquantile(np.where(empty, 0.0, resampled), [tail, 1 - tail], axis=0)
    return np.where(empty, np.nan, low), np.where(empty, np.nan, high)
