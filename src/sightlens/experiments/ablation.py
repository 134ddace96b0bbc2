"""Which visual tokens does an answer need? Ablate the object's, and as many others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

import numpy as np
from jaxtyping import Int

from sightlens.experiments.measures import AnswerLikelihood
from sightlens.experiments.study import Axes, Cell, Study
from sightlens.experiments.trial import Trial
from sightlens.interventions import Ablate

EMPTY: Mapping[str, str] = MappingProxyType({})


def ablate_tokens(
    trials: Sequence[Trial],
    *,
    paddings: Sequence[int] = (-1, 0, 1, 2),
    seeds: Sequence[int] = (0, 1, 2),
    value: str = "mean",
    others: Mapping[str, str] = EMPTY,
) -> Study:
    """Replace object tokens, and matched controls, by the dataset mean.

    Conditions: ``none``; ``object``; ``random`` (as many visual tokens, uniformly, object or not); ``translated`` (the same
    shape elsewhere in the picture); and any others. Schaumlöffel et al. 2026 (arXiv 2605.19792), object-token ablation; the translated
    control answers the criticism that a patch of one value in the object's shape still marks a place.

    Args:
        trials: with masks.
        paddings: cells by which the object's token set is grown (or shrunk, when negative).
        seeds: of the controls; one cell each.
        value: what replaces the tokens, see :class:`~sightlens.interventions.Ablate`.
        others: further conditions by name, each a selector: ``register(2.0)``, or ``top(object)`` on the trials of `score_trials`.
    """
    cells = [Cell({"condition": "none", "padding": 0, "seed": 0})]
    for padding in paddings:
        where = grown("object", padding)
        cells.append(Cell({"condition": "object", "padding": padding, "seed": 0}, (Ablate(where, value),)))
        for seed in seeds:
            for condition, name in (("random", "random"), ("translated", "translate")):
                place = {"condition": condition, "padding": padding, "seed": seed}
                cells.append(Cell(place, (Ablate(f"{name}({where}, {seed})", value),)))
    cells += [Cell({"condition": name, "padding": 0, "seed": 0}, (Ablate(where, value),)) for name, where in others.items()]
    axes = Axes(x="padding", group="condition", repeats="seed")
    return Study("ablate_tokens", tuple(cells), tuple(trials), axes=axes)


def token_effects(trial: Trial, *, positions: Sequence[int] | Int[np.ndarray, " token"], value: str = "mean") -> Study:
    """Ablate one visual token at a time and read the right answer's log-probability.

    Args:
        trial: the one picture and question.
        positions: of the visual tokens, as ``prompt.layout.select("image").positions`` gives them.
        value: what replaces a token.
    """
    cells = [Cell({"token": -1})]
    cells += [Cell({"token": int(p)}, (Ablate(f"position[{int(p)}]", value),)) for p in positions]
    return Study("token_effects", tuple(cells), (trial,), AnswerLikelihood())


def grown(selector: str, padding: int) -> str:
    """Write a selector grown by ``padding`` cells, shrunk when negative."""
    if padding == 0:
        return selector
    return f"{selector}.{'dilate' if padding > 0 else 'erode'}({abs(padding)})"
