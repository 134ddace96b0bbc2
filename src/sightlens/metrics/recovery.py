"""How much of an effect an intervention recovers, between a base run and a source run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from jaxtyping import Bool, Float, Int

from sightlens.errors import MetricError

Aggregate = Literal["mean_of_ratios", "ratio_of_means"]


@dataclass(frozen=True)
class Mediation:
    """A mediation fraction with what it was averaged over.

    Attributes:
        fraction: per cell, such as ``[layer, head]``.
        used: pairs that went in.
        excluded: pairs left out because their gap was below ``min_gap`` or not finite.
        aggregate: how pairs were averaged.
        min_gap: the smallest ``base - source`` that counts.
    """

    fraction: Float[np.ndarray, "*cell"]
    used: int
    excluded: int
    aggregate: Aggregate
    min_gap: float


def usable_pairs(
    base: Float[np.ndarray, " pair"], source: Float[np.ndarray, " pair"], *, min_gap: float = 1e-6
) -> Bool[np.ndarray, " pair"]:
    """Mark the pairs whose scores differ enough, and with the expected sign, for a ratio to mean something.

    A pair with a score that is NaN or infinite is not usable.

    Raises:
        MetricError: when ``min_gap`` is not a positive number.
    """
    if not 0 < min_gap < np.inf:
        raise MetricError("a positive min_gap", f"{min_gap}", "A ratio over a gap of zero or of the wrong sign means nothing.")
    gap = base - source
    return np.isfinite(gap) & (gap >= min_gap)


def mediation_ratios(
    base: Float[np.ndarray, " pair"],
    source: Float[np.ndarray, " pair"],
    *,
    patched: Float[np.ndarray, "pair *cell"],
    min_gap: float = 1e-6,
) -> Float[np.ndarray, "pair *cell"]:
    """Return each pair's ``(base - patched) / (base - source)``, NaN where a pair is not usable.

    See `mediation` for the arguments.

    Raises:
        MetricError: when the numbers of pairs differ or ``min_gap`` is not positive.
    """
    _same_pairs(base, source, patched=patched)
    usable, extra = usable_pairs(base, source, min_gap=min_gap), (1,) * (patched.ndim - 1)
    gap = np.where(usable, base - source, np.nan).reshape(-1, *extra)
    return (base.reshape(-1, *extra) - patched) / gap


def mediation(
    base: Float[np.ndarray, " pair"],
    source: Float[np.ndarray, " pair"],
    *,
    patched: Float[np.ndarray, "pair *cell"],
    aggregate: Aggregate = "mean_of_ratios",
    min_gap: float = 1e-6,
) -> Mediation:
    """Return the share of the base-to-source change in perplexity that a patch brings about, averaged over pairs.

    ``MF = (base - patched) / (base - source)``: 0 for a patch without effect, 1 for one that restores the source run;
    not bounded (P5, arXiv:2605.19792, causal mediation). The paper leaves open how pairs with a small gap are treated
    and whether ratios or scores are averaged; both are arguments here.

    Args:
        base: score of the run on the image without the object; higher is worse, as for perplexity or NLL. The two rank
            cells differently; P5 uses perplexity.
        source: score of the run on the original image.
        patched: score of the base run with something patched in, for any number of cells (such as layers × heads).
        aggregate: "mean_of_ratios" weighs pairs equally, "ratio_of_means" weighs them by their gap.
        min_gap: pairs with ``base - source`` below this are left out of either aggregate, and counted; so are those with
            a base or source that is not finite.

    Raises:
        MetricError: when the numbers of pairs differ, no pair is usable, or ``min_gap`` is not positive.
    """
    _same_pairs(base, source, patched=patched)
    usable = usable_pairs(base, source, min_gap=min_gap)
    if not usable.any():
        got = f"gaps up to {np.max(base - source, initial=-np.inf):.3g} over {len(base)} pairs"
        do = "Use pairs on which removing the object makes the answer less likely, or lower min_gap."
        raise MetricError(f"a pair with base - source >= {min_gap}", got, do)
    base, patched, source = base[usable], patched[usable], source[usable]
    if aggregate == "mean_of_ratios":
        fraction = mediation_ratios(base, source, patched=patched, min_gap=min_gap).mean(axis=0)
    else:
        fraction = (base.mean() - patched.mean(axis=0)) / (base.mean() - source.mean())
    return Mediation(np.asarray(fraction), len(base), int((~usable).sum()), aggregate, min_gap)


def mediation_fraction(
    base: Float[np.ndarray, " pair"],
    source: Float[np.ndarray, " pair"],
    *,
    patched: Float[np.ndarray, "pair *cell"],
    aggregate: Aggregate = "mean_of_ratios",
    min_gap: float = 1e-6,
) -> Float[np.ndarray, "*cell"]:
    """Return the fraction of `mediation` alone, without how many pairs it left out.

    Raises:
        MetricError: as `mediation`.
    """
    return mediation(base, source, patched=patched, aggregate=aggregate, min_gap=min_gap).fraction


def causal_influence(
    patched: Float[np.ndarray, "*batch answer"],
    target: Float[np.ndarray, "*batch answer"],
    *,
    hypothesis: Int[np.ndarray, "*batch"] | int,
    competitor: Int[np.ndarray, "*batch"] | int,
) -> Float[np.ndarray, "*batch"]:
    """Return how far a patch moves probability from the unpatched answer to the one a hypothesis predicts.

    ``CI = ½[(P(h|patched) - P(h|target)) + (P(c|target) - P(c|patched))]`` in -1..1; 0 is no effect (P1,
    arXiv:2511.17699, causal influence). NaN where hypothesis and competitor are the same answer, on which the score is
    0 whatever the patch does.

    Args:
        patched: answer probabilities of the target run with the patch.
        target: answer probabilities of the target run.
        hypothesis: index of the answer the hypothesis predicts.
        competitor: index of the answer the unpatched target gives.

    Raises:
        MetricError: when the shapes differ, or there is no such answer.
    """
    if patched.shape != target.shape:
        got = f"{patched.shape} and {target.shape}"
        raise MetricError("patched and target probabilities of one shape", got, "Give both over the same answers.")
    shift = patched - target
    wanted, other = _pick(shift, np.asarray(hypothesis)), _pick(shift, np.asarray(competitor))
    return np.where(np.asarray(hypothesis) == np.asarray(competitor), np.nan, (wanted - other) / 2)


def probability_drop(
    before: Float[np.ndarray, "*batch answer"],
    after: Float[np.ndarray, "*batch answer"],
    *,
    answer: Int[np.ndarray, "*batch"] | int,
) -> Float[np.ndarray, "*batch"]:
    """Return how much probability an answer loses through an intervention (P1, arXiv:2511.17699, zero ablation).

    Raises:
        MetricError: when there is no such answer.
    """
    return _pick(before - after, np.asarray(answer))


def normalised_effect(
    patched: Float[np.ndarray, "*cell"],
    *,
    clean: Float[np.ndarray, "*#cell"] | float,
    corrupted: Float[np.ndarray, "*#cell"] | float,
) -> Float[np.ndarray, "*cell"]:
    """Return ``(patched - corrupted) / (clean - corrupted)``: 0 is the corrupted run, 1 the clean one.

    Used with logit differences in P2 (arXiv:2603.18523, visual activation patching). NaN where clean and corrupted
    score the same.
    """
    gap = np.asarray(clean, dtype=np.float64) - corrupted
    return (patched - corrupted) / np.where(gap == 0, np.nan, gap)


def _pick(values: Float[np.ndarray, "*batch answer"], index: Int[np.ndarray, "..."]) -> Float[np.ndarray, "*batch"]:
    count = values.shape[-1]
    if ((index < 0) | (index >= count)).any():
        raise MetricError(f"the index of one of {count} answers", f"{index.tolist()}", "Count from 0.")
    index = np.broadcast_to(index, values.shape[:-1])
    return np.asarray(np.take_along_axis(values, index[..., None], axis=-1)[..., 0])


def _same_pairs(base: np.ndarray, source: np.ndarray, *, patched: np.ndarray) -> None:
    if not len(base) == len(source) == len(patched):
        got = f"{len(base)}, {len(source)} and {len(patched)}"
        raise MetricError("base, source and patched scores of the same pairs", got, "The first axis is the pair.")
