"""Records for the store's tests."""

from __future__ import annotations

import dataclasses

from sightlens.store import Manifest, Provenance, Record

PROVENANCE = Provenance(
    model_id="sightlens/tiny-llava",
    content_hash="abc123",
    dtype="float32",
    attention="sdpa",
    seed=0,
    layout_hash="0f0f",
    device="cpu",
    sightlens="0.1.0",
    versions=(("torch", "2.13.0"), ("transformers", "5.24.0")),
    warnings=("a <warning>",),
)
MANIFEST = Manifest.of("knockout", {"layer": [0, 1, 2], "at": ["object", "random"]}, provenance=PROVENANCE)


def record(layer: int, at: str = "object", **changes: object) -> Record:
    """Make the record of one cell; its values follow from the coordinates."""
    made = Record(
        study="knockout",
        coordinates={"layer": layer, "at": at},
        examples=("a", "b", "c"),
        values={"iou": (layer + 0.25, float("nan"), 1 / 3), "hit": (1.0, 0.0, float(at == "object"))},
        provenance=PROVENANCE,
        extras={"texts": ["[0.1, 0.2]", "<b>é</b>", ""]},
    )
    return dataclasses.replace(made, **changes)
