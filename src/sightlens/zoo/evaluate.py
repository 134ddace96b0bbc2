"""Score the shipped models on held-out scenes: `python -m sightlens.zoo.evaluate --model all --scenes 200 --check`."""

import argparse
import re
import sys
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch

from sightlens.stimuli.stimulus import Box, Question, Stimulus
from sightlens.zoo.answers import Checkpoint, generate, load_checkpoint
from sightlens.zoo.batches import Batcher, relative_box
from sightlens.zoo.recipe import HELD_OUT_SEED, RECIPES
from sightlens.zoo.vocabulary import COORDINATES

THRESHOLDS = (0.5, 0.7, 0.9)
TOGETHER = 96
FOLDERS = {name: Path(__file__).parent / f"tiny-{name}" for name in RECIPES}


@dataclass(frozen=True)
class Bars:
    """The least score of each kind a shipped model must reach."""

    loc: float = 0.70
    iou: float = 0.80
    counting_to_6: float = 0.95
    existence_yes: float = 0.95
    existence_colour: float = 0.97
    existence_shape: float = 0.97
    existence_crossed: float = 0.85

    def missed(self, scores: dict[str, float]) -> list[str]:
        """Every bar above its score, in words."""
        return [f"{name} {scores.get(name, 0.0):.3f} < {bar}" for name, bar in asdict(self).items() if scores.get(name, 0.0) < bar]


@dataclass(frozen=True, eq=False)
class Posed:
    """A question put to a model: about which stimulus, the frame its box is answered in, and the number of views."""

    stimulus: Stimulus
    question: Question
    frame: Box
    views: int


@dataclass(frozen=True)
class Outcome:
    """One answered question. `value` is the intersection over union for a box, else 1 for right and 0 for wrong."""

    question: Question
    said: str
    value: float
    size: str | None
    views: int


def answer_box(text: str) -> Box | None:
    """The box in a generated text as fractions of the answer frame; None when it is not four coordinate tokens."""
    marks = [int(mark) for mark in re.findall(r"<loc(\d\d)>", text)]
    if len(marks) != 4:
        return None
    x0, y0, x1, y1 = (mark / (COORDINATES - 1) for mark in marks)
    return x0, y0, x1, y1


def box_overlap(one: Box, other: Box) -> float:
    """Intersection over union; 0 when a box has no area."""
    wide = min(one[2], other[2]) - max(one[0], other[0])
    high = min(one[3], other[3]) - max(one[1], other[1])
    shared = max(0.0, wide) * max(0.0, high)
    areas = sum(max(0.0, box[2] - box[0]) * max(0.0, box[3] - box[1]) for box in (one, other))
    return shared / (areas - shared) if shared > 0 else 0.0


def held_out(checkpoint: Checkpoint, number: int, *, seed: int) -> list[Posed]:
    """Every question about `number` scenes of a seed that training never uses.

    The layouts come in the proportions of training; questions with answers of one length stand together.
    """
    recipe = RECIPES[checkpoint.family]
    batcher = Batcher(recipe, seed=seed)
    rng = np.random.default_rng([seed, 7])
    picks = rng.choice(len(recipe.layouts), size=number, p=[layout.share for layout in recipe.layouts])
    posed = []
    for index, pick in enumerate(picks):
        stimulus, questions = batcher.scene(index, recipe.layouts[int(pick)])
        views = batcher.views(stimulus)
        posed += [Posed(stimulus, question, views.frame, len(views.windows)) for question in questions]
    return sorted(posed, key=lambda entry: (entry.question.kind == "localization", entry.views))


def ask(checkpoint: Checkpoint, number: int, *, seed: int = HELD_OUT_SEED) -> list[Outcome]:
    """Answer every question about `number` held-out scenes."""
    posed = held_out(checkpoint, number, seed=seed)
    outcomes = []
    for first in range(0, len(posed), TOGETHER):
        group = posed[first : first + TOGETHER]
        answers = generate(checkpoint, [entry.stimulus.image for entry in group], [entry.question.text for entry in group])
        outcomes += [outcome(entry, said) for entry, said in zip(group, answers, strict=True)]
    return outcomes


def outcome(posed: Posed, said: str) -> Outcome:
    """Grade one answer."""
    question = posed.question
    size = posed.stimulus.objects[question.target].size if question.target is not None else None
    return Outcome(question, said, grade(question, said, posed.frame), size, posed.views)


def grade(question: Question, said: str, frame: Box) -> float:
    """Intersection over union for a box question, else whether the words are the same."""
    if question.box is None:
        return float(said.strip() == question.answer)
    box = answer_box(said)
    return 0.0 if box is None else box_overlap(box, relative_box(question.box, frame))


def score(outcomes: list[Outcome]) -> dict[str, float]:
    """Mean of every group of outcomes: by task, size, count, negative kind and number of views."""
    groups: dict[str, list[float]] = defaultdict(list)
    for entry in outcomes:
        for name, value in _memberships(entry):
            groups[name].append(value)
    return {name: float(np.mean(values)) for name, values in sorted(groups.items())}


def _memberships(outcome: Outcome) -> Iterator[tuple[str, float]]:
    question, value = outcome.question, outcome.value
    if question.kind == "localization":
        rates = [float(value > threshold) for threshold in THRESHOLDS]
        for group in ("", f"_{outcome.size}", f"_views{outcome.views}"):
            yield f"iou{group}", value
            yield f"loc{group}", float(np.mean(rates))
        yield from ((f"iou_above_{threshold}", rate) for threshold, rate in zip(THRESHOLDS, rates, strict=True))
    elif question.kind == "counting":
        yield f"counting_{question.number}", value
        yield f"counting_views{outcome.views}", value
        if question.number is not None and 1 <= question.number <= 6:
            yield "counting_to_6", value
    else:
        yield f"existence_{question.negative or question.answer}", value
        yield f"existence_views{outcome.views}", value


def main(arguments: list[str] | None = None) -> int:
    """Command line; returns 1 when --check is given and a bar is missed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=[*sorted(RECIPES), "all"], default="all")
    parser.add_argument("--folder", type=Path, default=None, help="another checkpoint folder of that model")
    parser.add_argument("--seed", type=int, default=HELD_OUT_SEED)
    parser.add_argument("--scenes", type=int, default=200)
    parser.add_argument("--check", action="store_true")
    given = parser.parse_args(arguments)
    torch.set_num_threads(1)
    failed = False
    for name in sorted(RECIPES) if given.model == "all" else [given.model]:
        scores = score(ask(load_checkpoint(given.folder or FOLDERS[name]), given.scenes, seed=given.seed))
        print(f"tiny-{name}, {given.scenes} scenes, seed {given.seed}")
        print("\n".join(f"  {key:22s} {value:.3f}" for key, value in scores.items()))
        missed = Bars().missed(scores)
        print("  below the bar: " + ("; ".join(missed) or "nothing"))
        failed |= bool(missed)
    return int(failed and given.check)


if __name__ == "__main__":
    sys.exit(main())
