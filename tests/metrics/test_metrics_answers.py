"""Answers: tables of texts and what they say, and the localization score by hand."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jaxtyping import TypeCheckError

from sightlens import metrics
from sightlens.errors import MetricError


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        ("yes", True),
        (" Yes.", True),
        ("NO, none", False),
        ("**No**", False),
        ("yesterday", None),
        ("nothing", None),
        ("", None),
        ("...", None),
        ("maybe yes", None),
        ("1 yes", True),
    ],
)
def test_yes_and_no_are_first_words(answer, says):
    assert metrics.yes_no(answer) is says
    assert metrics.existence_matches(answer, present=True) is (says is True)
    assert metrics.existence_matches(answer, present=False) is (says is False)


@pytest.mark.parametrize(
    ("answer", "count"),
    [
        ("3", 3),
        ("There are 12.", 12),
        ("three", 3),
        ("Fifteen!", 15),
        ("zero", 0),
        ("sixteen", -1),
        ("someone", -1),
        ("nothing", -1),
        ("often", -1),
        ("", -1),
        ("three of 5", 3),
        ("7up", 7),
        ("seventeen", -1),
        ("-4", -1),
        ("no", -1),
    ],
)
def test_counts_are_whole_words(answer, count):
    assert metrics.parse_count(answer) == count


@settings(deadline=None)
@given(st.integers(0, 10**6), st.text(alphabet="abz ,.", max_size=10))
def test_any_number_is_read_back(number, before):
    assert metrics.parse_count(f"{before} {number} circles") == number


@pytest.mark.parametrize(
    ("answer", "name", "expected"),
    [
        ("teddy bear, cup", "bear", (True, True, False)),
        ("Carrot", "car", (True, False, False)),
        ("cat, Hot Dog, cup.", "hot dog", (True, True, True)),
        ("cat and cup", "cup", (True, True, False)),
        ("cat, and cup", "cup", (True, True, True)),
        ("- cat\n- cup", "cat", (True, True, True)),
        ("none", "cat", (False, False, False)),
    ],
)
def test_names_in_lists(answer, name, expected):
    rules = ("substring", "word", "item")
    assert tuple(metrics.names_object(answer, name, match=rule) for rule in rules) == expected


def test_an_empty_name_is_refused():
    with pytest.raises(MetricError, match="name of a class"):
        metrics.names_object("cat", " ")


@pytest.mark.parametrize("answer", ["1e999", "-3", "3.5 circles", "+2", "9" * 5000, "1e-2", "about -3 of 4"])
def test_numbers_that_are_no_count(answer):
    assert metrics.parse_count(answer) == -1


@pytest.mark.parametrize(("answer", "count"), [("3.", 3), ("2-3", 2), ("1, 2", 1), ("- 3 circles", 3), ("3 .5", 3), ("4e", 4), ("x7", 7)])
def test_counts_beside_signs_and_points(answer, count):
    assert metrics.parse_count(answer) == count


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_loc_of_boxes_that_are_not_finite_is_refused(bad):
    box = (0.0, 0.0, 4.0, 4.0)
    for predicted, truth in (((0.0, bad, 4.0, 4.0), box), (box, (0.0, 0.0, bad, 4.0))):
        with pytest.raises(MetricError):
            metrics.loc([predicted], [truth])


def test_counting_scores_by_hand():
    predicted, truth = np.array([1, 1, 2, 4, 4, -1]), np.array([1, 1, 2, 2, 3, 3])
    assert metrics.count_accuracy(predicted, truth) == {1: 1.0, 2: 0.5, 3: 0.0}
    assert metrics.number_avoidance(predicted, truth) == {1: 1.0, 2: 0.5, 3: 0.0}
    assert metrics.count_hits(["one", "2", "many"], [1, 3, 3]).tolist() == [True, False, False]
    with pytest.raises((MetricError, TypeCheckError)):
        metrics.count_accuracy(predicted[:2], truth)
    with pytest.raises(MetricError):
        metrics.count_hits([], [])


def test_loc_by_hand():
    truth = [(0.0, 0.0, 10.0, 10.0)] * 4
    predicted = [(0.0, 0.0, 10.0, 5.0), (0.0, 0.0, 10.0, 6.0), (0.0, 0.0, 10.0, 10.0), None]
    scores = metrics.LocMetric().per_example(predicted, truth)
    assert scores.tolist() == [0.0, pytest.approx(1 / 3), 1.0, 0.0]  # an IoU of exactly .5 does not pass
    assert metrics.LocMetric(strict=False).per_example(predicted, truth)[0] == pytest.approx(1 / 3)
    assert metrics.loc(predicted, truth) == pytest.approx(scores.mean())
    rates = [(metrics.overlaps(predicted, truth) > threshold).mean() for threshold in (0.5, 0.7, 0.9)]
    assert metrics.loc(predicted, truth) == pytest.approx(np.mean(rates))


@pytest.mark.parametrize(("predicted", "truth"), [([None], []), ([], []), ([None], [(3.0, 0.0, 1.0, 4.0)]), ([], [(0.0, 0.0, 1.0, 1.0)])])
def test_loc_of_unusable_truth_is_refused(predicted, truth):
    with pytest.raises(MetricError):
        metrics.loc(predicted, truth)


def test_thresholds_are_checked():
    for thresholds in ((), (1.5,)):
        with pytest.raises(MetricError, match="thresholds"):
            metrics.LocMetric(thresholds=thresholds)
