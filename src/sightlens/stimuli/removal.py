"""Taking an annotated object out of a photograph: which objects qualify, how, and what is asked about them."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace

import numpy as np
from PIL import Image, ImageFilter

from sightlens.errors import StimulusError
from sightlens.stimuli.inpaint import Inpainter
from sightlens.stimuli.photos import Mask, Photo
from sightlens.stimuli.stimulus import Pair, Question, Stimulus


@dataclass(frozen=True)
class SizeFilter:
    """Which annotated objects may be targets (Schaumlöffel et al. 2026, arXiv 2605.19792, dataset).

    Attributes:
        min_fraction: least share of the picture's pixels that the object covers.
        max_fraction: largest share.
        min_side: least short side of the picture in pixels.
        unique_class: whether the object must be the only one of its class; a crowd region counts as one more.
    """

    min_fraction: float = 0.004
    max_fraction: float = 0.60
    min_side: int = 200
    unique_class: bool = True

    def targets(self, photo: Photo) -> list[int]:
        """Return the indices of a picture's objects that pass."""
        if min(photo.size) < self.min_side:
            return []
        seen = Counter(item.label for item in photo.objects)
        chosen = [k for k, item in enumerate(photo.objects) if not item.crowd and (seen[item.label] == 1 or not self.unique_class)]
        return [k for k in chosen if self.min_fraction <= float(photo.mask(k).mean()) <= self.max_fraction]


@dataclass(frozen=True)
class PhotoWording:
    """How photographs are asked about; the paper's own prompts are in an unpublished supplement, so these are ours.

    Attributes:
        existence: with ``{label}``.
        localization: with ``{label}``; the sentence that LLaVA-1.5 was trained with.
        classification: with ``{classes}``.
    """

    existence: str = "Is there a {label} in the image? Answer yes or no."
    localization: str = "Please provide the bounding box coordinate of the region this sentence describes: {label}."
    classification: str = "Which of the following objects are present in the image? {classes}. Answer with a comma-separated list."

    def ask(self, stimulus: Stimulus, target: int, *, classes: tuple[str, ...]) -> tuple[Question, ...]:
        """Return the questions about one object: is it there, where is it, and, with classes, what is there."""
        item = stimulus.objects[target]
        asked = [
            Question("existence", self.existence.format(label=item.label), "yes", target=target),
            Question("localization", self.localization.format(label=item.label), "", target=target, box=item.box),
        ]
        if classes:
            text = self.classification.format(classes=", ".join(classes))
            asked.append(Question("classification", text, item.label, target=target))
        return tuple(asked)


def remove_object(stimulus: Stimulus, target: int, *, inpainter: Inpainter, dilation: int = 5) -> Pair:
    """Take one object out of a picture; the pictures are equal outside of its mask grown by ``dilation`` pixels.

    The paper does not state the dilation (5 to 10 is usual, since masks leave a rim). What else the hole covers is painted
    over too. The pair carries no questions.

    Raises:
        StimulusError: for an object that does not exist, an empty mask, or a hole that covers the picture.
    """
    if not 0 <= target < len(stimulus.objects):
        raise StimulusError(f"the index of one of {len(stimulus.objects)} objects", str(target), "Choose an object of the picture.")
    hole = grow(stimulus.objects[target].mask, dilation)
    painted = inpainter.fill(np.asarray(stimulus.image), hole)
    return removed(stimulus, target, image=Image.fromarray(painted), region=hole)


def removed(stimulus: Stimulus, target: int, *, image: Image.Image, region: Mask) -> Pair:
    """Return the pair of a picture and the same one without an object."""
    rest = stimulus.objects[:target] + stimulus.objects[target + 1 :]
    corrupted = replace(stimulus, id=f"{stimulus.id}-remove-{target}", image=image, objects=rest)
    return Pair(stimulus, corrupted, "remove", region, (target,))


def grow(mask: Mask, pixels: int) -> Mask:
    """Return a mask grown by so many pixels in each of the eight directions.

    Raises:
        StimulusError: for a negative number.
    """
    if pixels < 0:
        raise StimulusError("a dilation of 0 or more pixels", str(pixels), "Use 5 to 10 for inpainting.")
    if pixels == 0:
        return mask
    picture = Image.fromarray(mask.astype(np.uint8) * 255)
    return np.asarray(picture.filter(ImageFilter.MaxFilter(2 * pixels + 1))) > 0
