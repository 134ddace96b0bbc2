"""A study: cells × trials × a measure, as a value; running it yields one record per cell and can be resumed."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from rich.progress import Progress, TextColumn, TimeRemainingColumn

from sightlens.errors import SelectorError, StudyError, listing
from sightlens.experiments.measures import GeneratedAnswer, Measure, Measured
from sightlens.experiments.outcome import Outcome
from sightlens.experiments.trial import Trial
from sightlens.families import Prompt
from sightlens.families.compat import library_versions
from sightlens.interventions import Intervention
from sightlens.layout import Layout
from sightlens.model import HookedVLM
from sightlens.model.fingerprint import fingerprint
from sightlens.store import Coordinate, Manifest, Provenance, Record, cell_key, open_store

KEEP_BYTES = 2**31
Tick = Callable[[], None]


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

    def run(self, model: HookedVLM, *, store: str | Path | None = None, batch_size: int = 16, progress: bool = True) -> Outcome:
        """Measure every cell that the store does not hold yet.

        Args:
            model: with the donors that the interventions name.
            store: a folder; a killed run goes on there. In memory when None.
            batch_size: trials at once; it changes speed, not numbers.
            progress: whether to show a progress bar.

        Returns:
            All records, those measured earlier too.

        Raises:
            StoreError: when the folder belongs to another study, model or layout.
            SelectorError, InterventionError: when a cell cannot be run.
        """
        cells = self.cells if isinstance(self.cells, tuple) else self.cells.expand(model.cfg.n_layers)
        _check_cells(cells)
        batches = Batches(model, self, batch_size=batch_size)
        provenance = self._provenance(model, batches)
        with open_store(store, Manifest.of(self.name, self._definition(cells), provenance=provenance)) as records:
            todo = [cell for cell in cells if cell_key(cell.coordinates) not in records]
            with _bar(self.name, len(todo) * len(batches), shown=progress) as tick:
                for cell in todo:
                    records.append([self._measure(model, cell, batches, provenance=provenance, tick=tick)])
            x = self.axes.x or next(iter(cells[0].coordinates))
            return Outcome(records.read().records, x, self.axes.group, self.axes.repeats)

    def _measure(self, model: HookedVLM, cell: Cell, batches: Batches, *, provenance: Provenance, tick: Tick) -> Record:
        rows: dict[str, tuple[dict[str, float], dict[str, Any]]] = {}
        for batch in batches:
            rows.update(self._measure_batch(model, cell, batch, batches=batches))
            tick()
        return self._record(cell, [(trial.id, *rows[trial.id]) for trial in self.trials], provenance)

    def _measure_batch(
        self, model: HookedVLM, cell: Cell, batch: Batch, *, batches: Batches
    ) -> dict[str, tuple[dict[str, float], dict[str, Any]]]:
        """Measure a batch, leaving out trials on which an intervention selects nothing; they keep NaN and the reason."""
        reasons = [_unusable(cell, layout) for layout in batch.prompt.layouts]
        usable = tuple(trial for trial, reason in zip(batch.trials, reasons, strict=True) if reason is None)
        found: dict[str, tuple[dict[str, float], dict[str, Any]]] = {
            trial.id: (dict.fromkeys(self.measure.metrics, float("nan")), {"left_out": reason})
            for trial, reason in zip(batch.trials, reasons, strict=True)
            if reason is not None
        }
        if usable:
            prompt = batch.prompt if len(usable) == len(batch.trials) else batches.prepare(usable)
            measured: Measured = self.measure.measure(model, prompt, usable, cell.interventions)
            for k, trial in enumerate(usable):
                found[trial.id] = ({name: values[k] for name, values in measured.values.items()}, measured.extras[k])
        return found

    def _record(self, cell: Cell, rows: Sequence[tuple[str, Mapping[str, float], Mapping[str, Any]]], provenance: Provenance) -> Record:
        return Record(
            study=self.name,
            coordinates=cell.coordinates,
            examples=tuple(row[0] for row in rows),
            values={name: [row[1][name] for row in rows] for name in self.measure.metrics},
            provenance=provenance,
            extras={"interventions": [i.to_dict() for i in cell.interventions], "trials": [dict(row[2]) for row in rows]},
        )

    def _definition(self, cells: Sequence[Cell]) -> dict[str, Any]:
        plain = [{"at": dict(cell.coordinates), "do": [i.to_dict() for i in cell.interventions]} for cell in cells]
        return {"cells": plain, "trials": [trial.digest for trial in self.trials], "measure": self.measure.describe()}

    def _provenance(self, model: HookedVLM, batches: Batches) -> Provenance:
        return Provenance(
            model_id=model.name,
            content_hash=fingerprint(model.hf),
            dtype=str(model.hf.dtype).removeprefix("torch."),
            attention=model.attention,
            seed=self.seed,
            layout_hash=batches.layout_hash,
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
    """The trials of a study in batches, prepared once while they fit in memory and again for every cell otherwise."""

    def __init__(self, model: HookedVLM, study: Study, *, batch_size: int) -> None:
        """Group the trials, and prepare them once to learn their layouts.

        Raises:
            StudyError: when the batch size is not positive.
        """
        if batch_size < 1:
            raise StudyError("a batch size of at least 1", f"{batch_size}", "Give a positive number.")
        self._model, self._kept, self._room = model, {}, KEEP_BYTES
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
        """Return the prompt of some trials, their objects bound."""
        prompt = self._model.prepare([trial.image for trial in trials], [trial.question.text for trial in trials])
        return prompt.with_objects([trial.mask for trial in trials])


@contextmanager
def _bar(name: str, total: int, *, shown: bool) -> Iterator[Tick]:
    columns = (*Progress.get_default_columns()[:-1], TimeRemainingColumn(), TextColumn("{task.completed}/{task.total} batches"))
    with Progress(*columns, disable=not shown) as progress:
        yield partial(progress.advance, progress.add_task(name, total=total))


def _join(parts: Iterable[str]) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]
