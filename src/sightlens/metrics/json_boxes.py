"""Boxes written as JSON, as Qwen-VL models do."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from typing import Literal

from sightlens._types import Box
from sightlens.metrics.box_formats import BoxFormat, Frame, ResizedPixels

_KEY = re.compile(r"\"bbox(?:_2d)?\"\s*:\s*\[")
_NUMBER = re.compile(r"-?[0-9]{1,9}(?:\.[0-9]{1,9})?")
_DIGIT = re.compile(r"[0-9]")


@dataclass(frozen=True, kw_only=True)
class JsonBox(BoxFormat):
    """Qwen-VL: ``[{"bbox_2d": [119, 144, 483, 380], "label": "cat"}]``, with or without a code fence around it.

    Attributes:
        label: what the box is of, for writing.
        unit: "resized" (Qwen2.5-VL: pixels after the processor's resize) or "per_mille" (Qwen3-VL: 0..1000 of the image).
        pixels: how the processor resizes; only "resized" reads it.
    """

    frame: Frame = "image"
    label: str = ""
    unit: Literal["resized", "per_mille"] = "resized"
    pixels: ResizedPixels = field(default_factory=ResizedPixels)

    def _read(self, text: str, image_size: tuple[int, int]) -> Box | None:
        span = self._span(text)
        numbers = [] if span is None else _NUMBER.findall(text, *span)
        if len(numbers) != 4:
            return None
        width, height = self._scale(image_size)
        x0, y0, x1, y1 = map(float, numbers)
        return x0 / width, y0 / height, x1 / width, y1 / height

    def _write(self, unit: Box, image_size: tuple[int, int]) -> str:
        width, height = self._scale(image_size)
        corners = [round(value * scale) for value, scale in zip(unit, (width, height, width, height), strict=True)]
        return json.dumps([{"bbox_2d": corners, "label": self.label}], ensure_ascii=False)

    def _content(self, text: str) -> list[tuple[int, int]]:
        span = self._span(text)
        return [] if span is None else [found.span() for found in _DIGIT.finditer(text, *span)]

    def _span(self, text: str) -> tuple[int, int] | None:
        """Return where the first box's numbers stand, up to the bracket's end or, when it is cut off, the text's."""
        key = _KEY.search(text)
        if key is None:
            return None
        stop = text.find("]", key.end())
        return key.end(), len(text) if stop < 0 else stop

    def _scale(self, image_size: tuple[int, int]) -> tuple[int, int]:
        if self.unit == "per_mille":
            return 1000, 1000
        height, width = self.pixels.resized(image_size)
        return width, height
