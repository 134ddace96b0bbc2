"""Parquet parts: written whole or not at all, and checked when read."""

from __future__ import annotations

import json
import os
import uuid
from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from sightlens.errors import StoreError
from sightlens.store.provenance import Provenance
from sightlens.store.record import Record

SCHEMA = pa.schema(
    [
        ("cell", pa.string()),
        ("study", pa.string()),
        ("coordinates", pa.string()),
        ("examples", pa.list_(pa.string())),
        ("values", pa.map_(pa.string(), pa.list_(pa.float64()))),
        ("extras", pa.string()),
        ("notes", pa.list_(pa.string())),
        ("provenance", pa.string()),
    ]
)
TEMPORARY = ".partial"


def write_whole(path: Path, data: bytes) -> None:
    """Write a file so that it is there complete or not there, whatever kills the process or the machine."""
    temporary = path.with_name(path.name + TEMPORARY)
    with temporary.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
    _sync_folder(path.parent)


def _sync_folder(folder: Path) -> None:
    """Make a rename last through a power cut, where the system can open folders (not on Windows)."""
    if os.name == "nt":
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_part(folder: Path, records: Sequence[Record], *, number: int) -> Path:
    """Write records as one new part and return its path."""
    path = folder / f"part-{number:06d}-{uuid.uuid4().hex[:8]}.parquet"
    sink = pa.BufferOutputStream()
    pq.write_table(pa.Table.from_pylist([_row(record) for record in records], SCHEMA), sink, write_page_checksum=True)
    write_whole(path, sink.getvalue().to_pybytes())
    return path


def part_paths(folder: Path) -> list[Path]:
    """Return the finished parts in the order they were written."""
    return sorted(folder.glob("part-[0-9]*-*.parquet"))


def part_number(path: Path) -> int:
    """Return a part's place in that order."""
    return int(path.name.split("-")[1])


def read_cells(path: Path) -> list[tuple[str, list[str]]]:
    """Return the key of the cell and the examples of each record in a part.

    Raises:
        StoreError: when the part is damaged.
    """
    table = _load(path, ["cell", "examples"])
    rows = list(zip(table.column("cell").to_pylist(), table.column("examples").to_pylist(), strict=True))
    if any(cell is None or examples is None or None in examples for cell, examples in rows):
        raise _damaged(path, "a record without its cell or an example")
    return rows


def read_part(path: Path) -> list[Record]:
    """Return the records of a part.

    Raises:
        StoreError: when the part is damaged.
    """
    try:
        return [_record(row) for row in _load(path, None).to_pylist()]
    except (TypeError, ValueError, KeyError, AttributeError) as error:
        raise _damaged(path, f"a record of wrong types: {error}") from error


def _load(path: Path, columns: list[str] | None) -> pa.Table:
    try:
        table = pq.ParquetFile(path, page_checksum_verification=True).read(columns)
    except (pa.ArrowException, OSError) as error:
        raise _damaged(path, str(error)) from error
    wanted = SCHEMA if columns is None else pa.schema([SCHEMA.field(name) for name in columns])
    if table.schema.names != wanted.names or table.schema.types != wanted.types:
        raise _damaged(path, f"columns {dict(zip(table.schema.names, map(str, table.schema.types), strict=True))}")
    return table


def _damaged(path: Path, why: str) -> StoreError:
    do = f"Delete {path.name}; its cells, and no others, are then measured again."
    return StoreError("a complete part of a result store", f"{path}: {why[:300]}", do)


def _row(record: Record) -> dict[str, object]:
    return {
        "cell": record.cell,
        "study": record.study,
        "coordinates": json.dumps(dict(record.coordinates), ensure_ascii=False),
        "examples": list(record.examples),
        "values": [(metric, list(numbers)) for metric, numbers in record.values.items()],
        "extras": json.dumps(dict(record.extras), ensure_ascii=False),
        "notes": [json.dumps(dict(note), ensure_ascii=False) for note in record.notes],
        "provenance": record.provenance.to_json(),
    }


def _record(row: dict) -> Record:
    record = Record(
        study=row["study"],
        coordinates=json.loads(row["coordinates"]),
        examples=tuple(row["examples"]),
        values={metric: tuple(numbers) for metric, numbers in row["values"]},
        extras=json.loads(row["extras"]),
        notes=tuple(map(json.loads, row["notes"])),
        provenance=Provenance.from_json(row["provenance"]),
    )
    if record.study is None or record.cell != row["cell"]:
        raise ValueError(f"cell {row['cell']} of study {record.study} at {record.cell}")
    return record
