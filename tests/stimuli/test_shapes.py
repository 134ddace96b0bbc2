"""Drawn scenes: deterministic, separate objects, masks that agree with boxes, errors that say what to do."""

import numpy as np
import pytest

from sightlens.errors import StimulusError
from sightlens.stimuli import shapes
from sightlens.stimuli.shapes import Style, compose, draw

STYLES = [Style(), Style(96, 48), Style(40, 40), Style(128, 96, scale=2.0), Style(33, 57, count=(1, 3), gap=0)]


def pixels(stimulus) -> np.ndarray:
    return np.asarray(stimulus.image)


@pytest.mark.parametrize("style", STYLES, ids=lambda style: f"{style.width}x{style.height}")
def test_same_arguments_draw_same_picture(style: Style) -> None:
    one, other = draw(compose(3, 8, style=style)), draw(compose(3, 8, style=style))
    assert (pixels(one) == pixels(other)).all()
    assert [item.box for item in one.objects] == [item.box for item in other.objects]
    assert one.size == (style.width, style.height)


def test_seed_and_index_both_matter() -> None:
    pictures = [pixels(draw(compose(seed, index))) for seed, index in [(0, 0), (0, 1), (1, 0)]]
    assert all((pictures[a] != pictures[b]).any() for a, b in [(0, 1), (0, 2), (1, 2)])


@pytest.mark.parametrize("style", STYLES, ids=lambda style: f"{style.width}x{style.height}")
def test_masks_fill_their_boxes_and_nothing_else(style: Style) -> None:
    for index in range(30):
        for item in draw(compose(11, index, style=style)).objects:
            rows, columns = np.nonzero(item.mask)
            assert item.box == (columns.min(), rows.min(), columns.max() + 1, rows.max() + 1)
            assert item.mask.shape == (style.height, style.width)


@pytest.mark.parametrize("style", STYLES, ids=lambda style: f"{style.width}x{style.height}")
def test_objects_keep_their_distance(style: Style) -> None:
    for index in range(30):
        items = compose(12, index, style=style).objects
        for k, one in enumerate(items):
            for other in items[:k]:
                (a0, b0, a1, b1), (c0, d0, c1, d1) = one.box, other.box
                assert max(c0 - a1, a0 - c1, d0 - b1, b0 - d1) >= style.gap


def test_objects_have_their_colour_and_size() -> None:
    for index in range(30):
        stimulus = draw(compose(13, index))
        for item in stimulus.objects:
            painted = np.unique(pixels(stimulus)[item.mask], axis=0)
            assert len(painted) == 1
            named = np.asarray(shapes.COLOURS[item.colour]) / np.linalg.norm(shapes.COLOURS[item.colour])
            assert painted[0] @ named / np.linalg.norm(painted[0]) > 0.99
            low, high = shapes.SIDES[item.size]
            assert low <= item.box[2] - item.box[0] <= high


def test_background_ignores_the_objects() -> None:
    stimulus = draw(compose(5, 2))
    empty = draw(shapes.Scene(5, 2))
    outside = ~np.logical_or.reduce([item.mask for item in stimulus.objects])
    assert stimulus.objects
    assert (pixels(stimulus)[outside] == pixels(empty)[outside]).all()


def test_every_count_kind_and_size_occurs() -> None:
    drawn = shapes.dataset(300, seed=4)
    assert {len(stimulus.objects) for stimulus in drawn} == set(range(10))
    assert len({item.label for stimulus in drawn for item in stimulus.objects}) == len(shapes.COLOURS) * len(shapes.SHAPES)
    assert {item.size for stimulus in drawn for item in stimulus.objects} == set(shapes.SIDES)


@pytest.mark.parametrize("shape", shapes.SHAPES)
@pytest.mark.parametrize("side", [4, 8, 11, 24, 40])
def test_silhouettes_are_distinct_and_touch_their_box(shape: str, side: int) -> None:
    filled = shapes.silhouette(shape, side)
    assert all(edge.any() for edge in (filled[0], filled[-1], filled[:, 0], filled[:, -1]))
    if side >= 8:
        assert all((filled != shapes.silhouette(other, side)).mean() > 0.1 for other in shapes.SHAPES if other != shape)


@pytest.mark.parametrize(
    "wrong",
    [
        {"colours": ("pink",)},
        {"shapes": ()},
        {"sizes": ("huge",)},
        {"count": (3, 2)},
        {"count": (0, 10)},
        {"scale": 0.0},
        {"gap": -1},
        {"repeats": 1.5},
        {"width": 6},
    ],
    ids=str,
)
def test_bad_styles_are_refused(wrong: dict) -> None:
    with pytest.raises(StimulusError, match="expected"):
        Style(**wrong)


def test_bad_numbers_are_refused() -> None:
    with pytest.raises(StimulusError):
        compose(-1, 0)
    with pytest.raises(StimulusError):
        shapes.dataset(-1)
    with pytest.raises(StimulusError):
        shapes.silhouette("star", 9)
