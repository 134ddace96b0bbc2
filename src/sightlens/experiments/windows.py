"""In which layers is the object read? Knock attention out, one window of layers after the other."""

from __future__ import annotations

from collections.abc import Sequence

from sightlens.errors import StudyError
from sightlens.experiments.measures import GeneratedAnswer, Measure
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


def knockout_windows(
    trials: Sequence[Trial],
    *,
    layers: int,
    queries: str = "post_image",
    keys: Sequence[str] = ("object", "random(object, 0)"),
    width: int = 4,
    stride: int | None = None,
    measure: Measure | None = None,
) -> Study:
    """Cut ``queries`` off from each set of keys in each window of layers, in prefill and in every decoding step.

    Schaumlöffel et al. 2026 (arXiv 2605.19792), attention knockout: disjoint windows of four layers, all heads, queries
    after the image, keys on the object; the size-matched random control is the default second key set.

    Args:
        trials: with masks, when a selector needs ``object``.
        layers: of the language model (``model.cfg.n_layers``).
        queries: selector of the queries.
        keys: selectors of the keys, each a condition.
        width: layers per window.
        stride: between windows; ``width`` (disjoint windows) when None.
        measure: generated answers when None.
    """
    windows = layer_windows(layers, width=width, stride=width if stride is None else stride)
    cells = [Cell({"keys": "none", "layers": "none"})]
    for selector in keys:
        for window in dict.fromkeys((*windows, tuple(range(layers)))):
            name = f"{window[0]}–{window[-1]}" if len(window) < layers else "all"
            cells.append(Cell({"keys": selector, "layers": name}, (Knockout(queries, selector, layers=window),)))
    axes = Axes(x="layers", group="keys")
    return Study("knockout_windows", tuple(cells), tuple(trials), measure or GeneratedAnswer(), axes=axes)
