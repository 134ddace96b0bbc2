"""What a plan will do, in numbers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Explanation:
    """What a plan costs, and what the plain loop over its cells would.

    Attributes:
        cells: how many.
        examples: in the prompt.
        positions: of the prompt.
        passes: groups of rows that start at the same place.
        rows: all rows of all passes; ``rows_at_once`` the most that one pass holds.
        clean_rows: rows that need no pass, because nothing of the prompt is touched.
        full_runs: rows that run whole, by reason.
        flops: floating-point operations of this plan; ``loop_flops`` of one full forward pass per row, logits of every
            position included.
        kept_bytes: what the clean run leaves behind.
        batch_bytes: the most that one batch of rows needs.
        memory: the budget, bytes.
    """

    cells: int
    examples: int
    positions: int
    passes: int
    rows: int
    rows_at_once: int
    clean_rows: int
    full_runs: Mapping[str, int]
    flops: int
    loop_flops: int
    kept_bytes: int
    batch_bytes: int
    memory: int

    @property
    def ratio(self) -> float:
        """How many times fewer operations than the loop."""
        return self.loop_flops / self.flops

    @property
    def peak_bytes(self) -> int:
        """The most memory beside the model: what is kept and one batch of rows."""
        return self.kept_bytes + self.batch_bytes

    def __str__(self) -> str:
        """A few lines for a person."""
        lines = [
            f"{self.cells} cells × {self.examples} examples of {self.positions} positions",
            f"  {self.rows} rows in {self.passes} passes, up to {self.rows_at_once} at once; {self.clean_rows} rows need none",
            *(f"  {count} rows run whole: {reason}" for reason, count in self.full_runs.items()),
            f"  {self.flops:.3g} operations; a loop of full passes {self.loop_flops:.3g} ({self.ratio:.1f}×)",
            f"  memory beside the model: {_size(self.kept_bytes)} kept + {_size(self.batch_bytes)} rows of {_size(self.memory)}",
        ]
        return "\n".join(lines)


UNITS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}


def _size(count: int) -> str:
    return f"{count / 1e6:.1f} MB" if count < 1e9 else f"{count / 1e9:.2f} GB"
