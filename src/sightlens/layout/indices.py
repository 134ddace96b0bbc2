"""What may stand in the brackets of a selector word: a number, a slice, ``*``, or a name."""

from __future__ import annotations

from dataclasses import dataclass

from sightlens.errors import SelectorError


@dataclass(frozen=True)
class Span:
    """A slice ``start:stop`` with Python's meaning; without both ends it is everything, written ``*``."""

    start: int | None = None
    stop: int | None = None

    def __str__(self) -> str:
        """Print as in a selector."""
        if self.start is None and self.stop is None:
            return "*"
        return f"{'' if self.start is None else self.start}:{'' if self.stop is None else self.stop}"


Index = int | Span | str
"""A number (negative counts from the end), a slice, or the name of a separator or special token."""


def pick(index: Index, count: int) -> tuple[int, ...]:
    """Return which of ``count`` things an index means; none when there is no such number.

    >>> pick(-1, 4), pick(Span(1, 3), 4), pick(7, 4)
    ((3,), (1, 2), ())
    """
    if isinstance(index, str):
        raise SelectorError("a number or a slice", f"the name {index!r}", "Only `separator` and `special` take names.")
    if isinstance(index, Span):
        return tuple(range(count)[index.start : index.stop])
    return (index % count,) if -count <= index < count else ()
