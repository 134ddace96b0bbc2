"""Is a difference between two conditions on the same examples more than chance?"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from jaxtyping import Float

from sightlens.errors import ExtraError, MetricError

PairedMethod = Literal["permutation", "wilcoxon"]


@dataclass(frozen=True)
class PairedTest:
    """A two-sided test of paired values.

    Attributes:
        difference: mean of ``a - b`` over the pairs.
        effect: that mean in standard deviations of the differences (Cohen's d_z); NaN when all differences are equal.
        p: probability of a difference as far from 0 if a and b were exchangeable within each pair.
        n: pairs that went in.
        missing: pairs left out because a value was NaN.
        method: "permutation" of the signs of the differences, or "wilcoxon" signed ranks.
    """

    difference: float
    effect: float
    p: float
    n: int
    missing: int
    method: PairedMethod


def paired_test(
    a: Float[np.ndarray, " example"],
    b: Float[np.ndarray, " example"],
    *,
    method: PairedMethod = "permutation",
    resamples: int = 9999,
    seed: int = 0,
) -> PairedTest:
    """Test whether two conditions differ on the same examples, with SciPy.

    Args:
        a: values under one condition; NaN where missing.
        b: values of the same examples under the other.
        method: "permutation" tests the mean (exactly, when there are no more than ``resamples`` sign patterns);
            "wilcoxon" tests signed ranks, for values with outliers.
        resamples: random sign patterns.
        seed: of the sign patterns.

    Raises:
        MetricError: when the lengths differ, a value is infinite, or fewer than two pairs have both values.
        ExtraError: without SciPy.
    """
    if a.shape != b.shape or np.isinf(a).any() or np.isinf(b).any():
        raise MetricError("two arrays of finite values over the same examples", f"{a.shape} and {b.shape}", "Pair by example first.")
    differences = (a - b).astype(np.float64)
    differences = differences[~np.isnan(differences)]
    if len(differences) < 2:
        raise MetricError("at least two complete pairs", f"{len(differences)} of {len(a)}", "Measure more examples.")
    spread = float(differences.std(ddof=1))
    mean = float(differences.mean())
    p = 1.0 if not differences.any() else _p_value(differences, method, resamples, seed)
    return PairedTest(mean, mean / spread if spread > 0 else float("nan"), p, len(differences), len(a) - len(differences), method)


def _p_value(differences: Float[np.ndarray, " pair"], method: PairedMethod, resamples: int, seed: int) -> float:
    stats = _scipy_stats()
    if method == "wilcoxon":
        return float(stats.wilcoxon(differences).pvalue)
    test = stats.permutation_test(
        (differences,),
        lambda x, axis: x.mean(axis=axis),
        permutation_type="samples",
        vectorized=True,
        n_resamples=resamples,
        rng=np.random.default_rng(seed),
    )
    return float(test.pvalue)


def _scipy_stats() -> Any:
    try:
        from scipy import stats
    except ImportError as problem:
        raise ExtraError.missing("scipy", "stats") from problem
    return stats
