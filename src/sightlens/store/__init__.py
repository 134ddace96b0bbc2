"""Measured cells, where they came from, and a folder of them that survives being killed."""

from __future__ import annotations

from sightlens.store.manifest import Manifest
from sightlens.store.provenance import Provenance
from sightlens.store.record import Coordinate, Json, Record, cell_key
from sightlens.store.result import Result
from sightlens.store.result_store import FolderStore, MemoryStore, ResultStore, open_store, read_store

__all__ = [
    "Coordinate",
    "FolderStore",
    "Json",
    "Manifest",
    "MemoryStore",
    "Provenance",
    "Record",
    "Result",
    "ResultStore",
    "cell_key",
    "open_store",
    "read_store",
]
