"""What probes found: accuracies, their control, and where in the picture they hold."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Float, Int

AXES = ("row", "column", "both")


@dataclass(frozen=True, eq=False)
class AxisScores:
    """One probe on held-out images.

    Attributes:
        correct: tokens named right at each place of the grid ``[rows, columns]``.
        control: the same for the probe trained and tested on shuffled labels, at the token's true place.
        tokens: tokens at each place.
        chance: accuracy of guessing.
    """

    correct: Int[np.ndarray, "rows columns"]
    control: Int[np.ndarray, "rows columns"]
    tokens: Int[np.ndarray, "rows columns"]
    chance: float

    @property
    def accuracy(self) -> float:
        """Share of tokens named right; NaN without tokens."""
        return _share(int(self.correct.sum()), int(self.tokens.sum()))

    @property
    def control_accuracy(self) -> float:
        """The same for shuffled labels."""
        return _share(int(self.control.sum()), int(self.tokens.sum()))

    def accuracy_map(self) -> Float[np.ndarray, "rows columns"]:
        """Return the accuracy at each place; NaN where no token was seen."""
        return np.where(self.tokens > 0, self.correct / np.maximum(self.tokens, 1), np.nan)


@dataclass(frozen=True, eq=False)
class ProbeReport:
    """The probes of one site.

    Attributes:
        site: hook name.
        axes: scores for "row", "column" and "both" (row and column right at once).
    """

    site: str
    axes: dict[str, AxisScores]

    def accuracy_map(self, axis: str = "both") -> Float[np.ndarray, "rows columns"]:
        """Return the accuracy at each place of the grid."""
        return self.axes[axis].accuracy_map()

    def to_dict(self) -> dict[str, Any]:
        """Return JSON data; NaN becomes None."""
        return {"site": self.site, "axes": {name: _plain(scores) for name, scores in self.axes.items()}}


def _plain(scores: AxisScores) -> dict[str, Any]:
    cells = scores.accuracy_map()
    return {
        "accuracy": scores.accuracy,
        "control": scores.control_accuracy,
        "chance": scores.chance,
        "tokens": int(scores.tokens.sum()),
        "map": [[None if np.isnan(value) else float(value) for value in row] for row in cells],
    }


def _share(part: int, whole: int) -> float:
    return part / whole if whole else float("nan")
