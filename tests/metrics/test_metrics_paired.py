"""Paired tests against closed forms, and curves with their grid."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from jaxtyping import TypeCheckError

from sightlens import metrics
from sightlens.errors import MetricError

pytest.importorskip("scipy")


def test_permutation_is_exact_on_few_pairs():
    a, b = np.array([3.0, 5.0, 4.0, 6.0, 2.0]), np.array([1.0, 4.5, 4.2, 3.0, 1.5])
    differences = a - b
    signs = np.array(list(itertools.product((-1, 1), repeat=5)))
    means = np.abs((signs * differences).mean(1))
    found = metrics.paired_test(a, b)
    assert found.p == pytest.approx((means >= abs(differences.mean()) - 1e-12).mean())
    assert found.difference == pytest.approx(differences.mean())
    assert found.effect == pytest.approx(differences.mean() / differences.std(ddof=1))
    assert (found.n, found.missing, found.method) == (5, 0, "permutation")


def test_signs_do_not_matter_and_methods_agree_on_a_clear_difference():
    rng = np.random.default_rng(0)
    a, b = rng.normal(2, 1, 40), rng.normal(0, 1, 40)
    for method in ("permutation", "wilcoxon"):
        there, back = metrics.paired_test(a, b, method=method), metrics.paired_test(b, a, method=method)
        assert there.p < 0.01
        assert there.difference == -back.difference
        assert there.p == pytest.approx(back.p, abs=2e-3)
    assert metrics.paired_test(a, b) == metrics.paired_test(a, b)
    ps = [metrics.paired_test(*rng.normal(0, 1, (2, 12)), resamples=499, seed=k).p for k in range(60)]
    assert 0.3 < np.mean(ps) < 0.7  # uniform when there is no difference


def test_missing_equal_and_bad_pairs():
    a, b = np.array([1.0, np.nan, 2.0, 4.0]), np.array([0.5, 1.0, np.nan, 1.0])
    found = metrics.paired_test(a, b)
    assert (found.n, found.missing) == (2, 2)
    same = metrics.paired_test(a[[0, 3]], a[[0, 3]], method="wilcoxon")
    assert same.p == 1
    assert np.isnan(same.effect)
    for bad in ((a, b[:3]), (a, np.array([np.inf, 1, 1, 1])), (a[:1], b[:1])):
        with pytest.raises((MetricError, TypeCheckError)):  # shapes are refused by whichever looks first
            metrics.paired_test(*bad)


def test_a_curve_keeps_its_grid():
    curve = metrics.Curve.of([0, 0.5, 1], [0.8, 0.4, 0.0])
    assert (curve.nauc, curve.baseline, curve.x) == (pytest.approx(0.5), 0.8, (0.0, 0.5, 1.0))
    assert metrics.Curve.of([0.1, 0.2], [0.4, 0.4], baseline=0.8).nauc == pytest.approx(0.5)
    for x, y in (([0, 0], [1, 1]), ([0, 1], [0, 1]), ([0], [1]), ([], [])):
        with pytest.raises(MetricError):
            metrics.Curve.of(x, y)
