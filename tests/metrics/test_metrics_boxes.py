"""Boxes: overlap against counting pixels, formats against their own round trip and against the official pattern."""

from __future__ import annotations

import re
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sightlens import metrics
from sightlens.errors import MetricError

FORMATS = {
    "padded": metrics.UnitSquare(decimals=2),
    "cropped": metrics.UnitSquare(frame="centre_crop", decimals=3),
    "per_mille": metrics.PerMille(label="red circle 7"),
    "resized": metrics.ResizedPixels(),
    "bins": metrics.BinTokens(bins=32),
    "bins_edge": metrics.BinTokens(bins=64, prefixes=("<loc_",) * 4, joiner="", anchor="edge", frame="padded_square"),
}
corner = st.integers(0, 12)
small_box = st.tuples(corner, corner, corner, corner).map(lambda box: tuple(map(float, box)))
size = st.tuples(st.integers(1, 900), st.integers(1, 900))


def pixel_iou(a, b):
    """Count pixels of a 12 × 12 canvas."""
    masks = []
    for x0, y0, x1, y1 in (a, b):
        mask = np.zeros((12, 12), bool)
        mask[int(y0) : int(y1), int(x0) : int(x1)] = True
        masks.append(mask)
    union = (masks[0] | masks[1]).sum()
    return (masks[0] & masks[1]).sum() / union if masks[0].any() and masks[1].any() else 0.0


def resolution(box_format, frame_width, image_size):
    """Return the largest rounding error of one coordinate in original pixels."""
    match box_format:
        case metrics.UnitSquare():
            return 0.5 * 10**-box_format.decimals * frame_width
        case metrics.PerMille():
            return 0.0005 * frame_width
        case metrics.ResizedPixels():
            return 0.5 * frame_width / min(box_format.resized(image_size))
        case metrics.BinTokens():
            return 0.5 * frame_width / (box_format.bins - 1)


@settings(deadline=None)
@given(small_box, small_box)
def test_iou_counts_pixels(a, b):
    assert metrics.iou(a, b) == pytest.approx(pixel_iou(a, b))
    assert metrics.iou(a, b) == metrics.iou(b, a)


def test_iou_of_many_pairs_equals_one_by_one():
    rng = np.random.default_rng(0)
    a, b = rng.uniform(0, 10, (5, 4)), rng.uniform(0, 10, (7, 4))
    table = metrics.box_ious(a[:, None], b[None])
    assert table.shape == (5, 7)
    assert table[3, 4] == pytest.approx(metrics.iou(tuple(a[3]), tuple(b[4])))


@pytest.mark.parametrize(
    "bad",
    [None, (3.0, 3.0, 3.0, 9.0), (9.0, 0.0, 1.0, 9.0), (float("nan"), 0.0, 5.0, 5.0), (0.0, 0.0, float("inf"), 5.0)],
)
def test_iou_of_no_box_is_zero(bad):
    assert metrics.iou(bad, (0.0, 0.0, 10.0, 10.0)) == 0.0


@settings(deadline=None)
@given(small_box.filter(metrics.is_box), st.integers(0, 3))
def test_grown_box_holds_the_box_and_stays_inside(box, cells):
    x0, y0, x1, y1 = metrics.expand_box(box, cells=cells, cell_size=(2.0, 3.0), image_size=(12, 12))
    assert 0 <= x0 <= box[0]
    assert 0 <= y0 <= box[1]
    assert box[2] <= x1 <= 12
    assert box[3] <= y1 <= 12
    assert x0 == max(0, box[0] - 3 * cells)
    assert y1 == min(12, box[3] + 2 * cells)


def test_growing_by_less_than_nothing_is_refused():
    with pytest.raises(MetricError, match="cells >= 0"):
        metrics.expand_box((0.0, 0.0, 1.0, 1.0), cells=-1, cell_size=(1.0, 1.0), image_size=(4, 4))


@pytest.mark.parametrize(("side", "name"), [(31.9, "small"), (32, "medium"), (95.9, "medium"), (96, "large")])
def test_size_bins_are_cocos(side, name):
    assert metrics.size_bin((0.0, 0.0, float(side), float(side))) == name


@pytest.mark.parametrize("name", FORMATS)
@settings(deadline=None)
@given(image_size=size, corners=st.tuples(*[st.floats(0, 1)] * 4))
def test_format_reads_what_it_wrote(name, image_size, corners):
    box_format = FORMATS[name]
    fx0, fy0, fx1, fy1 = metrics.frame_box(box_format.frame, image_size)
    (ax, bx), (ay, by) = sorted(corners[::2]), sorted(corners[1::2])
    box = (fx0 + ax * (fx1 - fx0), fy0 + ay * (fy1 - fy0), fx0 + bx * (fx1 - fx0), fy0 + by * (fy1 - fy0))
    errors = [resolution(box_format, length, image_size) for length in (fx1 - fx0, fy1 - fy0)]
    if box[2] - box[0] <= 2.1 * errors[0] or box[3] - box[1] <= 2.1 * errors[1]:
        return  # smaller than the format can say
    read = box_format.parse(f"It is at {box_format.render(box, image_size)}.", image_size)
    assert read is not None
    assert np.abs(np.subtract(read, box)).max() <= max(errors) * 1.001 + 1e-6


def test_frames_by_hand():
    assert metrics.frame_box("padded_square", (480, 640)) == (0, -80, 640, 560)
    assert metrics.frame_box("padded_square", (4, 7)) == (0, -1, 7, 6)
    assert metrics.frame_box("padded_square", (7, 4)) == (-1, 0, 6, 7)
    assert metrics.frame_box("centre_crop", (480, 640)) == (80, 0, 560, 480)
    assert metrics.UnitSquare().parse("[0.00, 0.25, 1.00, 0.75]", (480, 640)) == (0, 80, 640, 400)
    assert metrics.PerMille().parse("<box>[[0, 500, 1000, 1000]]</box>", (480, 640)) == (0, 240, 640, 480)
    assert metrics.PerMille().parse("[0.0, 0.5, 1.0, 1.0]", (480, 640)) == (0, 240, 640, 480)
    assert metrics.ResizedPixels().parse('{"bbox_2d": [0, 238, 644, 476]}', (480, 640)) == (0, 240, 640, 480)
    assert metrics.BinTokens(bins=10).parse("<x0> <y4> <x9> <y9>", (100, 100)) == (5, 45, 95, 95)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize(
    "text",
    [
        "",
        "no",
        "[1, 2, 3]",
        "[a, b, c, d]",
        "[[5, 5, 5, 9]]",
        "[0.9, 0.1, 0.2, 0.5]",
        "[nan, 0, 1, 1]",
        "<x9> <y2> <x3>",
        "<x40> <y1> <x41> <y2>",
        "[,,,,",
        "[" * 50,
        "<x5> <y5> <x5> <y9>",
    ],
)
def test_unreadable_answers_are_no_box(name, text):
    assert FORMATS[name].parse(text, (48, 64)) is None


@settings(deadline=None)
@given(st.text(alphabet="[],. 19a\n", max_size=40))
def test_reading_brackets_agrees_with_the_official_pattern(text):
    found = re.search(r"\[*\[(.*?),(.*?),(.*?),(.*?)\]\]*", text)
    try:
        official = tuple(float(group) for group in found.groups()) if found else None
    except ValueError:
        official = None
    expected = official if official and metrics.is_box(official) else None
    if expected and sum(expected) >= 4:
        expected = tuple(value / 1000 for value in expected)
    assert metrics.PerMille().parse(text, (1, 1)) == (pytest.approx(expected) if expected else None)


def test_a_thousand_brackets_are_read_at_once():
    start = time.process_time()
    for text in ("[" + "," * 3000, "[" * 3000, "[1," * 1000, "[1,2,3," + "4" * 3000):
        metrics.PerMille().parse(text, (10, 10))
    assert time.process_time() - start < 2.0


def test_a_box_outside_the_frame_cannot_be_written():
    with pytest.raises(MetricError, match="centre_crop"):
        metrics.UnitSquare(frame="centre_crop").render((0.0, 0.0, 70.0, 480.0), (480, 640))


def test_format_mask_keeps_coordinates_only():
    pieces = ["[", "0", ".", "2", "5", ",", " 0", ".30", "]"]
    assert metrics.UnitSquare().format_mask(pieces).tolist() == [
        True,
        False,
        True,
        False,
        False,
        True,
        False,
        False,
        True,
    ]
    pieces = ["<ref>", "7", " up", "</ref>", "<box>", "[[", "12", "0", ",", " ", "5", "]]", "</box>"]
    content = [piece for piece, form in zip(pieces, metrics.PerMille().format_mask(pieces), strict=True) if not form]
    assert content == ["12", "0", "5"]
    pieces = ["<x3>", " ", "<y4>", "<x5>", "<y6>", "</s>"]
    assert metrics.BinTokens(bins=8).format_mask(pieces).tolist() == [False, True, False, False, False, True]
    pieces = ["<", "x", "3", ">", "<eos>"]
    assert metrics.BinTokens(bins=8).format_mask(pieces).tolist() == [False, False, False, False, True]


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("name", sorted(FORMATS))
def test_a_box_that_is_not_finite_cannot_be_written(name, bad):
    for place in range(4):
        box = [10.0, 10.0, 90.0, 90.0]
        box[place] = bad
        with pytest.raises(MetricError, match="finite"):
            FORMATS[name].render(tuple(box), (100, 100))


def test_numbers_near_the_largest_are_no_box():
    assert metrics.UnitSquare(frame="image").parse("[0, 0, 1e308, 1e308]", (480, 640)) is None
