"""What is measured of a model's answers, per trial."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, ClassVar

import torch
from jaxtyping import Bool

from sightlens.engine import Engine
from sightlens.errors import StudyError
from sightlens.experiments.trial import Trial
from sightlens.families import Prompt
from sightlens.interventions import Intervention
from sightlens.metrics import LocMetric, answer_logprobs, existence_matches, iou, names_object, parse_count
from sightlens.metrics.answers import Match
from sightlens.model import HookedVLM
from sightlens.model.apply import Donor

NAN = float("nan")


@dataclass(frozen=True)
class Measured:
    """Numbers per metric and trial, and what else is worth keeping per trial."""

    values: Mapping[str, list[float]]
    notes: list[dict[str, Any]]


@dataclass(frozen=True)
class CellTrials:
    """What is done to the model in a cell, and on which trials of a batch."""

    interventions: tuple[Intervention, ...]
    trials: tuple[int, ...]


class Measure(ABC):
    """A way to turn a batch of trials into numbers, for many cells at once."""

    kind: ClassVar[str]
    metrics: ClassVar[tuple[str, ...]]

    @abstractmethod
    def measure(
        self, engine: Engine, prompt: Prompt, trials: Sequence[Trial], cells: Sequence[CellTrials]
    ) -> Iterator[tuple[int, Measured]]:
        """Measure a batch; yield each cell's index and numbers as soon as it is done, in any order.

        Args:
            engine: with the model.
            prompt: holds exactly these trials.
            trials: of the batch.
            cells: what is done, and to which of the trials.
        """

    def group(self, model: HookedVLM, trial: Trial) -> int:
        """Return a number; only trials with equal ones share a batch."""
        return 0

    def describe(self) -> dict[str, Any]:
        """Return the settings as JSON data."""
        return {"kind": self.kind, **asdict(self)}  # type: ignore[call-overload]


@dataclass(frozen=True)
class GeneratedAnswer(Measure):
    """Generate greedily and compare with the truth.

    Metrics: ``iou`` and ``loc`` (mean over τ of IoU > τ; Schaumlöffel et al. 2026, arXiv 2605.19792, tasks) for
    localization, ``correct`` for existence (first word), counting (first number) and classification (the list names the class,
    as ``match`` says; substring is the paper's rule); NaN where a metric does not apply.
    """

    kind: ClassVar[str] = "generated"
    metrics: ClassVar[tuple[str, ...]] = ("iou", "loc", "correct")

    max_new_tokens: int = 64
    loc: LocMetric = field(default_factory=LocMetric)
    match: Match = "substring"

    def measure(
        self, engine: Engine, prompt: Prompt, trials: Sequence[Trial], cells: Sequence[CellTrials]
    ) -> Iterator[tuple[int, Measured]]:
        """Generate for the batch and score each answer."""
        plan = engine.plan(prompt, [cell.interventions for cell in cells], examples=[cell.trials for cell in cells])
        for cell, texts in plan.stream_texts(max_new_tokens=self.max_new_tokens):
            asked = [trials[index] for index in sorted(cells[cell].trials)]
            scores = [self._score(engine.model, trial, text) for trial, text in zip(asked, texts, strict=True)]
            values = {name: [score.get(name, NAN) for score in scores] for name in self.metrics}
            yield cell, Measured(values, [{"text": text} for text in texts])

    def _score(self, model: HookedVLM, trial: Trial, text: str) -> dict[str, float]:
        if trial.question.kind == "localization":
            box = model.box_format.parse(text, trial.size)
            return {"iou": 0.0 if box is None else iou(box, trial.true_box), "loc": float(self.loc.per_example([box], [trial.true_box])[0])}
        if trial.question.kind == "existence":
            return {"correct": float(existence_matches(text, present=trial.question.answer == "yes"))}
        if trial.question.kind == "classification":
            return {"correct": float(names_object(text, trial.question.answer, match=self.match))}
        return {"correct": float(parse_count(text) == trial.question.number)}


@dataclass(frozen=True)
class AnswerLikelihood(Measure):
    """Teacher-force the right answer and read its log-probability, no format tokens counted.

    Metrics: ``logprob`` (sum over counted tokens, nats) and ``perplexity`` (of the counted tokens; Schaumlöffel et al. 2026,
    arXiv 2605.19792, mediation).
    """

    kind: ClassVar[str] = "likelihood"
    metrics: ClassVar[tuple[str, ...]] = ("logprob", "perplexity")

    def group(self, model: HookedVLM, trial: Trial) -> int:
        """Batch answers of equally many tokens."""
        return len(model.tokenizer(trial.answer(model.box_format), add_special_tokens=False)["input_ids"])

    def measure(
        self, engine: Engine, prompt: Prompt, trials: Sequence[Trial], cells: Sequence[CellTrials]
    ) -> Iterator[tuple[int, Measured]]:
        """Run the batch with its answers appended."""
        yield from answer_likelihoods(engine, teach(engine.model, prompt, trials), trials, cells=cells)


def teach(model: HookedVLM, prompt: Prompt, trials: Sequence[Trial]) -> Prompt:
    """Return a batch's prompt with the right answers appended."""
    return model.with_answers(prompt, [trial.answer(model.box_format) for trial in trials])


def answer_likelihoods(
    engine: Engine, taught: Prompt, trials: Sequence[Trial], *, cells: Sequence[CellTrials], donors: Mapping[str, Donor] | None = None
) -> Iterator[tuple[int, Measured]]:
    """Yield the metrics of `AnswerLikelihood` for each cell.

    Args:
        engine: with the model.
        taught: the trials' prompt with their answers, see `teach`.
        trials: of the batch.
        cells: what is done, and to which of the trials.
        donors: values that interventions take by name.
    """
    model, count = engine.model, taught.layouts[0].select("answer").count
    ids = taught.tensors["input_ids"][:, -count:]
    keep = torch.stack([counted_tokens(model, trial, row.tolist()) for trial, row in zip(trials, ids, strict=True)])
    runs, examples = [cell.interventions for cell in cells], [cell.trials for cell in cells]
    for cell, logits in engine.plan(taught, runs, donors=donors, reads="answer", examples=examples).stream_logits():
        chosen = sorted(cells[cell].trials)
        logprobs = answer_logprobs(logits, ids[chosen], prompt_len=1).double().cpu()
        total, kept = (logprobs * keep[chosen]).sum(-1), keep[chosen].sum(-1)
        values = {"logprob": total.tolist(), "perplexity": (-total / kept).exp().tolist()}
        yield cell, Measured(values, [{"answer": trials[index].answer(model.box_format)} for index in chosen])


def counted_tokens(model: HookedVLM, trial: Trial, ids: list[int]) -> Bool[torch.Tensor, " answer"]:
    """Return which tokens of an answer carry content: all, or of a box those that carry coordinates.

    Raises:
        StudyError: when none does.
    """
    if trial.question.kind != "localization":
        return torch.ones(len(ids), dtype=torch.bool)
    pieces = [model.tokenizer.decode([index]) for index in ids]
    keep = ~torch.as_tensor(model.box_format.format_mask(pieces))
    if not keep.any():
        raise StudyError("an answer with coordinate tokens", f"{pieces}", "Does the model's tokenizer know its box format?")
    return keep
