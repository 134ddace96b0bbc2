"""What a plan will do, in numbers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil


@dataclass(frozen=True)
class Explanation:
    """What a plan costs, and what the plain loop over its cells would.

    Attributes:
        cells: how many.
        examples: in the prompt.
        positions: of the prompt.
        passes: groups of rows that start at the same place.
        rows: all rows of all passes; ``rows_at_once`` the most that run together, whole ones included.
        clean_rows: rows that need no pass, because nothing of the prompt is touched.
        full_runs: rows that run whole, by reason.
        flops: floating-point operations of this plan, generation without early ends; ``loop_flops`` of one full forward pass
            per row, logits of every position included.
        kept_bytes: what the clean run leaves on the model's device; ``clean_bytes`` the most it needs while it is made.
        batch_bytes: the most that one batch of rows needs.
        result_bytes: what the results of ``logits()`` take, with gradients also what they hold for the backward pass;
            ``stream_logits()`` gives them out one by one.
        needed_bytes: the least memory with which the plan runs.
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
    clean_bytes: int
    batch_bytes: int
    result_bytes: int
    needed_bytes: int
    memory: int

    @property
    def ratio(self) -> float:
        """How many times fewer operations than the loop."""
        return self.loop_flops / self.flops

    @property
    def peak_bytes(self) -> int:
        """The most memory beside the model and the results: the clean run while it is made, or what it keeps and one batch."""
        return max(self.clean_bytes, self.kept_bytes + self.batch_bytes)

    @property
    def fits(self) -> bool:
        """Whether the budget holds the clean run and at least one row."""
        return self.needed_bytes <= self.memory

    def __str__(self) -> str:
        """A few lines for a person."""
        lines = [
            f"{_counted(self.cells, 'cell')} × {_counted(self.examples, 'example')} of {_counted(self.positions, 'position')}",
            f"  {_counted(self.rows, 'row')}, {_counted(self.passes, 'pass', 'passes')}, up to {self.rows_at_once} at once; "
            f"{_counted(self.clean_rows, 'row')} without a pass",
            *(f"  {_counted(count, 'row')} of the whole prompt: {reason}" for reason, count in self.full_runs.items()),
            f"  {self.flops:.3g} operations; a loop of full passes {self.loop_flops:.3g} ({self.ratio:.1f}×)",
            f"  memory beside the model: {in_bytes(self.kept_bytes)} kept + {in_bytes(self.batch_bytes)} rows, "
            f"at most {in_bytes(self.peak_bytes)} of {in_bytes(self.memory)}; results {in_bytes(self.result_bytes)}",
        ]
        if not self.fits:
            lines.append(f"  does not fit: memory={in_bytes(self.needed_bytes)} would hold the clean run and one row")
        return "\n".join(lines)


UNITS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}


def in_bytes(count: int) -> str:
    """Write a size so that reading it back gives at least as much.

    >>> in_bytes(0), in_bytes(12_345), in_bytes(4_000_000_000)
    ('0B', '12.4KB', '4.0GB')
    """
    unit = next(unit for unit in ("GB", "MB", "KB", "B") if count >= UNITS[unit] or unit == "B")
    return f"{count}B" if unit == "B" else f"{ceil(10 * count / UNITS[unit]) / 10:.1f}{unit}"


def _counted(count: int, one: str, many: str | None = None) -> str:
    return f"{count} {one if count == 1 else many or one + 's'}"
