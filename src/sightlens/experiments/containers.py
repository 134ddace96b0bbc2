"""Does the predicted box follow the object's content? Copy object tokens outward, and score against a grown true box."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar, Literal

import pandas as pd

from sightlens.engine import Engine
from sightlens.errors import StudyError
from sightlens.experiments.measures import CellTrials, Measure, Measured
from sightlens.experiments.outcome import Outcome
from sightlens.experiments.study import Axes, Cell, Study
from sightlens.experiments.trial import Trial
from sightlens.experiments.views import TOKENS
from sightlens.families import Prompt
from sightlens.interventions import Containerize
from sightlens.layout import Layout, ViewKind
from sightlens.metrics import LocMetric, expand_box, overlaps

EXPANSIONS = {"": 0, "+1": 1, "+2": 2}


@dataclass(frozen=True)
class GrownTruth(Measure):
    """Generate a box greedily and score it against the true box grown by 0, 1 and 2 cells.

    Metrics: ``iou``, ``iou+1``, ``iou+2``, and ``loc``, ``loc+1``, ``loc+2`` (mean over τ of IoU > τ); an answer without a box
    scores 0. Each note holds the text and the predicted box in pixels.

    Attributes:
        max_new_tokens: of an answer.
        loc: the thresholds.
        unit: whose cells the true box grows by: those of the global view or of the tiles. The paper leaves it open.
    """

    kind: ClassVar[str] = "grown_truth"
    metrics: ClassVar[tuple[str, ...]] = tuple(f"{name}{suffix}" for name in ("iou", "loc") for suffix in EXPANSIONS)

    max_new_tokens: int = 64
    loc: LocMetric = field(default_factory=LocMetric)
    unit: ViewKind = "global"

    def measure(
        self, engine: Engine, prompt: Prompt, trials: Sequence[Trial], cells: Sequence[CellTrials]
    ) -> Iterator[tuple[int, Measured]]:
        """Generate for the batch and score each answer against every expansion.

        Raises:
            LayoutError: when the unit is tiles and an image has none.
        """
        runs = [cell.interventions for cell in cells]
        plan = engine.plan(prompt, runs, examples=[cell.trials for cell in cells])
        for cell, texts in plan.stream_texts(max_new_tokens=self.max_new_tokens):
            chosen = sorted(cells[cell].trials)
            boxes = [engine.model.box_format.parse(text, trials[k].size) for k, text in zip(chosen, texts, strict=True)]
            values: dict[str, list[float]] = {}
            for suffix, count in EXPANSIONS.items():
                found = overlaps(boxes, [self._grown(trials[k], prompt.layouts[k], count) for k in chosen])
                values |= {f"iou{suffix}": found.tolist(), f"loc{suffix}": self.loc.score(found).tolist()}
            yield cell, Measured(values, [{"text": text, "box": box} for text, box in zip(texts, boxes, strict=True)])

    def _grown(self, trial: Trial, layout: Layout, cells: int) -> tuple[float, float, float, float]:
        return expand_box(trial.true_box, cells=cells, cell_size=layout.cell_size(self.unit), image_size=trial.size)


def containerize_objects(
    trials: Sequence[Trial], *, paddings: Sequence[int] = (0, 1, 2), seeds: int = 10, unit: ViewKind = "global"
) -> Study:
    """Fill a ring around the object with copies of its tokens; when the box follows, it fits the grown truth better.

    The control, ``tokens`` "translated", does the same around the object's shape elsewhere in the picture.

    Schaumlöffel et al. 2026 (arXiv 2605.19792), containerization. `container_matrix` shows the outcome as the paper does.

    Args:
        trials: with masks; those that ask for a box are taken.
        paddings: widths of the ring in cells; 0 is the untouched run.
        seeds: how many draws of the copied tokens; one cell each.
        unit: by whose cells the true box grows, see `GrownTruth`.

    Raises:
        StudyError: without a trial that asks for a box, or without seeds.
    """
    asked = tuple(trial for trial in trials if trial.question.kind == "localization")
    if seeds < 1:
        raise StudyError("at least one seed", f"{seeds}", "The paper draws ten.")
    cells = []
    for padding in paddings:
        if not padding:
            cells.append(Cell({"padding": 0, "tokens": "none", "seed": 0}))
            continue
        for tokens, where in TOKENS.items():
            for seed in range(seeds):
                do = (Containerize(where.format(seed=seed), padding, seed),)
                cells.append(Cell({"padding": padding, "tokens": tokens, "seed": seed}, do))
    axes = Axes(x="padding", group="tokens", repeats="seed")
    return Study("containerize_objects", tuple(cells), asked, GrownTruth(unit=unit), axes=axes)


def container_matrix(
    outcome: Outcome, *, metric: Literal["iou", "loc"] = "loc", tokens: Literal["object", "translated"] = "object"
) -> pd.DataFrame:
    """Return a mean of `containerize_objects` by the ring's width (rows) and the true box's growth (columns), in cells."""
    places = outcome.where({"tokens": ["none", tokens]})
    chosen = replace(outcome, records=places.records)
    columns = {cells: chosen.table(f"{metric}{suffix}").set_index("padding")["mean"] for suffix, cells in EXPANSIONS.items()}
    return pd.DataFrame(columns).rename_axis(columns="truth_padding")
