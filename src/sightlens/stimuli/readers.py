"""Readers of annotated data sets on disk (COCO, VOC) and of plain folders of pictures."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from sightlens.errors import StimulusError
from sightlens.stimuli.photos import CocoSegmentation, IndexedPixels, Outline, Photo, PhotoObject, Rectangle, read_picture
from sightlens.stimuli.stimulus import Stimulus

SUFFIXES = (".jpg", ".jpeg", ".png", ".bmp", ".webp")


def read_coco(annotations: str | Path, images: str | Path) -> list[Photo]:
    """Read instance annotations in COCO's format; masks are decoded later, picture by picture.

    Args:
        annotations: such as ``instances_val2017.json``.
        images: the folder that holds the pictures.

    Returns:
        Pictures with at least one object, by id.

    Raises:
        StimulusError: when the file is missing or of another format.
    """
    data = _read_json(Path(annotations))
    try:
        names = {category["id"]: category["name"] for category in data["categories"]}
        objects: dict[Any, list[PhotoObject]] = {}
        for entry in data["annotations"]:
            x, y, width, height = map(float, entry["bbox"])
            outline = CocoSegmentation(entry["segmentation"])
            found = PhotoObject(names[entry["category_id"]], (x, y, x + width, y + height), outline, bool(entry.get("iscrowd", 0)))
            objects.setdefault(entry["image_id"], []).append(found)
        pictures = sorted((picture for picture in data["images"] if picture["id"] in objects), key=lambda picture: picture["id"])
        return [Photo(str(p["id"]), Path(images) / p["file_name"], (p["width"], p["height"]), tuple(objects[p["id"]])) for p in pictures]
    except (KeyError, TypeError, ValueError) as problem:
        raise StimulusError("COCO instance annotations", f"{annotations}: {problem!r}", "Give an instances_….json file.") from problem


def read_voc(folder: str | Path, *, split: str | None = None, masks: Literal["segmentation", "box"] = "segmentation") -> list[Photo]:
    """Read a Pascal VOC folder (``Annotations``, ``JPEGImages``, ``SegmentationObject``).

    Args:
        folder: such as ``VOCdevkit/VOC2012``.
        split: a list in ``ImageSets/Main`` or ``ImageSets/Segmentation`` (the first that exists), or None for all.
        masks: "segmentation" takes the pictures that have instance masks, "box" all, with boxes for masks.

    Raises:
        StimulusError: when files are missing or of another format.
    """
    root = Path(folder)
    names = _voc_names(root, split)
    photos = []
    for name in names:
        segmented = root / "SegmentationObject" / f"{name}.png"
        if masks == "box" or segmented.exists():
            photos.append(_voc_photo(root, name, segmented if masks == "segmentation" else None))
    if not photos:
        raise StimulusError("at least one annotated picture", f"none in {root}", 'Check the folder, or use masks="box".')
    return photos


@dataclass(frozen=True)
class ImageFolder:
    """The pictures of a folder and its subfolders, read one at a time; iterate as often as needed.

    Attributes:
        root: the folder; ids are paths relative to it.
        paths: of the pictures, sorted.
    """

    root: Path
    paths: tuple[Path, ...]

    def __len__(self) -> int:
        """Count the pictures."""
        return len(self.paths)

    def __iter__(self) -> Iterator[Stimulus]:
        """Yield each picture, without objects."""
        for path in self.paths:
            yield Stimulus(path.relative_to(self.root).as_posix(), read_picture(path))

    def sample(self, count: int, *, seed: int = 0) -> ImageFolder:
        """Return ``count`` pictures drawn without replacement, in sorted order.

        Raises:
            StimulusError: when there are fewer.
        """
        if not 0 < count <= len(self):
            raise StimulusError(f"1 to {len(self)} pictures", str(count), "Draw fewer.")
        chosen = np.random.default_rng(seed).choice(len(self), size=count, replace=False)
        return replace(self, paths=tuple(self.paths[k] for k in sorted(chosen.tolist())))


def folder_images(path: str | Path) -> ImageFolder:
    """Find the pictures of a folder, as ImageNet's class folders hold them.

    Raises:
        StimulusError: when there is none.
    """
    root = Path(path)
    found = tuple(sorted(file for file in root.rglob("*") if file.suffix.lower() in SUFFIXES and file.is_file()))
    if not found:
        raise StimulusError(f"a folder with pictures ({', '.join(SUFFIXES)})", f"{root}", "Check the path.")
    return ImageFolder(root, found)


def _read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as problem:
        raise StimulusError("a JSON file", f"{path}: {problem}", "Check the path.") from problem


def _voc_names(root: Path, split: str | None) -> list[str]:
    if split is None:
        return sorted(path.stem for path in (root / "Annotations").glob("*.xml"))
    for kind in ("Main", "Segmentation"):
        listed = root / "ImageSets" / kind / f"{split}.txt"
        if listed.exists():
            return [line.split()[0] for line in listed.read_text(encoding="utf-8").splitlines() if line.strip()]
    raise StimulusError(f"ImageSets/Main/{split}.txt", f"none in {root}", "Leave out split= for all pictures.")


def _voc_photo(root: Path, name: str, segmented: Path | None) -> Photo:
    path = root / "Annotations" / f"{name}.xml"
    try:
        tree = ET.parse(path).getroot()
        size = int(_text(tree, "size/width")), int(_text(tree, "size/height"))
        objects = tuple(_voc_object(entry, k, segmented) for k, entry in enumerate(tree.findall("object")))
        return Photo(name, root / "JPEGImages" / _text(tree, "filename"), size, objects)
    except (OSError, ET.ParseError, ValueError) as problem:
        raise StimulusError("a VOC annotation", f"{path}: {problem}", "Fetch the file again.") from problem


def _voc_object(entry: ET.Element, index: int, segmented: Path | None) -> PhotoObject:
    x0, y0, x1, y1 = (float(_text(entry, f"bndbox/{side}")) for side in ("xmin", "ymin", "xmax", "ymax"))
    box = (x0 - 1, y0 - 1, x1, y1)  # VOC counts from 1 and includes the last pixel
    outline: Outline = Rectangle(box) if segmented is None else IndexedPixels(segmented, index + 1)
    return PhotoObject(_text(entry, "name"), box, outline)


def _text(entry: ET.Element, path: str) -> str:
    text = entry.findtext(path)
    if text is None:
        raise ValueError(f"no <{path}>")
    return text.strip()
