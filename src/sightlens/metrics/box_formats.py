"""How a model writes a box as text, and how to read it back in pixels of the original image.

A format is a frame (which rectangle of the original image the numbers refer to) and a spelling (how the numbers are
written). Reading follows the papers: what cannot be read, or has no area, is None and so scores an IoU of 0.
"""

from __future__ import annotations

import dataclasses
import math
import re
from abc import ABC, abstractmethod
from collections.abc import Sequence
from itertools import accumulate
from typing import Literal

import numpy as np
from jaxtyping import Bool

from sightlens._types import Box
from sightlens.errors import MetricError
from sightlens.metrics.boxes import is_box

Frame = Literal["image", "padded_square", "centre_crop"]

# Accepts what `\[*\[(.*?),(.*?),(.*?),(.*?)\]\]*` of InternVL's evaluation accepts, in linear time: an ablated model
# may print a thousand brackets and commas, on which the lazy groups of the original never end.
_BRACKETS = re.compile(r"\[([^,\n]*),([^,\n]*),([^,\n]*),([^\]\n]*)\]")
_DIGIT = re.compile(r"[0-9]")


def frame_box(frame: Frame, image_size: tuple[int, int]) -> Box:
    """Return the rectangle, in pixels of the original image, that a frame's coordinates run over.

    Args:
        frame: "image", "padded_square" (padded at both ends of the short side, offset rounded down, as LLaVA does) or
            "centre_crop" (the largest centred square, as CLIP's processor does).
        image_size: ``(height, width)`` of the original image.

    >>> frame_box("padded_square", (480, 640))
    (0.0, -80.0, 640.0, 560.0)
    """
    height, width = image_size
    if frame == "image":
        return 0.0, 0.0, float(width), float(height)
    if frame == "padded_square":
        side = max(height, width)
        left, top = float(-((side - width) // 2)), float(-((side - height) // 2))
        return left, top, left + side, top + side
    side = min(height, width)
    left, top = (width - side) / 2, (height - side) / 2
    return left, top, left + side, top + side


@dataclasses.dataclass(frozen=True, kw_only=True)
class BoxFormat(ABC):
    """A way to write a box as text; subclasses say how the numbers are spelled."""

    frame: Frame

    def parse(self, text: str, image_size: tuple[int, int]) -> Box | None:
        """Read the first box of an answer.

        Args:
            text: what the model generated.
            image_size: ``(height, width)`` of the original image.

        Returns:
            ``(x0, y0, x1, y1)`` in pixels of the original image, not clipped to it; None when the answer holds no
            readable box or one without area.
        """
        unit = self._read(text, image_size)
        if unit is None or not is_box(unit):
            return None
        x0, y0, x1, y1 = frame_box(self.frame, image_size)
        width, height = x1 - x0, y1 - y0
        pixels = unit[0] * width + x0, unit[1] * height + y0, unit[2] * width + x0, unit[3] * height + y0
        return pixels if is_box(pixels) else None  # numbers near the largest float overflow

    def render(self, box: Box, image_size: tuple[int, int]) -> str:
        """Write a box as the model would, for teacher forcing.

        Parts outside the frame are cut off. A box smaller than the format's resolution may not read back.

        Args:
            box: pixels of the original image.
            image_size: ``(height, width)`` of the original image.

        Raises:
            MetricError: when no part of the box lies in the frame, or a coordinate is NaN or infinite.
        """
        if not all(map(math.isfinite, box)):
            raise MetricError("a box of finite coordinates", f"{box}", "Leave this example out.")
        x0, y0, x1, y1 = frame_box(self.frame, image_size)
        width, height = x1 - x0, y1 - y0
        scaled = (box[0] - x0) / width, (box[1] - y0) / height, (box[2] - x0) / width, (box[3] - y0) / height
        left, top, right, bottom = (min(1.0, max(0.0, value)) for value in scaled)
        unit = (left, top, right, bottom)
        if not is_box(unit):
            do = "Choose a box inside the frame, or another frame."
            raise MetricError(f"a box that overlaps the frame {self.frame!r}", f"{box} for {image_size}", do)
        return self._write(unit, image_size)

    def format_mask(self, pieces: Sequence[str]) -> Bool[np.ndarray, " piece"]:
        """Mark the tokens that carry form, not content: brackets, commas, decimal points, tags, the object's name.

        P5 (arXiv:2605.19792, causal mediation) leaves these out of the perplexity and keeps them in the prefix. A piece
        is content when it holds at least one character of a coordinate.

        Args:
            pieces: the answer's tokens as strings, in order.

        Returns:
            True where a piece is format; ``~mask`` is the keep mask of `metrics.perplexity`.
        """
        content = np.zeros(sum(map(len, pieces)), dtype=bool)
        for start, stop in self._content("".join(pieces)):
            content[start:stop] = True
        ends = list(accumulate(map(len, pieces)))
        return np.array([not content[end - len(piece) : end].any() for piece, end in zip(pieces, ends, strict=True)], bool)

    @abstractmethod
    def _read(self, text: str, image_size: tuple[int, int]) -> Box | None:
        """Return the first box of a text as fractions of the frame."""

    @abstractmethod
    def _write(self, unit: Box, image_size: tuple[int, int]) -> str:
        """Spell a box given as fractions of the frame."""

    @abstractmethod
    def _content(self, text: str) -> list[tuple[int, int]]:
        """Return the character spans of a text that carry coordinates."""


def _bracket_numbers(text: str) -> Box | None:
    """Return the four numbers of the first bracketed list, None when there is none or one is not a number."""
    found = _BRACKETS.search(text)
    if found is None:
        return None
    try:
        x0, y0, x1, y1 = (float(group.lstrip("[")) for group in found.groups())
    except ValueError:
        return None
    return x0, y0, x1, y1


def _bracket_digits(text: str) -> list[tuple[int, int]]:
    """Return the digits from the first bracket on; a digit in the object's name is not a coordinate."""
    return [found.span() for found in _DIGIT.finditer(text, max(text.find("["), 0))]


@dataclasses.dataclass(frozen=True, kw_only=True)
class UnitSquare(BoxFormat):
    """LLaVA-1.5: ``[0.25, 0.30, 0.75, 0.80]``, fractions of the padded square (or of the centre crop).

    The public HF checkpoints crop, the original code and P5 (arXiv:2605.19792) pad; choose by what the processor did.
    """

    frame: Frame = "padded_square"
    decimals: int = 2

    def _read(self, text: str, image_size: tuple[int, int]) -> Box | None:
        return _bracket_numbers(text)

    def _write(self, unit: Box, image_size: tuple[int, int]) -> str:
        return "[" + ", ".join(f"{value:.{self.decimals}f}" for value in unit) + "]"

    def _content(self, text: str) -> list[tuple[int, int]]:
        return _bracket_digits(text)


@dataclasses.dataclass(frozen=True, kw_only=True)
class PerMille(BoxFormat):
    """InternVL: ``<ref>cat</ref><box>[[250, 300, 750, 800]]</box>``, integers 0..1000 over the original image.

    As in OpenGVLab's evaluation code, numbers that sum to less than 4 are taken as fractions of 1.
    """

    frame: Frame = "image"
    label: str = ""

    def _read(self, text: str, image_size: tuple[int, int]) -> Box | None:
        numbers = _bracket_numbers(text)
        if numbers is None or sum(numbers) < 4:
            return numbers
        x0, y0, x1, y1 = numbers
        return x0 / 1000, y0 / 1000, x1 / 1000, y1 / 1000

    def _write(self, unit: Box, image_size: tuple[int, int]) -> str:
        reference = f"<ref>{self.label}</ref>" if self.label else ""
        return f"{reference}<box>[[{', '.join(str(round(value * 1000)) for value in unit)}]]</box>"

    def _content(self, text: str) -> list[tuple[int, int]]:
        return _bracket_digits(text)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ResizedPixels(BoxFormat):
    """Qwen2.5-VL: ``[119, 144, 483, 380]``, pixels of the image after the processor's resize.

    The resize rounds both sides to multiples of `factor` and keeps the area within the pixel budget (Qwen's
    `smart_resize`; defaults of the published processor). Read the three numbers from the model's own processor.
    """

    frame: Frame = "image"
    factor: int = 28
    min_pixels: int = 56 * 56
    max_pixels: int = 14 * 14 * 4 * 1280

    def resized(self, image_size: tuple[int, int]) -> tuple[int, int]:
        """Return ``(height, width)`` after the resize.

        >>> ResizedPixels().resized((480, 640))
        (476, 644)
        """
        height, width = image_size
        sides = [round(side / self.factor) * self.factor for side in image_size]  # 0 for a thin side, which then grows
        if sides[0] * sides[1] > self.max_pixels:
            shrink = math.sqrt(height * width / self.max_pixels)
            sides = [max(self.factor, math.floor(side / shrink / self.factor) * self.factor) for side in image_size]
        elif sides[0] * sides[1] < self.min_pixels:
            grow = math.sqrt(self.min_pixels / (height * width))
            sides = [math.ceil(side * grow / self.factor) * self.factor for side in image_size]
        return sides[0], sides[1]

    def _read(self, text: str, image_size: tuple[int, int]) -> Box | None:
        numbers = _bracket_numbers(text)
        if numbers is None:
            return None
        (height, width), (x0, y0, x1, y1) = self.resized(image_size), numbers
        return x0 / width, y0 / height, x1 / width, y1 / height

    def _write(self, unit: Box, image_size: tuple[int, int]) -> str:
        height, width = self.resized(image_size)
        scales = (width, height, width, height)
        return "[" + ", ".join(str(round(value * scale)) for value, scale in zip(unit, scales, strict=True)) + "]"

    def _content(self, text: str) -> list[tuple[int, int]]:
        return _bracket_digits(text)


@dataclasses.dataclass(frozen=True, kw_only=True)
class BinTokens(BoxFormat):
    """Four tokens out of a vocabulary of coordinate bins, such as ``<x3> <y4> <x12> <y15>``.

    The shipped tiny models answer in this format.

    Attributes:
        bins: how many bins an axis has; they are numbered from 0.
        prefixes: what stands before the number of each of x0, y0, x1, y1.
        suffix: what stands after it.
        joiner: what stands between the tokens when a box is written; reading accepts any white space.
        anchor: "centre" when bin k means (k + 1/2) / bins, "edge" when it means k / (bins - 1).
        digits: numbers are written with at least so many digits, zeros in front.
    """

    frame: Frame = "image"
    bins: int
    prefixes: tuple[str, str, str, str] = ("<x", "<y", "<x", "<y")
    suffix: str = ">"
    joiner: str = " "
    anchor: Literal["centre", "edge"] = "centre"
    digits: int = 1

    def __post_init__(self) -> None:
        if self.bins < 2:
            raise MetricError("at least 2 bins", f"bins={self.bins}", "Give the number of coordinate tokens per axis.")

    def _read(self, text: str, image_size: tuple[int, int]) -> Box | None:
        tokens = (f"{re.escape(prefix)}([0-9]{{1,6}}){re.escape(self.suffix)}" for prefix in self.prefixes)
        found = re.search(r"\s*".join(tokens), text)
        if found is None or any(int(group) >= self.bins for group in found.groups()):
            return None
        x0, y0, x1, y1 = (self._value(int(group)) for group in found.groups())
        return x0, y0, x1, y1

    def _write(self, unit: Box, image_size: tuple[int, int]) -> str:
        places = zip(self.prefixes, unit, strict=True)
        return self.joiner.join(f"{prefix}{self._bin(value):0{self.digits}d}{self.suffix}" for prefix, value in places)

    def _content(self, text: str) -> list[tuple[int, int]]:
        prefix = "|".join(sorted(map(re.escape, set(self.prefixes)), key=len, reverse=True))
        return [found.span() for found in re.finditer(f"(?:{prefix})[0-9]+{re.escape(self.suffix)}", text)]

    def _value(self, index: int) -> float:
        return (index + 0.5) / self.bins if self.anchor == "centre" else index / (self.bins - 1)

    def _bin(self, value: float) -> int:
        if self.anchor == "edge":
            return round(value * (self.bins - 1))
        return min(self.bins - 1, int(value * self.bins))
