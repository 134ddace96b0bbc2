"""Do two rankings pick the same heads?"""

from __future__ import annotations

import dataclasses

import numpy as np
from jaxtyping import Float

from sightlens.errors import MetricError


@dataclasses.dataclass(frozen=True)
class Overlap:
    """What two top-k sets share.

    Attributes:
        count: members in both.
        jaccard: count divided by the members of either.
        expected: the count that two random sets of k would share, ``k² / n``.
    """

    count: int
    jaccard: float
    expected: float


def topk_overlap(a: Float[np.ndarray, "*cell"], b: Float[np.ndarray, "*cell"], *, k: int) -> Overlap:
    """Compare the k highest cells of two maps, such as MF[layer, head] of two tasks.

    P5 (arXiv:2605.19792, shared heads) reports the count, P2 (arXiv:2603.18523, overlap of tasks) the Jaccard index.
    Ties go to the earlier cell.

    Raises:
        MetricError: when the shapes differ, a value is NaN, or k is not within 1..n.

    >>> topk_overlap(np.array([3.0, 2.0, 1.0, 0.0]), np.array([3.0, 1.0, 2.0, 0.0]), k=2)
    Overlap(count=1, jaccard=0.3333333333333333, expected=1.0)
    """
    if a.shape != b.shape or not 1 <= k <= a.size:
        do = "Give two maps over the same cells and a k no larger than them."
        raise MetricError("two maps of one shape and k within them", f"{a.shape}, {b.shape}, k={k}", do)
    count = len(set(_top(a, k)) & set(_top(b, k)))
    return Overlap(count, count / (2 * k - count), k * k / a.size)


def _top(values: Float[np.ndarray, "*cell"], k: int) -> list[int]:
    if np.isnan(values).any():
        got = f"{int(np.isnan(values).sum())} NaN"
        raise MetricError("a value in every cell", got, "A ranking needs all cells; finish the study or drop the rest.")
    return np.argsort(-values.ravel(), kind="stable")[:k].tolist()
