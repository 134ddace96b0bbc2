"""What the localization paper's experiments are run on: drawn pairs, or photographs from which an object was taken out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from sightlens.errors import StudyError, listing
from sightlens.model import HookedVLM, fingerprint
from sightlens.stimuli import Pair, PairFolder, PairRecipe, Photo, Stimulus, build_pairs, edits, questions, read_coco, read_voc
from sightlens.stimuli.pair_folder import Ask

SEED = 900_001
ANSWER_TOKENS = 64


@dataclass(frozen=True, eq=False)
class Chosen:
    """Pairs, and what became of the others.

    Attributes:
        pairs: that are used.
        made: pairs before the rule on the model's answers.
        left_out: by photograph, why its picture could not be read.
    """

    pairs: tuple[Pair, ...]
    made: int
    left_out: Mapping[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        """Say how many there are, and why not more."""
        kept = f"{len(self.pairs)} of {self.made} pairs kept: the model's list names the object, and not once it is removed."
        if not self.left_out:
            return kept
        return f"{kept} Left out as unreadable: {len(self.left_out)} ({listing(list(self.left_out.values()), limit=3)})."


def drawn_pairs(count: int) -> list[Pair]:
    """Return held-out drawn scenes, each with and without one object, with a question for each task."""
    pairs = edits.pairs(count, seed=SEED)
    return [replace(pair, questions=(*pair.questions, questions.classification(pair.clean, pair.changed[0]))) for pair in pairs]


def photo_pairs(folder: Path, model: HookedVLM, *, count: int, cache: Path) -> Chosen:
    """Return pairs of photographs whose object the model names before its removal and not after (arXiv 2605.19792, dataset).

    Pictures that cannot be read are left out and reported. For the paper's intersection over several models, call
    `PairFolder.judge` for each and `PairFolder.kept` with all their names.

    Args:
        folder: COCO's, with ``annotations/instances_val2017.json`` and ``val2017/``; or VOC's, with ``Annotations/``,
            ``JPEGImages/`` and ``SegmentationObject/``.
        model: that is asked what is in both pictures.
        count: pairs to make, in order of the photographs' ids.
        cache: folder in which pairs and answers are kept.

    Raises:
        StimulusError: when annotations are missing or of another format.
        StudyError: when no object qualifies, or no pair is kept.
        ExtraError: when decoding or inpainting needs a package that is not installed.
    """
    photos = read_photos(folder)
    recipe = replace(PairRecipe(), classes=tuple(sorted({item.label for photo in photos for item in photo.objects})))
    made = build_pairs(photos, cache, recipe=recipe, unreadable="leave_out", most=count)
    if not made.entries:
        got = f"none in {folder}" + (f"; unreadable: {listing(list(made.left_out.values()), limit=3)}" if made.left_out else "")
        raise StudyError("photographs with an object that passes the paper's filters", got, "Check the folder's pictures and annotations.")
    return Chosen(_kept(made, model), len(made), made.left_out)


def read_photos(folder: Path) -> list[Photo]:
    """Read annotations in VOC's format where ``Annotations/`` is, else in COCO's.

    Raises:
        StimulusError: when they are missing or of another format.
    """
    if (folder / "Annotations").is_dir():
        return read_voc(folder)
    return read_coco(folder / "annotations" / "instances_val2017.json", folder / "val2017")


def ask(model: HookedVLM) -> Ask:
    """Return the model as something that answers one question about each picture."""

    def answers(stimuli: Sequence[Stimulus], texts: Sequence[str]) -> Sequence[str]:
        prompt = model.prepare([stimulus.image for stimulus in stimuli], list(texts))
        return model.generate(prompt, max_new_tokens=ANSWER_TOKENS)

    return answers


def _kept(made: PairFolder, model: HookedVLM) -> tuple[Pair, ...]:
    judge = f"{model.name}, weights {fingerprint(model.hf)}, {ANSWER_TOKENS} tokens"
    made.judge(judge, ask(model), batch_size=8)
    kept = made.kept([judge])
    if not kept:
        wanted = f"a pair whose object {model.name} names before its removal and not after"
        raise StudyError(wanted, f"none of {len(made)}", "Take more pairs, or a model that can list what a picture shows.")
    return tuple(made.pairs(kept))
