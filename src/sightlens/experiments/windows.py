"""In which layers is the object read? Knock attention out, one window of layers after the other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sightlens.errors import StudyError
from sightlens.experiments.study import Axes, Cell, Study
from sightlens.experiments.trial import Trial
from sightlens.interventions import Knockout
from sightlens.layout import Word, parse, walk
from sightlens.model import HookedVLM


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
        keys: selector of the keys, to which a size-matched random control is added, and for one about the object its shape
            elsewhere; or several, each a condition.
        width: layers per window.
        stride: between windows; ``width`` (disjoint windows) when None.
    """
    conditions = with_controls(keys) if isinstance(keys, str) else tuple(keys)
    cells = WindowCells(queries, conditions, width, width if stride is None else stride)
    return Study("knockout_windows", cells, tuple(trials), axes=Axes(x="layers", group="keys"))


def knockout_heads(
    model: HookedVLM, trials: Sequence[Trial], *, queries: str = "post_image", keys: str = "object", layers: Sequence[int] | None = None
) -> Study:
    """Cut ``queries`` off from ``keys`` in one head at a time, and from each control of the keys.

    Args:
        model: whose heads are cut.
        trials: with masks, when a selector needs ``object``.
        queries: selector of the queries.
        keys: selector of the keys; its controls are those of `knockout_windows`.
        layers: whose heads; all when None.

    Raises:
        StudyError: for a layer that the model does not have.
    """
    chosen = range(model.cfg.n_layers) if layers is None else layers
    if not set(chosen) <= set(range(model.cfg.n_layers)):
        raise StudyError(f"layers within 0 to {model.cfg.n_layers - 1}", f"{tuple(chosen)}", "Count from 0.")
    cells = [Cell({"keys": "none", "layer": -1, "head": -1})]
    for selector in with_controls(keys):
        for layer in chosen:
            for head in range(model.cfg.n_heads):
                do = (Knockout(queries, selector, layers=(layer,), heads=(head,)),)
                cells.append(Cell({"keys": selector, "layer": layer, "head": head}, do))
    return Study("knockout_heads", tuple(cells), tuple(trials), axes=Axes(x="layer", group="head"))


def with_controls(keys: str) -> tuple[str, ...]:
    """Return a selector and its controls: as many random tokens, and for one about the object its shape elsewhere."""
    about_object = any(isinstance(part, Word) and part.name == "object" for part in walk(parse(keys)))
    return (keys, f"random({keys}, 0)", *([f"translate({keys}, 0)"] if about_object else []))
