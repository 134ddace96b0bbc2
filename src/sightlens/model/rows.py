"""Rows: which example under which interventions each row of a batch is, and what the interventions touched there."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from sightlens.errors import InterventionError
from sightlens.interventions import Intervention


@dataclass(frozen=True)
class Row:
    """One example of a prompt under a list of interventions, applied in order."""

    example: int
    interventions: tuple[Intervention, ...] = ()


@dataclass(frozen=True)
class Edit:
    """One intervention, and the rows of a batch on which it acts."""

    intervention: Intervention
    rows: tuple[int, ...]


def edits(rows: Sequence[Row]) -> Iterator[Edit]:
    """Yield each different intervention once per place in the rows' lists, so that every row keeps its order."""
    for place in range(max((len(row.interventions) for row in rows), default=0)):
        shared: dict[Intervention, list[int]] = {}
        for index, row in enumerate(rows):
            if place < len(row.interventions):
                shared.setdefault(row.interventions[place], []).append(index)
        yield from (Edit(intervention, tuple(found)) for intervention, found in shared.items())


class Touched:
    """How many positions or edges each intervention changed in each example, over all passes of a run."""

    def __init__(self) -> None:
        """Start with nothing touched."""
        self._counts: Counter[tuple[Intervention, int]] = Counter()

    def add(self, intervention: Intervention, example: int, count: int) -> None:
        """Count what one pass changed."""
        self._counts[intervention, example] += count

    def check(self, rows: Sequence[Row]) -> None:
        """Refuse a run in which an intervention left an example as it was.

        Raises:
            InterventionError: naming the intervention and the examples.
        """
        for edit in edits(rows):
            spared = sorted({rows[k].example for k in edit.rows if not self._counts[edit.intervention, rows[k].example]})
            if spared:
                raise InterventionError(
                    "an intervention that touches at least one position of every example",
                    f"{edit.intervention}, which touched none of example {', '.join(map(str, spared))}",
                    "Check its selectors with prompt.layouts[k].select(…), its layers and its phases.",
                )
