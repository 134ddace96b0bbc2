"""Likelihood, recovery, overlap, curves and bootstrap against closed forms and brute force."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from jaxtyping import TypeCheckError

from sightlens import metrics
from sightlens.errors import MetricError

rng = np.random.default_rng(7)
REFUSED = (MetricError, TypeCheckError)  # shapes are refused by whichever looks first


def test_logprobs_read_the_position_before_each_token():
    logits = torch.randn(2, 9, 11, dtype=torch.float64)
    answer = torch.tensor([[3, 4, 5], [10, 0, 1]])
    found = metrics.answer_logprobs(logits, answer, prompt_len=5)
    for row in range(2):
        for t in range(3):
            expected = torch.log(torch.softmax(logits[row, 4 + t], -1)[answer[row, t]])
            assert found[row, t].item() == pytest.approx(expected.item())
    assert torch.equal(found[1], metrics.answer_logprobs(logits[1], answer[1], prompt_len=5))
    assert found.shape == metrics.answer_logprobs(logits[:, :7], answer, prompt_len=5).shape  # last logits are not read


def test_half_precision_is_computed_in_float():
    logits = torch.randn(4, 1000).to(torch.bfloat16)
    found = metrics.answer_logprobs(logits, torch.tensor([5, 6]), prompt_len=1)
    assert found.dtype == torch.float32
    assert found[0].item() == pytest.approx(torch.log_softmax(logits[0].double(), -1)[5].item(), abs=1e-5)


@pytest.mark.parametrize(("ids", "prompt_len"), [([1, 2], 0), ([1, 2], 4), ([], 2), ([99], 2), ([-1], 2)])
def test_logprobs_refuse_what_does_not_fit(ids, prompt_len):
    with pytest.raises(MetricError):
        metrics.answer_logprobs(torch.randn(4, 10), torch.tensor(ids, dtype=torch.long), prompt_len=prompt_len)


def test_uniform_logits_have_the_vocabulary_as_perplexity():
    logprobs = metrics.answer_logprobs(torch.zeros(6, 32), torch.tensor([1, 2, 3]), prompt_len=2)
    assert metrics.perplexity(logprobs).item() == pytest.approx(32, rel=1e-5)
    assert metrics.mean_nll(logprobs).item() == pytest.approx(math.log(32), rel=1e-5)
    assert metrics.answer_probability(logprobs).item() == pytest.approx(32**-3, rel=1e-5)


def test_left_out_tokens_do_not_count():
    logprobs = torch.log(torch.tensor([[0.5, 0.001, 0.125], [1.0, 1e-9, 1.0]]))
    keep = torch.tensor([True, False, True])
    assert metrics.perplexity(logprobs, keep).tolist() == pytest.approx([4.0, 1.0])  # 1/sqrt(1/2 · 1/8)
    for mask in (torch.zeros(3, dtype=torch.bool), torch.ones(2, dtype=torch.bool)):
        with pytest.raises(REFUSED):
            metrics.perplexity(logprobs, mask)


def test_spellings_add_up():
    logits = torch.log(torch.tensor([0.1, 0.2, 0.3, 0.4]))
    assert metrics.form_probability(logits, [[0, 1], [2]]).tolist() == pytest.approx([0.3, 0.3])
    assert metrics.form_probability(logits, [[0], [2]], restrict=True).tolist() == pytest.approx([0.25, 0.75])
    for forms in ([[0], []], [[0], [0]], [[7]], []):
        with pytest.raises(MetricError):
            metrics.form_probability(logits, forms)


def test_logit_difference():
    logits = torch.tensor([[1.0, 5.0, 2.0], [0.0, 0.0, 3.0]])
    assert metrics.logit_difference(logits, right=1, wrong=2).tolist() == [3.0, -3.0]
    for pair in ({"right": 1, "wrong": 1}, {"right": 1, "wrong": 3}):
        with pytest.raises(MetricError):
            metrics.logit_difference(logits, **pair)


def test_mediation_is_0_for_the_base_and_1_for_the_source():
    base, source = rng.uniform(5, 9, 6), rng.uniform(1, 3, 6)
    for aggregate in ("mean_of_ratios", "ratio_of_means"):
        patched = np.stack([base, source, (base + source) / 2], axis=1)
        assert metrics.mediation_fraction(base, source, patched=patched, aggregate=aggregate) == pytest.approx([0, 1, 0.5])


def test_mediation_by_hand_and_left_out_pairs():
    base, source, patched = np.array([4.0, 10.0, 2.0]), np.array([2.0, 2.0, 3.0]), np.array([3.0, 9.0, 7.0])
    assert metrics.usable_pairs(base, source).tolist() == [True, True, False]
    assert metrics.mediation_ratios(base, source, patched=patched)[:2].tolist() == [0.5, 0.125]
    assert np.isnan(metrics.mediation_ratios(base, source, patched=patched)[2])
    assert metrics.mediation_fraction(base, source, patched=patched) == pytest.approx(0.3125)
    assert metrics.mediation_fraction(base, source, patched=patched, aggregate="ratio_of_means") == pytest.approx(2 / 10)
    assert metrics.mediation_fraction(base, source, patched=patched, min_gap=5.0) == pytest.approx(0.125)
    found = metrics.mediation(base, source, patched=patched)
    assert (found.used, found.excluded, found.min_gap, float(found.fraction)) == (2, 1, 1e-6, pytest.approx(0.3125))
    assert metrics.mediation(base, source, patched=patched, min_gap=5.0).excluded == 2
    with pytest.raises(MetricError, match="min_gap"):
        metrics.mediation_fraction(base, source, patched=patched, min_gap=9.0)
    with pytest.raises(REFUSED):
        metrics.mediation_fraction(base, source, patched=patched[:2])


@settings(deadline=None)
@given(st.integers(0, 2**32 - 1))
def test_influence_is_bounded_and_signed(seed):
    draw = np.random.default_rng(seed).dirichlet(np.ones(4) * 0.3, size=(2, 5))
    influence = metrics.causal_influence(draw[0], draw[1], hypothesis=1, competitor=2)
    assert (np.abs(influence) <= 1 + 1e-12).all()
    assert metrics.causal_influence(draw[1], draw[1], hypothesis=1, competitor=2) == pytest.approx(np.zeros(5))
    assert metrics.causal_influence(draw[0], draw[1], hypothesis=2, competitor=1) == pytest.approx(-influence)


def test_influence_by_hand():
    target, patched = np.array([[0.0, 1.0], [0.2, 0.8]]), np.array([[1.0, 0.0], [0.5, 0.5]])
    assert metrics.causal_influence(patched, target, hypothesis=0, competitor=1) == pytest.approx([1.0, 0.3])
    same = metrics.causal_influence(patched, target, hypothesis=np.array([0, 1]), competitor=np.array([1, 1]))
    assert same[0] == 1.0
    assert np.isnan(same[1])
    assert metrics.probability_drop(target, patched, answer=1) == pytest.approx([1.0, 0.3])


def test_normalised_effect():
    found = metrics.normalised_effect(np.array([1.0, 3.0, 2.0]), clean=3.0, corrupted=1.0)
    assert found.tolist() == [0.0, 1.0, 0.5]
    assert np.isnan(metrics.normalised_effect(np.array([1.0]), clean=2.0, corrupted=2.0)).all()


def test_overlap_of_random_rankings_is_the_expected_one():
    counts = [metrics.topk_overlap(rng.random((8, 8)), rng.random((8, 8)), k=16).count for _ in range(300)]
    assert np.mean(counts) == pytest.approx(metrics.topk_overlap(rng.random((8, 8)), rng.random((8, 8)), k=16).expected, abs=0.3)


def test_overlap_by_hand():
    a = np.array([[9.0, 8.0], [1.0, 0.0]])
    assert metrics.topk_overlap(a, a, k=2) == metrics.Overlap(2, 1.0, 1.0)
    assert metrics.topk_overlap(a, -a, k=2) == metrics.Overlap(0, 0.0, 1.0)
    with pytest.raises(MetricError, match="NaN"):
        metrics.topk_overlap(a, np.where(a == 0, np.nan, a), k=2)
    for k in (0, 5):
        with pytest.raises(MetricError):
            metrics.topk_overlap(a, a, k=k)


def test_area_of_known_curves():
    x = np.array([0.0, 0.1, 0.4, 1.0])
    assert metrics.nauc(x, np.full(4, 0.7)) == pytest.approx(1.0)
    assert metrics.nauc(x, 1 - x) == pytest.approx(0.5)
    assert metrics.nauc(x, 1 - x, baseline=2.0) == pytest.approx(0.25)
    assert metrics.nauc(np.array([2.0, 4.0]), np.array([1.0, 0.0])) == pytest.approx(0.5)


@pytest.mark.parametrize(("x", "y"), [([0, 0], [1, 1]), ([0], [1]), ([1, 0], [1, 1]), ([0, 1], [0, 1]), ([0, 1], [1, np.nan])])
def test_curves_without_an_area_are_refused(x, y):
    with pytest.raises(MetricError):
        metrics.nauc(np.array(x, dtype=float), np.array(y, dtype=float))


def test_intervals_match_the_normal_approximation():
    values = rng.normal(3.0, 2.0, size=400)
    found = metrics.bootstrap_mean(values, seed=1)
    half = 1.96 * values.std() / math.sqrt(400)
    assert found.mean == pytest.approx(values.mean())
    assert found.low == pytest.approx(values.mean() - half, abs=0.03)
    assert found.high == pytest.approx(values.mean() + half, abs=0.03)


def test_intervals_cover_the_truth_as_often_as_they_say():
    covered = [
        interval.low <= 0.3 <= interval.high
        for seed in range(100)
        for interval in [metrics.bootstrap_mean((np.random.default_rng(seed).random(80) < 0.3).astype(float), level=0.9)]
    ]
    assert 0.83 <= np.mean(covered) <= 0.96


def test_cells_are_resampled_together_and_missing_values_left_out():
    values = rng.random((30, 2, 3))
    values[:4, 1, 2] = np.nan
    values[:, 0, 1] = np.nan
    found = metrics.bootstrap_mean(values)
    assert found.n.tolist() == [[30, 0, 30], [30, 30, 26]]
    assert found.missing.tolist() == [[0, 30, 0], [0, 0, 4]]
    assert np.isnan([found.mean[0, 1], found.low[0, 1], found.high[0, 1]]).all()
    assert found.mean[1, 2] == pytest.approx(values[4:, 1, 2].mean())
    single = metrics.bootstrap_mean(values[:, 0, 0])
    assert (single.low, single.high) == pytest.approx((found.low[0, 0], found.high[0, 0]))


def test_a_seed_is_an_interval():
    values = rng.random(20)
    same, again, other = (metrics.bootstrap_mean(values, seed=seed) for seed in (3, 3, 4))
    assert same.low == again.low
    assert same.low != other.low


def test_paired_differences_are_tighter_than_unpaired():
    a = rng.normal(0, 5, 100)
    found = metrics.bootstrap_difference(a + 1 + rng.normal(0, 0.1, 100), a)
    assert 0.9 < found.low < found.mean < found.high < 1.1
    with pytest.raises(REFUSED):
        metrics.bootstrap_difference(a, a[:5])


@pytest.mark.parametrize("values", [np.array([]), np.array([1.0, np.inf])])
def test_intervals_refuse_what_has_no_mean(values):
    with pytest.raises(MetricError):
        metrics.bootstrap_mean(values)


def test_extreme_levels_are_refused():
    with pytest.raises(MetricError):
        metrics.bootstrap_mean(np.ones(3), level=1.0)


def test_a_single_value_has_an_interval_of_width_zero():
    found = metrics.bootstrap_mean(np.array([5.0, np.nan, np.nan]))
    assert (float(found.mean), float(found.low), float(found.high)) == (5.0, 5.0, 5.0)
    assert (int(found.n), int(found.missing)) == (1, 2)


@pytest.mark.parametrize("index", [7, 3, -1])
def test_answers_that_do_not_exist_are_refused(index):
    p = np.array([0.2, 0.3, 0.5])
    for call in (
        lambda: metrics.causal_influence(p, p, hypothesis=index, competitor=0),
        lambda: metrics.causal_influence(p, p, hypothesis=0, competitor=index),
        lambda: metrics.probability_drop(p, p, answer=index),
    ):
        with pytest.raises(MetricError, match="one of 3 answers"):
            call()


@pytest.mark.parametrize("min_gap", [0.0, -1.0, float("nan"), float("inf")])
def test_gaps_that_mean_nothing_are_refused(min_gap):
    base, source = np.array([2.0, 1.0]), np.array([1.0, 2.0])
    with pytest.raises(MetricError, match="positive min_gap"):
        metrics.mediation_fraction(base, source, patched=base, min_gap=min_gap)


def test_pairs_without_a_finite_score_are_left_out_and_counted():
    base, source = np.array([3.0, np.nan, np.inf, 2.0]), np.array([1.0, 1.0, 1.0, np.nan])
    found = metrics.mediation(base, source, patched=np.array([2.0, 1.0, 1.0, 1.0]))
    assert (float(found.fraction), found.used, found.excluded) == (0.5, 1, 3)
