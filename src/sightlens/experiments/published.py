"""Numbers that the localization paper reports, to be printed beside one's own."""

from __future__ import annotations

import sys
from importlib import resources

import pandas as pd

from sightlens.errors import StudyError, listing

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # pyright: ignore[reportMissingImports]

SOURCES = {
    "review": "a published review of Schaumlöffel et al. 2026 (arXiv 2605.19792)",
    "notes": "third-party notes of Schaumlöffel et al. 2026 (arXiv 2605.19792)",
    "sibling": '"Grounding Isn\'t Knowing" (arXiv 2608.23074)',
}
EXACT = {"approximate": False}


def published_numbers(experiment: str | None = None) -> pd.DataFrame:
    """Return the published numbers of "Mechanisms of Object Localization in VLMs", one per row.

    Columns: ``experiment``, ``metric``, ``value``, ``approximate`` (read off a figure, or of uncertain order), ``source`` (in
    words; none is the paper itself) and one column per coordinate, empty where an experiment has no such coordinate.
    The file ``published.toml`` beside this module holds them, with their units.

    Args:
        experiment: only this one's, without coordinates that it lacks.

    Raises:
        StudyError: for an experiment without published numbers.
    """
    text = resources.files("sightlens.experiments").joinpath("published.toml").read_text(encoding="utf-8")
    rows = [
        {"experiment": group["experiment"], **number["at"], **EXACT, **_plain(number), "source": SOURCES[group["source"]]}
        for group in tomllib.loads(text)["number"]
        for number in group["values"]
    ]
    known = list(dict.fromkeys(row["experiment"] for row in rows))
    if experiment is not None and experiment not in known:
        raise StudyError(f"an experiment among {listing(known, limit=20)}", repr(experiment), "Check the spelling.")
    frame = pd.DataFrame([row for row in rows if experiment in (None, row["experiment"])])
    last = ["metric", "value", "approximate", "source"]
    return frame.loc[:, [name for name in frame.columns if name not in last] + last]


def _plain(number: dict[str, object]) -> dict[str, object]:
    return {name: value for name, value in number.items() if name != "at"}
