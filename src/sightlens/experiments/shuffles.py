"""Does the order of visual tokens matter? Shuffle those of the object, of each view, or all."""

from __future__ import annotations

from collections.abc import Sequence

from sightlens.experiments.study import Axes, Cell, Study
from sightlens.experiments.trial import Trial
from sightlens.interventions import Shuffle
from sightlens.interventions.moves import Scope

CONDITIONS: dict[str, tuple[str, Scope]] = {
    "object": ("object", "view"),
    "translated": ("translate(object, {seed})", "view"),
    "view": ("image", "view"),
    "image": ("image", "image"),
}


def shuffle_tokens(trials: Sequence[Trial], *, seeds: Sequence[int] = (0, 1, 2)) -> Study:
    """Permute visual tokens at the merged embedding.

    Conditions: ``none``; ``object`` (the object's tokens, within each view); ``translated`` (as many in the object's shape
    elsewhere, likewise); ``view`` (all visual tokens, within each view); ``image`` (all visual tokens of an image, across its
    views). On images of one view the last two are the same permutation. Schaumlöffel et al. 2026 (arXiv 2605.19792),
    object-only and full shuffle.

    Args:
        trials: with masks.
        seeds: of the permutations; one cell each.
    """
    cells = [Cell({"condition": "none", "seed": 0})]
    for condition, (where, scope) in CONDITIONS.items():
        cells += [Cell({"condition": condition, "seed": seed}, (Shuffle(where.format(seed=seed), scope, seed),)) for seed in seeds]
    return Study("shuffle_tokens", tuple(cells), tuple(trials), axes=Axes(x="condition", repeats="seed"))
