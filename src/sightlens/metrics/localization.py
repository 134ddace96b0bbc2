"""The localization score of P5 (arXiv:2605.19792): the rate of good boxes, averaged over overlap thresholds."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import numpy as np
from jaxtyping import Float

from sightlens._types import Box
from sightlens.errors import MetricError
from sightlens.metrics.boxes import iou, is_box


@dataclasses.dataclass(frozen=True)
class LocMetric:
    """``Loc = mean over τ of the share of examples with IoU > τ``; neither mean IoU nor average precision.

    Attributes:
        thresholds: the values of τ; P5 uses .5, .7 and .9.
        strict: whether a box must exceed τ (P5) or may equal it.
    """

    thresholds: tuple[float, ...] = (0.5, 0.7, 0.9)
    strict: bool = True

    def __post_init__(self) -> None:
        if not self.thresholds or not all(0 <= threshold <= 1 for threshold in self.thresholds):
            do = "Give one or more overlaps, such as (.5, .7, .9)."
            raise MetricError("thresholds within 0..1", f"{self.thresholds}", do)

    def score(self, overlaps: Float[np.ndarray, " example"]) -> Float[np.ndarray, " example"]:
        """Return each example's share of thresholds passed; the mean over examples is Loc.

        >>> LocMetric().score(np.array([0.5, 0.75, 0.95])).round(2).tolist()
        [0.0, 0.67, 1.0]
        """
        passes = np.greater if self.strict else np.greater_equal
        return passes(overlaps[:, None], np.asarray(self.thresholds)).mean(axis=1)

    def per_example(self, predicted: Sequence[Box | None], truth: Sequence[Box]) -> Float[np.ndarray, " example"]:
        """Return each example's score.

        Args:
            predicted: the boxes read from the answers; None where an answer held none.
            truth: the true boxes, in the same unit.

        Raises:
            MetricError: when the lengths differ or a true box has no area.
        """
        return self.score(overlaps(predicted, truth))


def overlaps(predicted: Sequence[Box | None], truth: Sequence[Box]) -> Float[np.ndarray, " example"]:
    """Return the IoU of each predicted box with its true box.

    Raises:
        MetricError: when the lengths differ, a true box has no area, or a predicted one is not finite.
    """
    if len(predicted) != len(truth):
        got = f"{len(predicted)} predicted and {len(truth)} true"
        raise MetricError("as many predicted boxes as true boxes", got, "Give None where an answer held no box.")
    empty = [index for index, box in enumerate(truth) if not is_box(box)]
    if empty:
        got = f"{truth[empty[0]]} at index {empty[0]}"
        raise MetricError("true boxes with an area", got, "Order each box as (x0, y0, x1, y1) with x1 > x0 and y1 > y0.")
    broken = [guess for guess in predicted if guess is not None and not all(map(math.isfinite, guess))]
    if broken:
        raise MetricError("predicted boxes of finite coordinates, or None", f"{broken[0]}", "Give None where an answer held no box.")
    return np.array([iou(guess, box) for guess, box in zip(predicted, truth, strict=True)], dtype=np.float64)


def loc(predicted: Sequence[Box | None], truth: Sequence[Box], *, metric: LocMetric = LocMetric()) -> float:
    """Return Loc over a set of examples, in 0..1 (P5 prints percent).

    Raises:
        MetricError: for no examples, lengths that differ, or a true box without area.

    >>> loc([(0.0, 0.0, 10.0, 8.0), None], [(0.0, 0.0, 10.0, 10.0), (0.0, 0.0, 4.0, 4.0)])
    0.3333333333333333
    """
    if not truth:
        raise MetricError("at least one example", "none", "Give the boxes of the examples that were run.")
    return float(metric.per_example(predicted, truth).mean())
