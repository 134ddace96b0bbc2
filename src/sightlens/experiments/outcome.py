"""What a study found: a result that can draw itself."""

from __future__ import annotations

from collections.abc import Collection, Set
from dataclasses import dataclass, replace

import pandas as pd

from sightlens.errors import StudyError, listing
from sightlens.render import Labels, Plot, plot_bars, plot_curves
from sightlens.store import Record, Result


@dataclass(frozen=True)
class Outcome(Result):
    """The records of a study, and along which axes they are best drawn.

    Attributes:
        x: axis of the horizontal axis of a plot.
        group: axis that tells curves or bars apart.
        repeats: axis of repetitions (seeds), averaged per example before drawing.
    """

    x: str = ""
    group: str | None = None
    repeats: str | None = None

    def plot(self, metric: str | None = None, *, title: str = "") -> Plot:
        """Draw the mean of a metric with its bootstrap interval over the study's axes.

        Args:
            metric: one of ``metrics``; the first when None.
            title: of the figure.

        Raises:
            StudyError: for an unknown metric.
        """
        chosen = self.metrics[0] if metric is None else metric
        if chosen not in self.metrics:
            raise StudyError(f"a metric of this study ({listing(list(self.metrics))})", repr(metric), "Check the spelling.")
        table = self.table(chosen)
        draw = plot_bars if table[self.x].nunique() <= 8 else plot_curves
        return draw(table, x=self.x, group=self.group, labels=Labels(title=title, x=self.x, y=chosen))

    def restrict(self, examples: Collection[str]) -> Outcome:
        """Return the outcome of some of the examples alone."""
        wanted = set(examples)
        return replace(self, records=tuple(_only(record, wanted) for record in self.records))

    def table(self, metric: str) -> pd.DataFrame:
        """Return mean, interval and count per cell of a metric, repetitions averaged."""
        merged = self.average(self.repeats) if self.repeats is not None else Result(self.records)
        summary = merged.summary()
        return summary.loc[(summary["metric"] == metric) & (summary["n"] > 0)]


def _only(record: Record, examples: Set[str]) -> Record:
    keep = [k for k, example in enumerate(record.examples) if example in examples]
    values = {name: tuple(numbers[k] for k in keep) for name, numbers in record.values.items()}
    notes = tuple(record.notes[k] for k in keep) if record.notes else ()
    return replace(record, examples=tuple(record.examples[k] for k in keep), values=values, notes=notes)
