"""Work in batches, and what happens when memory runs out."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

import torch

from sightlens.errors import EngineError

Item = TypeVar("Item")
Result = TypeVar("Result")


def in_batches(items: Sequence[Item], rows: int, run: Callable[[Sequence[Item]], Result]) -> Iterator[tuple[Sequence[Item], Result]]:
    """Run items in batches of at most ``rows``; out of memory halves them and goes on.

    Raises:
        EngineError: when one item alone is too much.
    """
    done = 0
    while done < len(items):
        batch = items[done : done + rows]
        try:
            result = run(batch)
        except RuntimeError as error:
            if not _out_of_memory(error):
                raise
            if len(batch) == 1:
                raise EngineError("memory for one row", f"{error}", "Lower memory=, free some, or shorten the prompt.") from error
            rows = len(batch) // 2
            continue
        yield batch, result
        done += len(batch)


@contextmanager
def refusing_to_run_out(what: str, *, do: str) -> Iterator[None]:
    """Say what there was too little memory for, and what to do.

    Raises:
        EngineError: when memory runs out inside.
    """
    try:
        yield
    except RuntimeError as error:
        if not _out_of_memory(error):
            raise
        raise EngineError(f"memory for {what}", f"{error}", do) from error


def _out_of_memory(error: RuntimeError) -> bool:
    return isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error)
