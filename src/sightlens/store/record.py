"""One measured cell of a study."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from sightlens.errors import StoreError
from sightlens.store.provenance import Provenance

Coordinate = str | int | float
Json = None | bool | int | float | str | list[Any] | dict[str, Any]

RESERVED = ("metric", "example", "value", "provenance", "mean", "low", "high", "n", "missing")


def cell_key(coordinates: Mapping[str, Coordinate]) -> str:
    """Return the one spelling of a cell: JSON with sorted names, 1.0 written as 1.

    Raises:
        StoreError: for a coordinate that cannot be written down or a reserved name.

    >>> cell_key({"layer": 3, "at": "object"})
    '{"at":"object","layer":3}'
    """
    plain = {name: _plain(name, value) for name, value in coordinates.items()}
    equal = {name: int(value) if isinstance(value, float) and value.is_integer() else value for name, value in plain.items()}
    return json.dumps(equal, sort_keys=True, separators=(",", ":"), ensure_ascii=False)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Record:
    """What was measured at one place of a study's axes.

    The mappings are copied when the record is made and must not be changed after.

    Attributes:
        study: name of the study.
        coordinates: place on each axis by name; text, whole numbers or finite floats.
        examples: ids of the stimuli, in the order of the values.
        values: for each metric one number per example, kept as floats; NaN is a missing value.
        provenance: where the numbers came from.
        extras: anything else about the cell worth keeping that JSON can hold, such as what was done to the model.
        notes: anything else about each example, such as the generated text; one mapping per example, or none at all.

    Raises:
        StoreError: for a coordinate that cannot be written down, a reserved name, or values that do not fit the examples.
    """

    study: str
    coordinates: Mapping[str, Coordinate]
    examples: tuple[str, ...]
    values: Mapping[str, Sequence[float | int]]
    provenance: Provenance
    extras: Mapping[str, Json] = dataclasses.field(default_factory=dict)
    notes: tuple[Mapping[str, Json], ...] = ()

    def __post_init__(self) -> None:
        coordinates = {name: _plain(name, value) for name, value in self.coordinates.items()}
        values = {metric: tuple(map(float, numbers)) for metric, numbers in self.values.items()}
        object.__setattr__(self, "coordinates", coordinates)
        object.__setattr__(self, "values", values)
        object.__setattr__(self, "examples", tuple(self.examples))
        object.__setattr__(self, "extras", _as_json(self.extras))
        object.__setattr__(self, "notes", tuple(map(_as_json, self.notes)))
        _check_sizes(values, self.examples, self.notes)

    @property
    def cell(self) -> str:
        """The cell's key, see `cell_key`."""
        return cell_key(self.coordinates)


def _plain(name: str, value: Coordinate) -> Coordinate:
    """Return a coordinate as a plain Python value, refusing what has no one spelling."""
    if name in RESERVED:
        raise StoreError(f"an axis name other than {', '.join(RESERVED)}", repr(name), "Those are columns of a result; rename it.")
    if isinstance(value, bool) or not isinstance(value, str | int | float) or (isinstance(value, float) and not math.isfinite(value)):
        got = f"{name}={value!r}"
        raise StoreError("text, whole numbers or finite floats as coordinates", got, "Name the place in the axis as text.")
    return value


def joined(records: Sequence[Record]) -> Record:
    """Return one record with the examples of several of the same cell, in the order given.

    It carries the first one's provenance, with a warning that names what else was used for later examples.
    """
    first = records[0]
    others = {record.provenance for record in records} - {first.provenance}
    warnings = sorted(f"some examples were measured under {dict(other.versions)} on {other.device}" for other in others)
    return dataclasses.replace(
        first,
        provenance=dataclasses.replace(first.provenance, warnings=(*first.provenance.warnings, *warnings)),
        examples=tuple(example for record in records for example in record.examples),
        values={metric: tuple(number for record in records for number in record.values[metric]) for metric in first.values},
        notes=tuple(note for record in records for note in record.notes),
    )


def _check_sizes(values: Mapping[str, tuple[float, ...]], examples: tuple[str, ...], notes: tuple[object, ...]) -> None:
    if len(set(examples)) != len(examples) or not examples:
        raise StoreError("one or more examples with different ids", f"{list(examples)[:8]}", "Give every stimulus its own id.")
    if notes and len(notes) != len(examples):
        raise StoreError(f"{len(examples)} notes, one per example", f"{len(notes)}", "Give an empty mapping for an example without one.")
    wrong = {metric: len(numbers) for metric, numbers in values.items() if len(numbers) != len(examples)}
    if wrong or not values:
        got = f"{wrong or 'no metric'}"
        raise StoreError(f"{len(examples)} values per metric", got, "Give NaN for an example without a value.")


def _as_json(extras: Mapping[str, Json]) -> dict[str, Json]:
    """Return a copy as JSON reads them back."""
    try:
        return json.loads(json.dumps(dict(extras), ensure_ascii=False))
    except TypeError as error:
        raise StoreError("extras that JSON can hold", str(error), "Turn tensors and objects into lists and text.") from error
