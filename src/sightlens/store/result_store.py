"""Where records go while a study runs, and from where it goes on."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType

from sightlens.errors import StoreError
from sightlens.store import parts
from sightlens.store.lock import WriterLock, unusable
from sightlens.store.manifest import Manifest
from sightlens.store.record import Record, joined
from sightlens.store.result import Result

MANIFEST = "manifest.json"


class ResultStore(ABC):
    """Keeps records; each example of a cell once. A cell may come in several records, a batch of examples each.

    Use it as a context manager, so that its folder is free again afterwards.
    """

    def __init__(self, manifest: Manifest) -> None:
        """Remember what the records belong to."""
        self.manifest = manifest

    def append(self, records: Iterable[Record]) -> None:
        """Keep records for good; when this returns they outlive the process.

        Raises:
            StoreError: when an example of a cell is there already, or a record belongs to another study or model.
        """
        batch, done = list(records), {cell: set(examples) for cell, examples in self.done().items()}
        for record in batch:
            self._check(record)
            known = done.setdefault(record.cell, set())
            if twice := known.intersection(record.examples):
                raise StoreError("examples that were not measured before", f"{record.cell}: {sorted(twice)[:4]}", "Skip what done() lists.")
            known.update(record.examples)
        if batch:
            self._keep(batch)

    def _check(self, record: Record) -> None:
        if record.study != self.manifest.study:
            do = "Open a store with the manifest of that study."
            raise StoreError(f"records of the study {self.manifest.study!r}", repr(record.study), do)
        if record.provenance.identity != self.manifest.identity:
            got = f"{record.provenance.identity}"
            raise StoreError(f"records of {dict(self.manifest.identity)}", got, "Open a store with that model's manifest.")

    @abstractmethod
    def done(self) -> Mapping[str, Collection[str]]:
        """Return the kept examples of each cell, by its key."""

    @abstractmethod
    def read(self) -> Result:
        """Return all records, one per cell.

        Raises:
            StoreError: when a part is damaged.
        """

    @abstractmethod
    def close(self) -> None:
        """Let another writer in; closing twice is allowed."""

    @abstractmethod
    def _keep(self, batch: list[Record]) -> None:
        """Keep a batch of new records, all or none."""

    def __enter__(self) -> ResultStore:
        """Return the store."""
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Close the store."""
        self.close()


class MemoryStore(ResultStore):
    """Keeps records for as long as the process lives."""

    def __init__(self, manifest: Manifest) -> None:
        """Start empty."""
        super().__init__(manifest)
        self._records: list[Record] = []

    def done(self) -> Mapping[str, Collection[str]]:
        """Return the kept examples of each cell, by its key."""
        return {record.cell: record.examples for record in self.read().records}

    def read(self) -> Result:
        """Return all records, one per cell."""
        return _by_cell(self._records)

    def close(self) -> None:
        """Do nothing: there is no other writer."""

    def _keep(self, batch: list[Record]) -> None:
        self._records += batch


class FolderStore(ResultStore):
    """Keeps records in a folder of Parquet parts, one per `append`, beside a manifest.

    A process killed at any moment loses the batch it was writing and nothing else.
    """

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        """Open or create a store and become its one writer.

        Raises:
            StoreError: when the folder belongs to another study or model, is held by another writer, is damaged, or cannot
                be written to.
        """
        super().__init__(manifest)
        self.folder, self._next = Path(folder), 0
        _make_folder(self.folder)
        self._lock = WriterLock(self.folder)
        try:
            self._open()
            paths = parts.part_paths(self.folder)
            self._cells = _cells(paths)
            self._next = 1 + max(map(parts.part_number, paths), default=-1)
        except OSError as error:
            self._lock.release()
            raise unusable(self.folder, error) from error
        except BaseException:
            self._lock.release()
            raise

    def _open(self) -> None:
        path = self.folder / MANIFEST
        for leftover in self.folder.glob(f"*{parts.TEMPORARY}"):
            leftover.unlink()
        if path.exists():
            self.manifest.check(Manifest.read(path), folder=self.folder)
        elif parts.part_paths(self.folder):
            do = "Restore the manifest from a copy, or use a new folder."
            raise StoreError(f"a {MANIFEST} beside the parts", f"none in {self.folder}", do)
        else:
            parts.write_whole(path, self.manifest.to_json().encode())

    def done(self) -> Mapping[str, Collection[str]]:
        """Return the kept examples of each cell, by its key."""
        return self._cells

    def read(self) -> Result:
        """Return all records, one per cell.

        Raises:
            StoreError: when a part is damaged.
        """
        return read_store(self.folder)

    def close(self) -> None:
        """Let another writer in; closing twice is allowed."""
        self._lock.release()

    def _keep(self, batch: list[Record]) -> None:
        try:
            path = parts.write_part(self.folder, batch, number=self._next)
        except OSError as error:
            raise unusable(self.folder, error) from error
        self._next += 1
        for record in batch:
            self._cells.setdefault(record.cell, {}).update(dict.fromkeys(record.examples, path))


def open_store(folder: str | Path | None, manifest: Manifest) -> ResultStore:
    """Open a store in a folder, or in memory when there is none.

    Raises:
        StoreError: when the folder belongs to another study or model, is held by another writer, or is damaged.
    """
    return MemoryStore(manifest) if folder is None else FolderStore(Path(folder), manifest)


def read_store(folder: str | Path) -> Result:
    """Read the records of a folder without becoming its writer; a study may still be running there.

    Raises:
        StoreError: when there is no store or a part is damaged.
    """
    folder = Path(folder)
    if "\0" in str(folder) or not os.path.exists(folder / MANIFEST):
        raise StoreError(f"a result store with a {MANIFEST}", f"none in {str(folder)!r}", "Check the folder's name.")
    Manifest.read(folder / MANIFEST)
    paths = parts.part_paths(folder)
    _cells(paths)
    return _by_cell([record for path in paths for record in parts.read_part(path)])


def _by_cell(records: Sequence[Record]) -> Result:
    """Return one record per cell, in the order first measured."""
    cells: dict[str, list[Record]] = {}
    for record in records:
        cells.setdefault(record.cell, []).append(record)
    return Result(tuple(map(joined, cells.values())))


def _make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except (OSError, ValueError) as error:  # a ValueError is for NUL in the path
        raise unusable(folder, error) from error


def _cells(paths: Sequence[Path]) -> dict[str, dict[str, Path]]:
    """Return in which part each example of each cell is.

    Raises:
        StoreError: when a part is damaged or an example of a cell is in two parts.
    """
    cells: dict[str, dict[str, Path]] = {}
    for path in paths:
        for cell, examples in parts.read_cells(path):
            known = cells.setdefault(cell, {})
            for example in examples:
                if example in known:
                    got = f"{example} of {cell} in {known[example].name} and {path.name}"
                    raise StoreError("each example of a cell once", got, "Parts of two stores were mixed; delete one of the two files.")
                known[example] = path
    return cells
