"""How Molmo points, and reading the points back in pixels of the original image."""

from __future__ import annotations

import html
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from sightlens._types import PixelMask
from sightlens.errors import MetricError

Point = tuple[float, float]
"""``(x, y)`` in pixels of the original image unless a docstring says otherwise."""

_TAG = re.compile(r"<points?\s([^<>]*)>")
_COORDINATE = re.compile(r"\b([xy])([0-9]{0,4})\s*=\s*[\"']?\s*([0-9]{1,6}(?:\.[0-9]{1,6})?)")


@dataclass(frozen=True, kw_only=True)
class PointTags:
    """Molmo: ``<point x="37.5" y="64.0" alt="cat">cat</point>``, ``<points x1="…" y1="…" x2="…" …>`` for several.

    Coordinates are percent of the image's width and height with one decimal. Deitke et al. 2024 (arXiv 2409.17146), pointing.

    Attributes:
        label: what is pointed at; written in ``alt`` and between the tags.
        decimals: digits after the point.
    """

    label: str = ""
    decimals: int = 1

    def parse(self, text: str, image_size: tuple[int, int]) -> list[Point]:
        """Read all points of an answer, in the order written; those outside the image and half-written ones are left out.

        Args:
            text: what the model generated.
            image_size: ``(height, width)`` of the original image.
        """
        height, width = image_size
        found: list[Point] = []
        for tag in _TAG.finditer(text):
            values: dict[str, dict[str, float]] = {}
            for axis, number, value in _COORDINATE.findall(tag.group(1)):
                values.setdefault(number, {})[axis] = float(value) / 100
            found += [(v["x"] * width, v["y"] * height) for v in values.values() if len(v) == 2 and max(v.values()) <= 1]
        return found

    def render(self, points: Sequence[Point], image_size: tuple[int, int]) -> str:
        """Write points as the model would, in the given order.

        Raises:
            MetricError: for no point, or one outside the image.
        """
        height, width = image_size
        if not points or any(not (0 <= x <= width and 0 <= y <= height) for x, y in points):
            raise MetricError(f"one or more points within {width}×{height}", f"{list(points)[:8]}", "Give pixels of the original image.")
        percent = [(100 * x / width, 100 * y / height) for x, y in points]
        places = [("", *percent[0])] if len(points) == 1 else [(str(k), *place) for k, place in enumerate(percent, start=1)]
        where = " ".join(f'x{k}="{x:.{self.decimals}f}" y{k}="{y:.{self.decimals}f}"' for k, x, y in places)
        tag, label = "point" if len(points) == 1 else "points", html.escape(self.label)
        return f'<{tag} {where} alt="{label}">{label}</{tag}>'


Pointing = Literal["hit", "miss", "none"]


def point_hit(points: Sequence[Point], mask: PixelMask) -> Pointing:
    """Say whether the first point lies on an object: "hit", "miss", or "none" when there is no point.

    Raises:
        MetricError: for a mask without a pixel.
    """
    if not mask.any():
        raise MetricError("a mask with at least one pixel", "an empty one", "Leave this example out.")
    if not points:
        return "none"
    (x, y), (height, width) = points[0], mask.shape
    inside = 0 <= x <= width and 0 <= y <= height
    row, column = min(int(np.floor(y)), height - 1), min(int(np.floor(x)), width - 1)
    return "hit" if inside and bool(mask[row, column]) else "miss"
