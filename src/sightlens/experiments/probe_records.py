"""What probes found as records of a store: one per model, site and axis, whose examples are the places of the grid."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from sightlens.probes import AxisScores, ProbeReport
from sightlens.store import Provenance, Record, Result

STUDY = "position_probes"


def records_of(reports: Mapping[str, ProbeReport], model: str, provenance: Provenance) -> list[Record]:
    """Return the records of one model's probes; ``correct``, ``control`` and ``tokens`` count tokens at each place."""
    return [
        Record(
            study=STUDY,
            coordinates={"model": model, "site": site, "axis": axis},
            examples=tuple(f"{row},{column}" for row, column in np.ndindex(*scores.tokens.shape)),
            values={name: tuple(map(float, getattr(scores, name).ravel())) for name in ("correct", "control", "tokens")},
            provenance=provenance,
            extras={"chance": scores.chance, "grid": list(scores.tokens.shape)},
        )
        for site, report in reports.items()
        for axis, scores in report.axes.items()
    ]


def reports_of(result: Result, model: str) -> dict[str, ProbeReport]:
    """Return the probes of one model, sites in the order in which they were kept; none when it was not probed."""
    found: dict[str, dict[str, AxisScores]] = {}
    for record in result.records:
        if record.coordinates["model"] == model:
            found.setdefault(str(record.coordinates["site"]), {})[str(record.coordinates["axis"])] = _scores(record)
    return {site: ProbeReport(site, axes) for site, axes in found.items()}


def _scores(record: Record) -> AxisScores:
    extras: Mapping[str, Any] = record.extras
    counts = (np.array(record.values[name]).astype(np.int64).reshape(extras["grid"]) for name in ("correct", "control", "tokens"))
    return AxisScores(*counts, chance=extras["chance"])
