"""Points and JSON boxes: round trips, and what models write around them."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sightlens import metrics
from sightlens.errors import MetricError

SIZE = (200, 400)
permille = st.integers(0, 1000)


@settings(deadline=None)
@given(st.lists(st.tuples(permille, permille), min_size=1, max_size=12))
def test_points_come_back(places):
    points = [(x * 400 / 1000, y * 200 / 1000) for x, y in places]
    text = metrics.PointTags(label='a "red" <cup>').render(points, SIZE)
    assert np.allclose(metrics.PointTags().parse(text, SIZE), points)
    assert text.startswith("<point " if len(points) == 1 else "<points ")


def test_points_as_molmo_writes_them():
    tags = metrics.PointTags(label="cat")
    assert tags.render([(150.0, 128.0)], SIZE) == '<point x="37.5" y="64.0" alt="cat">cat</point>'
    two = ' Here: <points x1="10.0" y1="50" x2=" 90.0" y2="25.5" alt="x9=1">two</points>.'
    assert tags.parse(two, SIZE) == [(40, 100), (360, 51)]
    several = '<point x="1.0" y="2.0" alt="a">a</point><point x="3.0" y="4.0" alt="a">a</point>'
    assert tags.parse(several, SIZE) == [(4, 4), (12, 8)]
    for broken in ("", "no", '<point x="10.0" alt="a">', '<points x1="10.0" y2="5.0"', '<point x="140.0" y="50">'):
        assert tags.parse(broken, SIZE) == []
    for bad in ([], [(401.0, 0.0)], [(0.0, -1.0)]):
        with pytest.raises(MetricError, match="points"):
            tags.render(bad, SIZE)


def test_a_point_hits_the_pixel_it_lies_in():
    mask = np.zeros(SIZE, dtype=bool)
    mask[50:60, 100:120] = True
    inside, outside = [(100.0, 50.0), (119.9, 59.9)], [(120.0, 55.0), (99.9, 55.0), (110.0, 60.0)]
    assert {metrics.point_hit([p], mask) for p in inside} == {"hit"}
    assert {metrics.point_hit([p], mask) for p in outside} == {"miss"}
    assert metrics.point_hit([], mask) == "none"
    mask[:, -1] = True
    assert metrics.point_hit([(400.0, 200.0)], mask) == "hit"
    with pytest.raises(MetricError, match="at least one pixel"):
        metrics.point_hit(inside, np.zeros(SIZE, dtype=bool))


@pytest.mark.parametrize("unit", ["resized", "per_mille"])
def test_json_boxes_come_back(unit):
    form = metrics.JsonBox(label="dog 7", unit=unit)
    box = (40.0, 20.0, 200.0, 180.0)
    text = form.render(box, (480, 640))
    assert '"label": "dog 7"' in text
    assert {"resized": "[40, 20, 201, 178]", "per_mille": "[62, 42, 312, 375]"}[unit] in text
    tolerance = 640 / 1000 if unit == "per_mille" else 1.0
    for wrapped in (text, f"```json\n{text}\n```", f"The box is {text}.", text.replace(" ", "\n"), text[: text.index("]")]):
        assert np.allclose(form.parse(wrapped, (480, 640)), box, atol=tolerance)
    assert form.parse(text.replace("bbox_2d", "point_2d"), (480, 640)) is None
    assert form.parse('[{"bbox_2d": [1, 2, 3], "label": "4"}]', (480, 640)) is None


def test_only_coordinates_of_a_json_box_are_content():
    pieces = [
        "[",
        "{",
        '"',
        "bbox",
        "_2",
        'd"',
        ":",
        " [",
        "1",
        "2",
        ",",
        " 34",
        ",",
        " 5",
        ",",
        " 6",
        "],",
        ' "label"',
        ": ",
        '"dog 7"',
        "}]",
    ]
    format_mask = metrics.JsonBox().format_mask(pieces)
    assert [piece for piece, form in zip(pieces, format_mask, strict=True) if not form] == ["1", "2", " 34", " 5", " 6"]
