"""Score the shipped models on held-out scenes: `python -m sightlens.zoo.evaluate --model all --scenes 200 --check`."""

import argparse
import sys
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
import torch

from sightlens.experiments import Cell, GeneratedAnswer, Study, Trial, make_trials
from sightlens.metrics import LocMetric
from sightlens.model import HookedVLM
from sightlens.stimuli import Question
from sightlens.zoo.batches import Batcher
from sightlens.zoo.recipe import HELD_OUT_SEED, RECIPES

LOC = LocMetric()
LONGEST_ANSWER = 5
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
    """A question put to a model, the size of the object asked for, and the number of views of the picture."""

    trial: Trial
    size: str | None
    views: int


@dataclass(frozen=True)
class Outcome:
    """One answered question. `value` is the intersection over union for a box, else 1 for right and 0 for wrong."""

    question: Question
    value: float
    size: str | None
    views: int


def held_out(family: str, number: int, *, seed: int) -> list[Posed]:
    """Every question about `number` scenes of a seed that training never uses.

    The layouts come in the proportions of training; questions with answers of one length stand together.
    """
    recipe = RECIPES[family]
    batcher = Batcher(recipe, seed=seed)
    rng = np.random.default_rng([seed, 7])
    picks = rng.choice(len(recipe.layouts), size=number, p=[layout.share for layout in recipe.layouts])
    posed = []
    for index, pick in enumerate(picks):
        layout = recipe.layouts[int(pick)]
        stimulus, questions = batcher.scene(index, layout)
        sizes = [None if question.target is None else stimulus.objects[question.target].size for question in questions]
        # a scene may ask one question twice, and every trial of a study has its own id
        trials = [replace(trial, id=f"{trial.id}#{k}") for k, trial in enumerate(make_trials(stimulus, questions))]
        posed += [Posed(trial, size, layout.views) for trial, size in zip(trials, sizes, strict=True)]
    return sorted(posed, key=lambda entry: (entry.trial.question.kind == "localization", entry.views))


def ask(model: HookedVLM, number: int, *, seed: int = HELD_OUT_SEED) -> list[Outcome]:
    """Answer every question about `number` held-out scenes."""
    posed = held_out(model.processing.family.name, number, seed=seed)
    study = Study("held-out", (Cell({"model": model.name}),), tuple(entry.trial for entry in posed), GeneratedAnswer(LONGEST_ANSWER))
    values = study.run(model, batch_size=TOGETHER).records[0].values
    metric = {"localization": "iou", "existence": "correct", "counting": "correct"}
    return [
        Outcome(entry.trial.question, values[metric[entry.trial.question.kind]][k], entry.size, entry.views)
        for k, entry in enumerate(posed)
    ]


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
        for group in ("", f"_{outcome.size}", f"_views{outcome.views}"):
            yield f"iou{group}", value
            yield f"loc{group}", float(LOC.score(np.array([value]))[0])
        yield from ((f"iou_above_{threshold}", float(value > threshold)) for threshold in LOC.thresholds)
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
        scores = score(ask(HookedVLM.from_pretrained(given.folder or FOLDERS[name]), given.scenes, seed=given.seed))
        print(f"tiny-{name}, {given.scenes} scenes, seed {given.seed}")
        print("\n".join(f"  {key:22s} {value:.3f}" for key, value in scores.items()))
        missed = Bars().missed(scores)
        print("  below the bar: " + ("; ".join(missed) or "nothing"))
        failed |= bool(missed)
    return int(failed and given.check)


if __name__ == "__main__":
    sys.exit(main())
