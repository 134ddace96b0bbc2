"""One number for a curve."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float

from sightlens.errors import MetricError


def nauc(x: Float[np.ndarray, " point"], y: Float[np.ndarray, " point"], *, baseline: float | None = None) -> float:
    """Return the area under a curve relative to a constant at the baseline.

    ``nAUC = 1/(x_max - x_min) · ∫ y(x)/baseline dx`` by trapezoids: 1 for no effect, lower for more damage (P5,
    arXiv:2605.19792, cumulative head ablation; the paper leaves the normalisation and the grid of x open, so keep the
    grid with the number).

    Args:
        x: share of heads removed, strictly increasing.
        y: the score at each share.
        baseline: the score with nothing removed; None takes ``y[0]``.

    Raises:
        MetricError: for fewer than two points, x not increasing, a NaN, or a baseline of 0.

    >>> nauc(np.array([0.0, 0.5, 1.0]), np.array([0.8, 0.4, 0.0]))
    0.5
    """
    if x.shape != y.shape or len(x) < 2 or not bool((np.diff(x) > 0).all()) or bool(np.isnan(y).any()):
        raise MetricError("two or more points with x increasing and no NaN", f"x={x}, y={y}", "Sort the curve by x.")
    baseline = float(y[0]) if baseline is None else baseline
    if not np.isfinite(baseline) or baseline == 0:
        do = "A curve without a baseline has no relative area; use examples the model can solve."
        raise MetricError("a baseline other than 0", f"{baseline}", do)
    area = float(((y[1:] + y[:-1]) / 2 * np.diff(x)).sum())
    return area / float(x[-1] - x[0]) / baseline


@dataclass(frozen=True)
class Curve:
    """A score over the share of heads removed, with the grid on which its area was taken.

    Attributes:
        x: the shares, strictly increasing.
        y: the score at each.
        baseline: the score with nothing removed.
    """

    x: tuple[float, ...]
    y: tuple[float, ...]
    baseline: float

    @classmethod
    def of(cls, x: Sequence[float | int], y: Sequence[float | int], *, baseline: float | None = None) -> Curve:
        """Make a curve; the first score is the baseline when none is given.

        Raises:
            MetricError: as for `nauc`.
        """
        curve = cls(tuple(map(float, x)), tuple(map(float, y)), float(y[0] if baseline is None and len(y) else baseline or 0.0))
        nauc(np.array(curve.x), np.array(curve.y), baseline=curve.baseline)
        return curve

    @property
    def nauc(self) -> float:
        """The area relative to the baseline, see `nauc`; it means something only together with ``x``."""
        return nauc(np.array(self.x), np.array(self.y), baseline=self.baseline)
