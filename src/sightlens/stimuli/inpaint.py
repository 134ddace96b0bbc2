"""Filling a masked region of a picture with something plausible."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from jaxtyping import Bool, UInt8
from torch import nn
from torch.nn import functional

from sightlens.errors import ExtraError, StimulusError

Pixels = UInt8[np.ndarray, "height width 3"]
Hole = Bool[np.ndarray, "height width"]


class Inpainter(ABC):
    """Fills holes in pictures; frozen data, so that its settings can be recorded."""

    kind: ClassVar[str]

    @abstractmethod
    def paint(self, pixels: Pixels, hole: Hole) -> Pixels:
        """Return a picture whose hole is filled; pixels outside of it are ignored."""

    def describe(self) -> dict[str, Any]:
        """Return kind and settings as JSON data."""
        return {"kind": self.kind, **{name: str(value) if isinstance(value, Path) else value for name, value in asdict(self).items()}}  # type: ignore[call-overload]

    def fill(self, pixels: Pixels, hole: Hole) -> Pixels:
        """Fill the hole and leave every other pixel as it was.

        Raises:
            StimulusError: for a hole that is empty or covers the whole picture.
        """
        if not hole.any() or hole.all():
            raise StimulusError("a hole that leaves some of the picture", f"{int(hole.sum())} of {hole.size} pixels", "Choose another.")
        return np.where(hole[..., None], self.paint(pixels, hole), pixels)


@dataclass(frozen=True)
class MeanFill(Inpainter):
    """Fills with the mean colour of the rest of the picture; leaves a visible silhouette, so it is for tests."""

    kind: ClassVar[str] = "mean"

    def paint(self, pixels: Pixels, hole: Hole) -> Pixels:
        """Return the mean colour everywhere."""
        return np.broadcast_to(pixels[~hole].mean(axis=0).round().astype(np.uint8), pixels.shape).copy()


@dataclass(frozen=True)
class OpenCV(Inpainter):
    """Fills from the hole's rim inward: Telea 2004 or Navier-Stokes (Bertalmio et al. 2001), with OpenCV.

    Attributes:
        method: "telea" or "navier_stokes".
        radius: of the neighbourhood that a pixel is filled from.
    """

    kind: ClassVar[str] = "opencv"

    method: Literal["telea", "navier_stokes"] = "telea"
    radius: int = 5

    def paint(self, pixels: Pixels, hole: Hole) -> Pixels:
        """Fill with OpenCV.

        Raises:
            ExtraError: without OpenCV.
        """
        try:
            import cv2
        except ImportError as problem:
            raise ExtraError.missing("opencv-python-headless", "data") from problem
        flag = {"telea": cv2.INPAINT_TELEA, "navier_stokes": cv2.INPAINT_NS}[self.method]
        return np.asarray(cv2.inpaint(np.ascontiguousarray(pixels), hole.astype(np.uint8), self.radius, flag), dtype=np.uint8)


@dataclass(frozen=True)
class LaMa(Inpainter):
    """Fills with LaMa (Suvorov et al. 2022, arXiv 2109.07161), as the localization paper does, from a local weight file.

    Attributes:
        weights: a TorchScript file that takes a picture ``[1, 3, h, w]`` and a mask ``[1, 1, h, w]``, both 0 to 1, and returns a
            picture of the same shape (``big-lama.pt``). It holds code: take it from a source you trust.
        device: where it runs.
    """

    kind: ClassVar[str] = "lama"

    weights: Path
    device: str = "cpu"

    def describe(self) -> dict[str, Any]:
        """Return the settings, the weights by their content."""
        return {"kind": self.kind, "weights": _digest(self.weights)}

    @torch.no_grad()
    def paint(self, pixels: Pixels, hole: Hole) -> Pixels:
        """Run the network on the picture, its edge repeated at right and bottom up to multiples of 8.

        Raises:
            StimulusError: when the weights cannot be read.
        """
        height, width = hole.shape
        picture = torch.from_numpy(np.ascontiguousarray(pixels)).permute(2, 0, 1)[None].float() / 255
        mask = torch.from_numpy(hole)[None, None].float()
        pad = (0, -width % 8, 0, -height % 8)
        inputs = (functional.pad(tensor, pad, mode="replicate").to(self.device) for tensor in (picture, mask))
        painted = _network(self.weights, self.device)(*inputs)[0, :, :height, :width]
        return (painted.clamp(0, 1) * 255).round().byte().permute(1, 2, 0).cpu().numpy()


@lru_cache(maxsize=1)
def _network(weights: Path, device: str) -> nn.Module:
    try:
        return torch.jit.load(str(weights), map_location=device).eval()
    except (OSError, RuntimeError, ValueError) as problem:
        raise StimulusError("a TorchScript file of LaMa", f"{weights}: {problem}", "Give the path of big-lama.pt.") from problem


def _digest(path: Path) -> str:
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()[:16]
    except OSError as problem:
        raise StimulusError("a weight file", f"{path}: {problem}", "Check the path.") from problem
