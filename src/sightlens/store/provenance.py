"""Where a number came from."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from typing import Any

from sightlens.errors import StoreError

# What makes two measurements comparable. Versions and device may differ between sittings of one study: they are kept
# with each record and shown, not refused.
IDENTITY = ("model_id", "content_hash", "dtype", "attention", "seed", "layout_hash")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Provenance:
    """Everything that is needed to measure a record again.

    Attributes:
        model_id: name or folder the model was loaded from.
        content_hash: hash of the weights and configuration, the same wherever the model lies.
        dtype: number format of the weights, such as "float32".
        attention: the attention path, such as "sdpa" or "eager".
        seed: of every random choice in the study.
        layout_hash: hash of the token layouts of all stimuli.
        device: where it ran, such as "cpu" or "NVIDIA H200".
        sightlens: version of this library.
        versions: (library, version) of the libraries below.
        warnings: what was said while loading and measuring.
    """

    model_id: str
    content_hash: str
    dtype: str
    attention: str
    seed: int
    layout_hash: str
    device: str
    sightlens: str
    versions: tuple[tuple[str, str], ...] = ()
    warnings: tuple[str, ...] = ()

    @property
    def digest(self) -> str:
        """A short name for this provenance; equal provenances have equal names."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()[:12]

    @property
    def identity(self) -> dict[str, str | int]:
        """The fields that have to agree for two records to be compared."""
        return {name: getattr(self, name) for name in IDENTITY}

    def to_json(self) -> str:
        """Return JSON text with sorted keys."""
        return json.dumps(dataclasses.asdict(self), sort_keys=True, ensure_ascii=False)

    @classmethod
    def from_json(cls, text: str) -> Provenance:
        """Read what `to_json` wrote.

        Raises:
            StoreError: when a field is missing or unknown.
        """
        fields: dict[str, Any] = json.loads(text)
        known = {field.name for field in dataclasses.fields(cls)}
        if set(fields) != known:
            got = f"{sorted(set(fields) ^ known)} missing or unknown"
            raise StoreError("a provenance with the fields of this version", got, "Read it with the version that wrote it.")
        lists = {
            "versions": tuple((name, version) for name, version in fields["versions"]),
            "warnings": tuple(fields["warnings"]),
        }
        return cls(**{**fields, **lists})
