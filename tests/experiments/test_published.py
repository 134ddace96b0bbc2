"""The published numbers parse, are each sourced, and agree with each other where they state one thing twice."""

from __future__ import annotations

import pytest

from sightlens.errors import StudyError
from sightlens.experiments import published_numbers
from sightlens.experiments.published import SOURCES

EXPERIMENTS = {
    *("pairs", "baseline", "false_positives", "token_share", "ablate_tokens", "containerize", "shuffle", "ablate_views"),
    *("position_probes", "knockout_windows", "mediation", "head_overlap", "ablate_heads"),
}


def test_every_number_has_an_experiment_a_metric_and_a_source():
    frame = published_numbers()
    assert set(frame["experiment"]) == EXPERIMENTS
    assert frame[["metric", "value", "source", "approximate"]].notna().all(axis=None)
    assert set(frame["source"]) == set(SOURCES.values())
    assert all("arXiv" in source for source in frame["source"])
    assert not frame.duplicated([name for name in frame.columns if name not in ("value", "approximate")]).any()


def test_units():
    frame = published_numbers()
    bounds = {
        "loc": (0, 100),
        "cls": (0, 100),
        "share": (0, 1),
        "accuracy": (0, 1),
        "nauc": (0, 1),
        "layer": (0, 40),
        "best_layer": (0, 40),
    }
    for metric, (low, high) in bounds.items():
        values = frame.loc[frame["metric"] == metric, "value"]
        assert len(values)
        assert values.between(low, high).all()
        assert high != 100 or values.max() > 1


def test_one_experiment_has_its_own_coordinates():
    frame = published_numbers("containerize")
    assert list(frame.columns) == ["experiment", "model", "padding", "truth_padding", "metric", "value", "approximate", "source"]
    cell = frame.query("model == 'llava-7b' and padding == 1 and truth_padding == 1")
    assert cell["value"].tolist() == [44.0]
    with pytest.raises(StudyError, match="containerize"):
        published_numbers("countscope")


def test_what_is_stated_twice_agrees():
    views, tokens = published_numbers("ablate_views"), published_numbers("ablate_tokens")
    both = views.query("views == 'both'").set_index("metric")["value"]
    objects = tokens.query("model == 'internvl' and data == 'coco' and condition == 'object'").set_index("metric")["value"]
    assert both.to_dict() == objects.to_dict()
    baseline = published_numbers("baseline").query("model == 'internvl'").set_index("metric")["value"]
    assert views.query("views == 'none'")["value"].tolist() == [baseline["loc"]]
