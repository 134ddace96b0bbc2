"""Annotated photographs: what a data set says about a picture, decoded only when the picture is loaded."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Bool
from PIL import Image, UnidentifiedImageError

from sightlens.errors import ExtraError, StimulusError
from sightlens.stimuli.stimulus import Box, SceneObject, Stimulus

Mask = Bool[np.ndarray, "height width"]


class Outline(ABC):
    """Which pixels an annotated object covers."""

    @abstractmethod
    def mask(self, size: tuple[int, int]) -> Mask:
        """Decode the mask.

        Args:
            size: (width, height) of the picture.
        """


@dataclass(frozen=True, eq=False)
class CocoSegmentation(Outline):
    """COCO's ``segmentation``: polygons, or run lengths (plain or compressed); decoded by pycocotools."""

    data: Any

    def mask(self, size: tuple[int, int]) -> Mask:
        """Decode as COCO's own tools do.

        Raises:
            ExtraError: without pycocotools.
        """
        coco_mask, (width, height), runs = _coco_mask(), size, self.data
        if not isinstance(runs, Mapping) or isinstance(runs["counts"], list):
            runs = coco_mask.frPyObjects(runs, height, width)
            runs = coco_mask.merge(runs) if isinstance(runs, list) else runs
        return coco_mask.decode(runs).astype(bool)


@dataclass(frozen=True)
class IndexedPixels(Outline):
    """The pixels of one palette index of a PNG, as in VOC's ``SegmentationObject``."""

    path: Path
    index: int

    def mask(self, size: tuple[int, int]) -> Mask:
        """Read the PNG."""
        with Image.open(self.path) as picture:
            return np.asarray(picture) == self.index


@dataclass(frozen=True)
class Rectangle(Outline):
    """The pixels of a box, for data without masks."""

    box: Box

    def mask(self, size: tuple[int, int]) -> Mask:
        """Fill the box, edges rounded outward."""
        filled = np.zeros((size[1], size[0]), dtype=bool)
        x0, y0, x1, y1 = self.box
        filled[max(0, int(np.floor(y0))) : int(np.ceil(y1)), max(0, int(np.floor(x0))) : int(np.ceil(x1))] = True
        return filled


@dataclass(frozen=True)
class PhotoObject:
    """One annotated object; ``crowd`` marks a region of several objects, which is never a target."""

    label: str
    box: Box
    outline: Outline
    crowd: bool = False


@dataclass(frozen=True)
class Photo:
    """One annotated picture on disk.

    Attributes:
        id: unique in its data set.
        path: of the picture.
        size: (width, height) in pixels, as the annotations state it.
        objects: in the order of the annotations.
    """

    id: str
    path: Path
    size: tuple[int, int]
    objects: tuple[PhotoObject, ...]

    @property
    def digest(self) -> str:
        """A hash of what the annotations say (16 hexadecimal digits), outlines left out."""
        objects = [(item.label, item.box, item.crowd) for item in self.objects]
        return hashlib.sha256(repr((self.id, self.path.name, self.size, objects)).encode()).hexdigest()[:16]

    def mask(self, target: int) -> Mask:
        """Decode the mask of one object.

        Raises:
            StimulusError: when it has another size than the picture.
        """
        mask = self.objects[target].outline.mask(self.size)
        if mask.shape != (self.size[1], self.size[0]):
            raise StimulusError(f"a mask of {self.size[0]}×{self.size[1]} pixels", f"{mask.shape[::-1]} for {self.id}", "Check the data.")
        return mask

    def load(self) -> Stimulus:
        """Read the picture as stored (no rotation by EXIF: annotations do not rotate either) and decode all masks.

        Raises:
            StimulusError: when the picture is missing, unreadable, or of another size than its annotations say.
        """
        image = read_picture(self.path)
        if image.size != self.size:
            raise StimulusError(f"a picture of {self.size[0]}×{self.size[1]} pixels", f"{image.size} in {self.path}", "Check the data.")
        objects = tuple(SceneObject(item.label, item.box, self.mask(k)) for k, item in enumerate(self.objects))
        return Stimulus(self.id, image, objects)


def _coco_mask() -> Any:
    try:
        from pycocotools import mask
    except ImportError as problem:
        raise ExtraError.missing("pycocotools", "data") from problem
    return mask


def read_picture(path: Path) -> Image.Image:
    """Read a picture as RGB.

    Raises:
        StimulusError: when it is missing or unreadable.
    """
    try:
        with Image.open(path) as picture:
            return picture.convert("RGB")
    except (OSError, UnidentifiedImageError, ValueError, SyntaxError) as problem:
        raise StimulusError("a readable picture", f"{path}: {problem}", "Fetch the file again, or leave it out.") from problem
