"""Find the positions that a selector describes in one structure."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from sightlens.errors import SelectorError
from sightlens.layout.controls import draw_positions
from sightlens.layout.selector import Both, Either, Not, Random, Register, Reshape, Selector, Top, Translate, Word
from sightlens.layout.structure import Structure
from sightlens.layout.tokenset import TokenSet
from sightlens.layout.words import WORDS, Bound, find_word


def evaluate(selector: Selector, structure: Structure, *, bound: Bound) -> TokenSet:
    """Return the token set that a selector describes, named by the selector.

    Raises:
        SelectorError: an index is outside the layout, an object, an image or the norms are missing, a set that must be
            visual is not, or a control does not fit.
    """
    return replace(_found(selector, structure, bound), name=str(selector))


def _found(selector: Selector, structure: Structure, bound: Bound) -> TokenSet:
    match selector:
        case Word(name, indices):
            rule = WORDS[name]
            mask = find_word(name, indices, structure=structure, bound=bound)
            return TokenSet(structure, mask, rule.generated, rule.regular)
        case Not(of):
            return ~evaluate(of, structure, bound=bound)
        case Either(left, right):
            return evaluate(left, structure, bound=bound) | evaluate(right, structure, bound=bound)
        case Both(left, right):
            return evaluate(left, structure, bound=bound) & evaluate(right, structure, bound=bound)
        case Reshape(of, how, p):
            inner = evaluate(of, structure, bound=bound)
            return {"dilate": inner.dilate, "erode": inner.erode, "ring": inner.ring}[how](p)
        case _:
            return _control(selector, structure, bound)


def _control(selector: Selector, structure: Structure, bound: Bound) -> TokenSet:
    match selector:
        case Random(size, seed, pool):
            source = evaluate(pool or Word("image"), structure, bound=bound)
            count = _count(size, source.count, structure, bound)
            return TokenSet(structure, draw_positions(source.mask, count, seed=seed))
        case Translate(of, seed, pool):
            inside = evaluate(pool, structure, bound=bound) if pool else None
            return evaluate(of, structure, bound=bound).translate(seed, pool=inside)
        case Register(deviations):
            return _register(deviations, structure, bound)
        case Top(size):
            return _top(size, structure, bound)
        case _:
            raise AssertionError(f"no rule for {selector!r}")


def _register(deviations: float, structure: Structure, bound: Bound) -> TokenSet:
    table = structure.visual_tokens()
    if bound.norms is None or len(table) < 2:
        given = "none" if bound.norms is None else "one token"
        do = "Bind them: `layout.with_norms(norms)`, or `bind_norms(model, prompt)`."
        raise SelectorError(f"one norm for each of {len(table)} visual tokens (at least two)", given, do)
    mask = np.zeros(structure.length, dtype=bool)
    for image in np.unique(table["image"]):
        norms, places = (array[table["image"] == image] for array in (bound.norms, table["position"]))
        mask[places[norms > norms.mean() + deviations * norms.std(ddof=1)]] = True
    return TokenSet(structure, mask)


def _top(size: int | float | Selector, structure: Structure, bound: Bound) -> TokenSet:
    places = structure.visual_tokens()["position"]
    if bound.scores is None:
        raise SelectorError(f"one score for each of {len(places)} visual tokens", "none", "Bind them: `layout.with_scores(scores)`.")
    count = _count(size, len(places), structure, bound)
    if count > len(places):
        raise SelectorError(f"at most {len(places)} visual tokens", str(count), "Take fewer.")
    mask = np.zeros(structure.length, dtype=bool)
    mask[places[np.argsort(-bound.scores, kind="stable")[:count]]] = True
    return TokenSet(structure, mask)


def _count(size: int | float | Selector, whole: int, structure: Structure, bound: Bound) -> int:
    """Return how many tokens a size means: a number, a share of the whole, or as many as a selector has."""
    if isinstance(size, Selector):
        return evaluate(size, structure, bound=bound).count
    return size if isinstance(size, int) else round(size * whole)
