"""What a store belongs to: the study and the model, written once and compared ever after."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path

from sightlens.errors import StoreError
from sightlens.store.provenance import Provenance
from sightlens.store.record import Json

FORMAT = 1


@dataclasses.dataclass(frozen=True)
class Manifest:
    """The definition of a study and the identity of what it is measured on.

    Attributes:
        study: the study's name.
        definition: axes, stimuli and metrics as JSON.
        identity: the provenance fields that must not change, see `Provenance.identity`.
        format: version of the store's files.
    """

    study: str
    definition: Mapping[str, Json]
    identity: Mapping[str, Json]
    format: int = FORMAT

    @classmethod
    def of(cls, study: str, definition: Mapping[str, Json], *, provenance: Provenance) -> Manifest:
        """Describe a study about to be measured.

        Raises:
            StoreError: when the definition is not JSON.
        """
        try:
            return cls(study, json.loads(json.dumps(dict(definition), sort_keys=True)), provenance.identity)
        except TypeError as error:
            raise StoreError("a definition that JSON can hold", str(error), "Describe objects by name.") from error

    def to_json(self) -> str:
        """Return JSON text with sorted keys."""
        return json.dumps(dataclasses.asdict(self), sort_keys=True, indent=1, ensure_ascii=False)

    @classmethod
    def read(cls, path: Path) -> Manifest:
        """Read a manifest file.

        Raises:
            StoreError: when it is damaged or of another format.
        """
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
            manifest = cls(found["study"], found["definition"], found["identity"], found["format"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise StoreError("a readable manifest", f"{path}: {error}", "Restore it from a copy, or use a new folder.") from error
        if manifest.format != FORMAT:
            do = "Read it with the version of sightlens that wrote it."
            raise StoreError(f"a store of format {FORMAT}", f"format {manifest.format} in {path}", do)
        return manifest

    def check(self, found: Manifest, *, folder: Path) -> None:
        """Refuse a store that another study or another model wrote.

        Raises:
            StoreError: naming what differs, both ways.
        """
        if found.study != self.study:
            raise _foreign(folder, f"the study {self.study!r}", got=f"the study {found.study!r}")
        if found.definition != self.definition:
            wanted, got = _differing(self.definition, found.definition)
            raise _foreign(folder, f"the study {self.study!r} with {wanted}", got=f"one with {got}")
        if found.identity != self.identity:
            wanted, got = _differing(self.identity, found.identity)
            raise _foreign(folder, wanted, got=got)


def _foreign(folder: Path, wanted: str, *, got: str) -> StoreError:
    do = "Give each study and each model a folder of its own."
    return StoreError(f"a store of {wanted}", f"{got} in {folder}", do)


def _differing(a: Mapping[str, Json], b: Mapping[str, Json]) -> tuple[str, str]:
    """Print the entries in which two mappings differ."""
    names = [name for name in sorted({*a, *b}) if a.get(name) != b.get(name) or (name in a) != (name in b)]

    def show(mapping: Mapping[str, Json]) -> str:
        entries = (f"{name}={json.dumps(mapping[name]) if name in mapping else 'nothing'}" for name in names)
        return ", ".join(entry if len(entry) <= 200 else f"{entry[:200]}…" for entry in entries)

    return show(a), show(b)
