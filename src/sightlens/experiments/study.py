"""A study: cells × trials × a measure, as a value; running it yields one record per cell and can be resumed."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from rich.progress import Progress, TextColumn, TimeRemainingColumn

from sightlens.engine import Engine
from sightlens.errors import SelectorError, StudyError, listing
from sightlens.experiments.measures import CellTrials, GeneratedAnswer, Measure, Measured
from sightlens.experiments.norms import bind_norms, needs_norms
from sightlens.experiments.outcome import Outcome
from sightlens.experiments.trial import Trial
from sightlens.families import Prompt
from sightlens.families.compat import library_versions
from sightlens.interventions import Intervention
from sightlens.layout import Layout
from sightlens.model import HookedVLM
from sightlens.model.fingerprint import donor_digest, fingerprint
from sightlens.store import Coordinate, Manifest, Provenance, Record, cell_key, open_store

KEEP_BYTES = 2**31
Advance = Callable[[int], None]
FLUSH_SECONDS = 20.0


@dataclass(frozen=True)
class Cell:
    """One place of a study: its coordinates by axis, and what is done to the model there."""

    coordinates: Mapping[str, Coordinate]
    interventions: tuple[Intervention, ...] = ()


@runtime_checkable
class ExpandingCells(Protocol):
    """Cells that depend on how many layers the model has."""

    def expand(self, layers: int) -> tuple[Cell, ...]:
        """Return the cells for a model of so many layers."""
        ...


@dataclass(frozen=True)
class Batch:
    """Trials that run together, with their prompt."""

    trials: tuple[Trial, ...]
    prompt: Prompt


@dataclass(frozen=True)
class Axes:
    """Along which coordinates an outcome is drawn: ``x`` (the first when empty), ``group``, and ``repeats``, which are averaged."""

    x: str = ""
    group: str | None = None
    repeats: str | None = None


@dataclass(frozen=True)
class Study:
    """Named cells over trials, measured one way.

    Attributes:
        name: of the study.
        cells: what is done; every cell has the same axes. They may wait for the model's number of layers.
        trials: what is asked.
        measure: what is read off the answers.
        seed: of the record's provenance.
        axes: how an outcome is drawn.
    """

    name: str
    cells: tuple[Cell, ...] | ExpandingCells
    trials: tuple[Trial, ...]
    measure: Measure = field(default_factory=GeneratedAnswer)
    seed: int = 0
    axes: Axes = field(default_factory=Axes)

    def __post_init__(self) -> None:
        """Check that there is something to run.

        Raises:
            StudyError: without cells or trials, or with two trials of one id, or cells on different axes.
        """
        if not self.trials:
            raise StudyError("at least one trial", "none", "Add some.")
        ids = [trial.id for trial in self.trials]
        if twice := sorted({name for name in ids if ids.count(name) > 1}):
            raise StudyError("trials with different ids", listing(twice), "Give each its own id.")
        if isinstance(self.cells, tuple):
            _check_cells(self.cells)

    def measured_by(self, measure: Measure) -> Study:
        """Return the study with another measure."""
        return replace(self, measure=measure)

    def run(
        self,
        model: HookedVLM,
        *,
        store: str | Path | None = None,
        batch_size: int = 16,
        memory: str | int = "4GB",
        progress: bool = True,
    ) -> Outcome:
        """Measure every trial of every cell that the store does not hold yet, with the engine.

        Args:
            model: with the donors that the interventions name.
            store: a folder; a killed run goes on there. In memory when None.
            batch_size: trials at once; it changes speed, not numbers.
            memory: budget of the engine beside the model.
            progress: whether to show a progress bar.

        Returns:
            All records, those measured earlier too.

        Raises:
            StoreError: when the folder belongs to another study, model or layout.
            SelectorError, InterventionError: when a cell cannot be run.
        """
        cells = self.cells if isinstance(self.cells, tuple) else self.cells.expand(model.cfg.n_layers)
        _check_cells(cells)
        norms = needs_norms(one for cell in cells for one in cell.interventions)
        engine, batches = Engine(model, memory=memory), Batches(model, self, batch_size=batch_size, norms=norms)
        provenance = provenance_of(model, seed=self.seed, layout_hash=batches.layout_hash)
        with open_store(store, Manifest.of(self.name, self._definition(cells, model), provenance=provenance)) as records:
            done = {cell: frozenset(examples) for cell, examples in records.done().items()}
            with _bar(self.name, len(cells) * len(self.trials), shown=progress) as advance:
                advance(sum(map(len, done.values())))
                for batch in batches:
                    for found in _flushed(self._measure(engine, cells, batch, done=done, provenance=provenance)):
                        records.append(found)
                        advance(sum(len(record.examples) for record in found))
            x = self.axes.x or next(iter(cells[0].coordinates))
            order = {cell_key(cell.coordinates): place for place, cell in enumerate(cells)}
            ordered = sorted(records.read().records, key=lambda record: order[record.cell])
            return Outcome(tuple(map(self._in_order, ordered)), x, self.axes.group, self.axes.repeats)

    def _measure(
        self, engine: Engine, cells: Sequence[Cell], batch: Batch, *, done: Mapping[str, frozenset[str]], provenance: Provenance
    ) -> Iterator[Record]:
        """Measure what is not done of a batch, and yield each cell's record as soon as there is one.

        Trials on which an intervention selects nothing are not run; they get NaN and the reason.
        """
        todo: list[tuple[Cell, CellTrials]] = []
        for cell in cells:
            known = done.get(cell_key(cell.coordinates), frozenset())
            new = [k for k, trial in enumerate(batch.trials) if trial.id not in known]
            reasons = {k: reason for k in new if (reason := _unusable(cell, batch.prompt.layouts[k])) is not None}
            if reasons:
                yield self._record(cell, [batch.trials[k] for k in reasons], self._missing(list(reasons.values())), provenance)
            if len(new) > len(reasons):
                todo.append((cell, CellTrials(cell.interventions, tuple(k for k in new if k not in reasons))))
        if todo:
            for index, measured in self.measure.measure(engine, batch.prompt, batch.trials, [run for _, run in todo]):
                cell, run = todo[index]
                yield self._record(cell, [batch.trials[k] for k in run.trials], measured, provenance)

    def _missing(self, reasons: Sequence[str]) -> Measured:
        return Measured(
            {name: [float("nan")] * len(reasons) for name in self.measure.metrics}, [{"left_out": reason} for reason in reasons]
        )

    def _record(self, cell: Cell, trials: Sequence[Trial], measured: Measured, provenance: Provenance) -> Record:
        return Record(
            study=self.name,
            coordinates=cell.coordinates,
            examples=tuple(trial.id for trial in trials),
            values={name: measured.values[name] for name in self.measure.metrics},
            provenance=provenance,
            extras={"interventions": [intervention.to_dict() for intervention in cell.interventions]},
            notes=tuple(measured.notes),
        )

    def _in_order(self, record: Record) -> Record:
        """Return a record with its examples in the order of the trials, whatever batches they came in."""
        place = {example: k for k, example in enumerate(record.examples)}
        order = [place[trial.id] for trial in self.trials]
        values = {name: [numbers[k] for k in order] for name, numbers in record.values.items()}
        return replace(
            record, examples=tuple(trial.id for trial in self.trials), values=values, notes=tuple(record.notes[k] for k in order)
        )

    def _definition(self, cells: Sequence[Cell], model: HookedVLM) -> dict[str, Any]:
        plain = [{"at": dict(cell.coordinates), "do": [i.to_dict() for i in cell.interventions]} for cell in cells]
        named = sorted({name for cell in cells for intervention in cell.interventions for name in intervention.donors})
        donors = {name: donor_digest(model.donors[name]) for name in named if name in model.donors}
        return {"cells": plain, "trials": [trial.digest for trial in self.trials], "measure": self.measure.describe(), "donors": donors}


def provenance_of(model: HookedVLM, *, seed: int, layout_hash: str) -> Provenance:
    """Return where the numbers of a run come from."""
    return Provenance(
        model_id=model.name,
        content_hash=fingerprint(model.hf),
        dtype=str(model.hf.dtype).removeprefix("torch."),
        attention=model.attention,
        seed=seed,
        layout_hash=layout_hash,
        device=str(model.device),
        sightlens=version("sightlens"),
        versions=tuple(sorted(library_versions().items())),
    )


def _check_cells(cells: Sequence[Cell]) -> None:
    if not cells:
        raise StudyError("at least one cell", "none", "Add some.")
    axes = {tuple(cell.coordinates) for cell in cells}
    if len(axes) > 1 or () in axes:
        raise StudyError("cells on the same axes, at least one", f"{sorted(axes)}", "Give every cell the same coordinate names.")
    keys = [cell_key(cell.coordinates) for cell in cells]
    if twice := sorted({key for key in keys if keys.count(key) > 1}):
        raise StudyError("cells with different coordinates", listing(twice), "Add an axis that tells them apart.")


def _unusable(cell: Cell, layout: Layout) -> str | None:
    """Return why a cell's interventions cannot act on an example, or None."""
    for intervention in cell.interventions:
        try:
            intervention.require(layout)
        except SelectorError as problem:
            return str(problem)
    return None


class Batches:
    """The trials of a study in batches, prepared once while they fit in memory and again when they run otherwise."""

    def __init__(self, model: HookedVLM, study: Study, *, batch_size: int, norms: bool = False) -> None:
        """Group the trials, and prepare them once to learn their layouts (and the norms of visual tokens, where asked for).

        Raises:
            StudyError: when the batch size is not positive.
        """
        if batch_size < 1:
            raise StudyError("a batch size of at least 1", f"{batch_size}", "Give a positive number.")
        self._model, self._kept, self._room, self._norms = model, {}, KEEP_BYTES, norms
        groups: dict[int, list[Trial]] = {}
        for trial in study.trials:
            groups.setdefault(study.measure.group(model, trial), []).append(trial)
        self._groups = [tuple(g[k : k + batch_size]) for g in groups.values() for k in range(0, len(g), batch_size)]
        # without padding, which depends on what else is in the batch
        pairs = (pair for batch in self for pair in zip(batch.trials, batch.prompt.layouts, strict=True))
        hashes = {trial.id: layout.unpad().hash for trial, layout in pairs}
        self.layout_hash = _join(hashes[trial.id] for trial in study.trials)

    def __len__(self) -> int:
        """Count the batches."""
        return len(self._groups)

    def __iter__(self) -> Iterator[Batch]:
        """Yield the batches in order."""
        for index, trials in enumerate(self._groups):
            if index not in self._kept:
                batch = Batch(trials, self.prepare(trials))
                size = sum(tensor.nbytes for tensor in batch.prompt.tensors.values())
                if size > self._room:
                    yield batch
                    continue
                self._room -= size
                self._kept[index] = batch
            yield self._kept[index]

    def prepare(self, trials: Sequence[Trial]) -> Prompt:
        """Return the prompt of some trials, with their objects, scores and norms bound."""
        prompt = self._model.prepare([trial.image for trial in trials], [trial.question.text for trial in trials])
        prompt = prompt.with_objects([trial.mask for trial in trials])
        given = zip(prompt.layouts, trials, strict=True)
        layouts = tuple(layout if trial.scores is None else layout.with_scores(trial.scores) for layout, trial in given)
        prompt = replace(prompt, layouts=layouts)
        return bind_norms(self._model, prompt) if self._norms else prompt


def _flushed(records: Iterator[Record]) -> Iterator[list[Record]]:
    """Group records that come within some seconds, so that little is lost when the process dies and parts stay few."""
    waiting, started = [], time.monotonic()
    try:
        for record in records:
            waiting.append(record)
            if time.monotonic() - started > FLUSH_SECONDS:
                yield waiting
                waiting, started = [], time.monotonic()
    except BaseException:  # what was measured before an error or an interrupt is kept
        if waiting:
            yield waiting
        raise
    if waiting:
        yield waiting


@contextmanager
def _bar(name: str, total: int, *, shown: bool) -> Iterator[Advance]:
    columns = (*Progress.get_default_columns()[:-1], TimeRemainingColumn(), TextColumn("{task.completed}/{task.total} cells × trials"))
    with Progress(*columns, disable=not shown) as progress:
        yield partial(progress.advance, progress.add_task(name, total=total))


def _join(parts: Iterable[str]) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]
