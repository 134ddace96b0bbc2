"""One thing asked of a model: a picture, a question, what is right, and which pixels it is about."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from sightlens._types import Box, PILImage, PixelMask
from sightlens.errors import StudyError
from sightlens.families import open_image
from sightlens.metrics import BoxFormat
from sightlens.stimuli import Pair, Question, Stimulus


@dataclass(frozen=True, eq=False)
class Trial:
    """A question about a picture.

    Attributes:
        id: unique in a study.
        image: the picture.
        question: text, kind and truth.
        mask: the pixels of the object asked for ``[height, width]``, or None; what the selector ``object`` means.
        scores: a number for each visual token by position, or None; what the selector ``top(…)`` ranks.
    """

    id: str
    image: PILImage
    question: Question
    mask: PixelMask | None = None
    scores: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        """Refuse a counting question without its number, which no answer could match.

        Raises:
            StudyError: saying which.
        """
        if self.question.kind == "counting" and self.question.number is None:
            raise StudyError("a counting question with its number", f"{self.question.text!r} ({self.id})", "Give Question(number=…).")

    @property
    def size(self) -> tuple[int, int]:
        """``(height, width)`` of the picture."""
        return self.image.height, self.image.width

    @property
    def digest(self) -> str:
        """Hash of everything that a measurement depends on; the picture counts as the RGB pixels that the model is shown."""
        digest = hashlib.sha256(repr((self.id, self.question, self.size)).encode())
        digest.update(open_image(self.image).tobytes())
        digest.update(b"" if self.mask is None else self.mask.tobytes())
        digest.update(b"" if self.scores is None else repr(self.scores).encode())
        return digest.hexdigest()[:16]

    def answer(self, box_format: BoxFormat) -> str:
        """Return the right answer as the model would write it."""
        if self.question.kind == "localization":
            return box_format.render(self.true_box, self.size)
        return self.question.answer

    @property
    def true_box(self) -> Box:
        """The box of a localization question, in pixels.

        Raises:
            StudyError: for a question without one.
        """
        if self.question.box is None:
            raise StudyError("a question with a true box", f"{self.question.text!r} ({self.id})", "Give Question(box=…).")
        return self.question.box


def make_trials(stimulus: Stimulus, questions: Iterable[Question]) -> tuple[Trial, ...]:
    """Return one trial per question; a question about one object carries that object's mask.

    A list question asks about no object in particular, so its trial's id names the answer too.
    """
    return tuple(
        Trial(
            "/".join([stimulus.id, question.text, *([question.answer] if question.kind == "classification" else [])]),
            stimulus.image,
            question,
            None if question.target is None else stimulus.objects[question.target].mask,
        )
        for question in questions
    )


def pair_trials(pairs: Sequence[Pair]) -> tuple[Trial, ...]:
    """Return the trials of the clean pictures of pairs."""
    return tuple(trial for pair in pairs for trial in make_trials(pair.clean, pair.questions))
