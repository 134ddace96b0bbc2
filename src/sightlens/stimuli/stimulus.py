"""What is shown to a model: pictures with known objects, questions about them, and clean/corrupted pairs."""

from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from jaxtyping import Bool
from PIL import Image

Box = tuple[float, float, float, float]
Task = Literal["existence", "localization", "counting", "classification"]
NegativeKind = Literal["colour", "shape", "crossed"]


@dataclass(frozen=True, eq=False)
class SceneObject:
    """One object of a picture. `box` is (x0, y0, x1, y1) in pixels, x1 and y1 exclusive; `mask` covers the picture."""

    label: str
    box: Box
    mask: Bool[np.ndarray, "height width"]
    colour: str | None = None
    shape: str | None = None
    size: str | None = None


@dataclass(frozen=True, eq=False)
class Stimulus:
    """A picture and what is in it. `recipe` is the description it was drawn from, None for photographs."""

    id: str
    image: Image.Image
    objects: tuple[SceneObject, ...] = ()
    recipe: object | None = None

    @property
    def size(self) -> tuple[int, int]:
        """Width and height of the picture in pixels."""
        return self.image.size


@dataclass(frozen=True)
class Question:
    """A question with its true answer.

    `target` indexes the object asked for (None when absent or when several are meant); `box` is its box in pixels for a
    localization question (the answer as text depends on the model family, so `answer` is "" there); `number` is the true
    count of a counting question; `answer` is the class that a list must name for a classification question; `negative`
    says why the answer to an existence question is "no".
    """

    kind: Task
    text: str
    answer: str
    target: int | None = None
    box: Box | None = None
    number: int | None = None
    negative: NegativeKind | None = None


@dataclass(frozen=True, eq=False)
class Pair:
    """Two pictures that are equal pixel by pixel outside `changed`.

    `questions` are about the clean picture. `change` names the edit ("remove", "move", "recount") and `region` is the
    union of the pixels that any edited object covers before or after it, [height, width].
    """

    clean: Stimulus
    corrupted: Stimulus
    change: str
    region: Bool[np.ndarray, "height width"]
    changed: tuple[int, ...] = ()
    questions: tuple[Question, ...] = field(default=())
