"""How every picture looks: fonts, colours, and the scale that turns numbers into colours."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from typing import Any

import matplotlib
import numpy as np
from jaxtyping import Float
from matplotlib.colors import Colormap, Normalize

INK, QUIET, FAINT = "#1f2430", "#667085", "#d0d5dd"
SERIES = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#5b4b8a", "#7f7f7f")
"""Okabe and Ito's colours, told apart by colour-blind readers."""
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")

_STYLE: dict[Any, Any] = {
    "font.family": "DejaVu Sans",
    "font.size": 10,
    "text.parse_math": False,  # a token may hold a dollar sign
    "text.color": INK,
    "axes.edgecolor": QUIET,
    "axes.labelcolor": INK,
    "axes.titlesize": 11,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "xtick.color": QUIET,
    "ytick.color": QUIET,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
    "grid.color": FAINT,
    "grid.linewidth": 0.7,
    "legend.frameon": False,
    "figure.facecolor": "white",
    "savefig.facecolor": "white",
    "svg.fonttype": "none",
    "svg.hashsalt": "sightlens",
    "figure.constrained_layout.use": True,
}


@contextmanager
def house_style() -> Iterator[None]:
    """Draw in the library's style whatever the user's own settings are, and leave those alone."""
    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(_STYLE)
        yield


@dataclasses.dataclass(frozen=True, kw_only=True)
class Labels:
    """The words on a picture.

    Attributes:
        title: above it.
        x: under the horizontal axis.
        y: beside the vertical axis.
        colour: beside the colour bar, with the unit.
    """

    title: str = ""
    x: str = ""
    y: str = ""
    colour: str = ""


NO_LABELS = Labels()


@dataclasses.dataclass(frozen=True)
class Scale:
    """A colour map and the numbers at its ends.

    Attributes:
        low: number at the lower end.
        high: number at the upper end.
        signed: whether 0 is the neutral middle.
    """

    low: float
    high: float
    signed: bool

    @classmethod
    def of(cls, values: Float[np.ndarray, "*n"]) -> Scale:
        """Span the finite values; a scale with negative and positive values is symmetric around 0."""
        finite = values[np.isfinite(values)]
        low, high = (float(finite.min()), float(finite.max())) if finite.size else (0.0, 1.0)
        if low < 0:
            reach = max(-low, high)
            return cls(-reach, reach, signed=True)
        return cls(min(low, 0.0), high if high > 0 else 1.0, signed=False)

    @cached_property
    def colours(self) -> Colormap:
        """The colour map: blue to red through white when signed, else dark to light."""
        return matplotlib.colormaps["RdBu_r" if self.signed else "viridis"]

    @cached_property
    def norm(self) -> Normalize:
        """The map from numbers to 0..1."""
        return Normalize(self.low, self.high)

    def css(self, value: float) -> tuple[str, str]:
        """Return the background and a legible text colour for a value; white for a missing one."""
        if not np.isfinite(value):
            return "#ffffff", INK
        red, green, blue, _ = self.colours(float(self.norm(value)))
        dark = 0.299 * red + 0.587 * green + 0.114 * blue < 0.5
        return f"#{round(red * 255):02x}{round(green * 255):02x}{round(blue * 255):02x}", "#ffffff" if dark else INK
