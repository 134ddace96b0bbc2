"""A labelled table of records."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Mapping

import numpy as np
import pandas as pd
import xarray as xr

from sightlens.errors import StoreError, listing
from sightlens.metrics.bootstrap import bootstrap_mean
from sightlens.store.provenance import Provenance
from sightlens.store.record import Coordinate, Record, cell_key


@dataclasses.dataclass(frozen=True)
class Result:
    """What a study measured, as a table, as arrays, or as means with confidence intervals.

    Attributes:
        records: the measured cells, in the order they were measured.
    """

    records: tuple[Record, ...]

    @property
    def axes(self) -> dict[str, tuple[Coordinate, ...]]:
        """The places of each axis, in the order first measured."""
        places: dict[str, dict[Coordinate, None]] = {}
        for record in self.records:
            for name, value in record.coordinates.items():
                places.setdefault(name, {})[value] = None
        return {name: tuple(values) for name, values in places.items()}

    @property
    def metrics(self) -> tuple[str, ...]:
        """The names of the metrics."""
        return tuple(dict.fromkeys(metric for record in self.records for metric in record.values))

    @property
    def examples(self) -> tuple[str, ...]:
        """The ids of the examples."""
        return tuple(dict.fromkeys(example for record in self.records for example in record.examples))

    @property
    def provenance(self) -> tuple[Provenance, ...]:
        """The different provenances of the records; more than one when a study went on after an upgrade."""
        return tuple(dict.fromkeys(record.provenance for record in self.records))

    def where(self, coordinates: Mapping[str, Coordinate | Collection[Coordinate]]) -> Result:
        """Return the records at the given places.

        Args:
            coordinates: per axis one place or a collection of places.

        Raises:
            StoreError: for an unknown axis, or when no record lies there.
        """
        axes = self.axes
        wanted = {name: _places(places) for name, places in coordinates.items()}
        for name, places in wanted.items():
            if name not in axes:
                raise StoreError(f"an axis of this result ({listing(list(axes))})", repr(name), "Check the spelling.")
            if not set(places) & set(axes[name]):
                known = listing(list(map(repr, axes[name])))
                raise StoreError(f"places on the axis {name!r} ({known})", repr(places), "Choose one of those.")
        kept = tuple(record for record in self.records if _lies_in(record, wanted))
        if not kept:
            raise StoreError("coordinates at which something was measured", repr(dict(coordinates)), "Leave out an axis.")
        return Result(kept)

    def average(self, axis: str) -> Result:
        """Return the result without one axis: each example's values averaged over its places (seeds, say); NaN are left out.

        Raises:
            StoreError: for an unknown axis.
        """
        if axis not in self.axes:
            raise StoreError(f"an axis of this result ({listing(list(self.axes))})", repr(axis), "Check the spelling.")
        groups: dict[str, list[Record]] = {}
        for record in self.records:
            rest = {name: place for name, place in record.coordinates.items() if name != axis}
            groups.setdefault(cell_key(rest), []).append(dataclasses.replace(record, coordinates=rest))
        return Result(tuple(_averaged(records) for records in groups.values()))

    def to_pandas(self) -> pd.DataFrame:
        """Return one row per cell, metric and example.

        Columns: the axes, then `metric`, `example`, `value`, `provenance` (the digest).
        """
        blocks = [_block(record, metric) for record in self.records for metric in record.values]
        columns = [*self.axes, "metric", "example", "value", "provenance"]
        empty = pd.DataFrame(columns=columns)
        return pd.concat(blocks, ignore_index=True).reindex(columns=columns) if blocks else empty

    def to_xarray(self) -> xr.Dataset:
        """Return one array per metric over the axes and the examples; NaN where nothing was measured.

        Raises:
            StoreError: when records lie on different sets of axes.
        """
        axes = self.axes
        odd = [record for record in self.records if set(record.coordinates) != set(axes)]
        if odd:
            got = f"{odd[0].cell} without {sorted(set(axes) - set(odd[0].coordinates))}"
            raise StoreError(f"a place on each axis ({listing(list(axes))})", got, "Choose cells of one kind with where().")
        shape = (*(len(places) for places in axes.values()), len(self.examples))
        arrays = {metric: np.full(shape, np.nan) for metric in self.metrics}
        rows = {name: {place: row for row, place in enumerate(places)} for name, places in axes.items()}
        columns = {example: column for column, example in enumerate(self.examples)}
        for record in self.records:
            place = tuple(rows[name][record.coordinates[name]] for name in axes)
            for metric, numbers in record.values.items():
                arrays[metric][place][[columns[example] for example in record.examples]] = numbers
        dims = (*axes, "example")
        coordinates = {**{name: list(places) for name, places in axes.items()}, "example": list(self.examples)}
        return xr.Dataset({metric: (dims, array) for metric, array in arrays.items()}, coordinates)

    def summary(self, *, level: float = 0.95, seed: int = 0) -> pd.DataFrame:
        """Return one row per cell and metric: `mean`, `low`, `high`, `n`, `missing`.

        `low` and `high` bound the bootstrap interval of the mean over examples (`metrics.bootstrap_mean`); cells over
        the same examples are resampled together. An example that a cell lacks counts as missing.
        """
        cells = pd.DataFrame([dict(record.coordinates) for record in self.records], columns=list(self.axes), dtype=object)
        tables = []
        for metric in self.metrics:
            found = bootstrap_mean(self._matrix(metric), level=level, seed=seed)
            numbers = {name: getattr(found, name) for name in ("mean", "low", "high", "n", "missing")}
            tables.append(cells.assign(metric=metric, **numbers))
        empty = pd.DataFrame(columns=[*self.axes, "metric", "mean", "low", "high", "n", "missing"])
        return pd.concat(tables, ignore_index=True).infer_objects() if tables else empty

    def _matrix(self, metric: str) -> np.ndarray:
        """Return a metric over [example, cell] with NaN where it is missing."""
        columns = {example: row for row, example in enumerate(self.examples)}
        matrix = np.full((len(columns), len(self.records)), np.nan)
        for cell, record in enumerate(self.records):
            if metric in record.values:
                matrix[[columns[example] for example in record.examples], cell] = record.values[metric]
        return np.where(np.isinf(matrix), np.nan, matrix)

    def __repr__(self) -> str:
        """Say in one line what was measured."""
        study = ", ".join(dict.fromkeys(record.study for record in self.records)) or "nothing"
        axes = " × ".join(f"{name}[{len(places)}]" for name, places in self.axes.items()) or "one cell"
        return f"<Result {study}: {len(self.records)} cells ({axes}), metrics {listing(list(self.metrics))}, {len(self.examples)} examples>"

    def _repr_html_(self) -> str:
        """Show the summary's first rows in a notebook."""
        head = repr(self).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
        return f"<p>{head}</p>{self.summary().to_html(escape=True, index=False, max_rows=20, float_format='{:.4g}'.format)}"


def _averaged(records: list[Record]) -> Record:
    """Return one record with the mean of each example's values, the extras and notes left out."""
    examples = tuple(dict.fromkeys(example for record in records for example in record.examples))
    values = {}
    for metric in records[0].values:
        rows = [dict(zip(record.examples, record.values[metric], strict=True)) for record in records]
        given = [[row[example] for row in rows if not math.isnan(row.get(example, math.nan))] for example in examples]
        values[metric] = tuple(sum(numbers) / len(numbers) if numbers else math.nan for numbers in given)
    return dataclasses.replace(records[0], examples=examples, values=values, extras={}, notes=())


def _places(places: Coordinate | Collection[Coordinate]) -> tuple[Coordinate, ...]:
    return (places,) if isinstance(places, str | int | float) else tuple(places)


def _lies_in(record: Record, wanted: Mapping[str, tuple[Coordinate, ...]]) -> bool:
    return all(name in record.coordinates and record.coordinates[name] in places for name, places in wanted.items())


def _block(record: Record, metric: str) -> pd.DataFrame:
    columns = {name: [value] * len(record.examples) for name, value in record.coordinates.items()}
    rest = {"metric": metric, "example": record.examples, "value": record.values[metric]}
    return pd.DataFrame({**columns, **rest, "provenance": record.provenance.digest})
