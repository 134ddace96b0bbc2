"""In which layers is the object read? Knock attention out, one window of layers after the other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sightlens.errors import StudyError
from sightlens.experiments.study import Axes, Cell, Study
from sightlens.experiments.trial import Trial
from sightlens.interventions import Knockout


def layer_windows(layers: int, *, width: int, stride: int) -> tuple[tuple[int, ...], ...]:
    """Return windows of consecutive layers; the last is cut short when the layers run out.

    >>> layer_windows(6, width=4, stride=4)
    ((0, 1, 2, 3), (4, 5))

    Raises:
        StudyError: when width or stride is not within 1 and the number of layers.
    """
    if not 1 <= width <= layers or not 1 <= stride <= width:
        raise StudyError(f"1 <= stride <= width <= {layers}", f"width {width}, stride {stride}", "Choose a smaller window.")
    starts = range(0, layers, stride) if stride == width else range(0, layers - width + 1, stride)
    return tuple(tuple(range(start, min(start + width, layers))) for start in starts)


@dataclass(frozen=True)
class WindowCells:
    """Knockouts of every window of layers, for every set of keys; the model's depth decides how many."""

    queries: str
    keys: tuple[str, ...]
    width: int
    stride: int

    def expand(self, layers: int) -> tuple[Cell, ...]:
        """Return the cells for a model of so many layers: untouched, then per key set each window and all layers."""
        windows = layer_windows(layers, width=self.width, stride=self.stride)
        cells = [Cell({"keys": "none", "layers": "none"})]
        for selector in self.keys:
            for window in dict.fromkeys((*windows, tuple(range(layers)))):
                name = f"{window[0]}–{window[-1]}" if len(window) < layers else "all"
                cells.append(Cell({"keys": selector, "layers": name}, (Knockout(self.queries, selector, layers=window),)))
        return tuple(cells)


def knockout_windows(
    trials: Sequence[Trial],
    *,
    queries: str = "post_image",
    keys: str | Sequence[str] = "object",
    width: int = 4,
    stride: int | None = None,
) -> Study:
    """Cut ``queries`` off from ``keys`` in each window of layers, in prefill and in every decoding step.

    Schaumlöffel et al. 2026 (arXiv 2605.19792), attention knockout: disjoint windows of four layers, all heads, queries
    after the image, keys on the object.

    Args:
        trials: with masks, when a selector needs ``object``.
        queries: selector of the queries.
        keys: selector of the keys, to which the size-matched random control is added; or several, each a condition.
        width: layers per window.
        stride: between windows; ``width`` (disjoint windows) when None.
    """
    conditions = (keys, f"random({keys}, 0)") if isinstance(keys, str) else tuple(keys)
    cells = WindowCells(queries, conditions, width, width if stride is None else stride)
    return Study("knockout_windows", cells, tuple(trials), axes=Axes(x="layers", group="keys"))
