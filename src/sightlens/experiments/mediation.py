"""Which attention heads carry the object? Patch each head's output from the clean picture into a run without the object."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import numpy as np
from jaxtyping import Float

from sightlens.engine import Engine
from sightlens.errors import StudyError
from sightlens.experiments.measures import CellTrials, Measure, Measured, answer_likelihoods, teach
from sightlens.experiments.study import Axes, Cell, Study
from sightlens.experiments.trial import Trial, make_trials
from sightlens.families import Prompt
from sightlens.interventions import MERGED, PatchIn
from sightlens.metrics import Mediation, mediation, mediation_ratios
from sightlens.metrics.recovery import Aggregate
from sightlens.model import HookedVLM
from sightlens.stimuli import Pair, Task
from sightlens.store import Result

Score = Literal["nll", "ppl"]
Head = tuple[int, int]
HEADS = "blocks.{}.attn.hook_z"
NONE = -1


@dataclass(frozen=True)
class PatchedLikelihood(Measure):
    """Teacher-force the right answer on pictures without the object; cells may patch from the run on the clean pictures.

    Metrics: ``nll`` (mean negative log-likelihood of the counted answer tokens, nats) and ``ppl``, its exponential.

    Attributes:
        clean: by trial id, the same question asked of the clean picture; the donor ``"clean"``.
    """

    kind: ClassVar[str] = "patched_likelihood"
    metrics: ClassVar[tuple[str, ...]] = ("nll", "ppl")

    clean: Mapping[str, Trial] = field(repr=False)

    def group(self, model: HookedVLM, trial: Trial) -> int:
        """Batch answers of equally many tokens."""
        return len(model.tokenizer(trial.answer(model.box_format), add_special_tokens=False)["input_ids"])

    def describe(self) -> dict[str, Any]:
        """Return what the clean pictures are."""
        return {"kind": self.kind, "clean": {name: trial.digest for name, trial in self.clean.items()}}

    def measure(
        self, engine: Engine, prompt: Prompt, trials: Sequence[Trial], cells: Sequence[CellTrials]
    ) -> Iterator[tuple[int, Measured]]:
        """Run the clean pictures once, then every cell on the others.

        Raises:
            StudyError: when the two pictures of a pair give different layouts.
        """
        model, sources = engine.model, [self.clean[trial.id] for trial in trials]
        taught = teach(model, prompt, trials)
        asked = model.prepare([source.image for source in sources], [source.question.text for source in sources])
        clean = teach(model, asked.with_objects([source.mask for source in sources]), sources)
        _check_layouts(trials, taught, clean)
        _, cache = model.run_with_cache(clean, names_filter=[MERGED, HEADS.format("*")], keep="last")
        for cell, found in answer_likelihoods(engine, taught, trials, cells=cells, donors={"clean": cache}):
            ppl = found.values["perplexity"]
            yield cell, Measured({"nll": np.log(ppl).tolist(), "ppl": ppl}, found.notes)


def _check_layouts(trials: Sequence[Trial], base: Prompt, clean: Prompt) -> None:
    for trial, a, b in zip(trials, base.layouts, clean.layouts, strict=True):
        if a.hash != b.hash:
            raise StudyError("two pictures of one size in a pair", f"different layouts for {trial.id!r}", "Make the pair anew.")


def mediate_heads(model: HookedVLM, pairs: Sequence[Pair], *, task: Task = "localization", positions: str = "all") -> Study:
    """Patch one head at a time from the clean run into the run without the object, and read the right answer's likelihood.

    Base: the picture without the object. Source: the clean picture. Both with the clean picture's answer appended. Cells:
    ``base``, ``source`` (all visual embeddings patched, which makes it the clean run), and ``patched`` with each layer and
    head; every cell of a batch runs in one engine plan. `HeadMediation.of` reads the outcome.
    Schaumlöffel et al. 2026 (arXiv 2605.19792), causal mediation.

    Args:
        model: whose heads are patched.
        pairs: whose questions of this task are asked.
        task: of the questions.
        positions: selector of where a head is patched; the paper leaves it open.

    Raises:
        StudyError: without a question of the task.
    """
    asked = [(pair, question) for pair in pairs for question in pair.questions if question.kind == task]
    if not asked:
        raise StudyError(f"pairs with questions of task {task}", f"none in {len(pairs)} pairs", "Choose another task.")
    clean = [make_trials(pair.clean, [question])[0] for pair, question in asked]
    base = tuple(Trial(trial.id, pair.corrupted.image, trial.question, trial.mask) for trial, (pair, _) in zip(clean, asked, strict=True))
    cells = [_cell("base"), _cell("source", PatchIn(MERGED, at="image"))]
    for layer, head in np.ndindex(model.cfg.n_layers, model.cfg.n_heads):
        cells.append(_cell("patched", PatchIn(HEADS.format(layer), at=positions, heads=(head,)), at=(layer, head)))
    measure = PatchedLikelihood({trial.id: trial for trial in clean})
    return Study("mediate_heads", tuple(cells), base, measure, axes=Axes(x="layer", group="head"))


def _cell(run: str, *patches: PatchIn, at: Head = (NONE, NONE)) -> Cell:
    return Cell({"run": run, "layer": at[0], "head": at[1]}, patches)


@dataclass(frozen=True, eq=False)
class HeadMediation:
    """How much of the object's effect each head mediates.

    Attributes:
        pairs: ids of the questions.
        fractions: of each pair; NaN for a pair that is left out.
        average: over the pairs, with how many went in and how many were left out.
    """

    pairs: tuple[str, ...]
    fractions: Float[np.ndarray, "pair layer head"]
    average: Mediation

    @classmethod
    def of(cls, result: Result, *, score: Score = "ppl", aggregate: Aggregate = "mean_of_ratios", min_gap: float = 1e-6) -> HeadMediation:
        """Read the result of `mediate_heads`.

        Args:
            result: with every cell.
            score: perplexity, as the paper, or its logarithm; they rank heads differently.
            aggregate: see `sightlens.metrics.mediation`.
            min_gap: the smallest ``base - source`` of a pair that counts, in the score's unit.

        Raises:
            MetricError: when no pair has such a gap.
        """
        patched = result.where({"run": "patched"})
        layers, heads = (len(patched.axes[name]) for name in ("layer", "head"))
        by_head = {(record.coordinates["layer"], record.coordinates["head"]): record.values[score] for record in patched.records}
        scores = np.array([by_head[head] for head in sorted(by_head)]).T.reshape(-1, layers, heads)
        base, source = (np.array(result.where({"run": run}).records[0].values[score]) for run in ("base", "source"))
        ratios = mediation_ratios(base, source, patched=scores, min_gap=min_gap)
        average = mediation(base, source, patched=scores, aggregate=aggregate, min_gap=min_gap)
        return cls(result.records[0].examples, ratios, average)

    def ranking(self) -> tuple[Head, ...]:
        """Return all heads as (layer, head), the largest fraction first."""
        return self._ordered(-self.average.fraction)

    def near_zero(self) -> tuple[Head, ...]:
        """Return all heads, those whose fraction is nearest zero first: a control order for `ablate_cumulatively`."""
        return self._ordered(np.abs(self.average.fraction))

    def _ordered(self, key: Float[np.ndarray, "layer head"]) -> tuple[Head, ...]:
        layers, heads = np.unravel_index(np.argsort(key, axis=None, kind="stable"), key.shape)
        return tuple(zip(layers.tolist(), heads.tolist(), strict=True))
