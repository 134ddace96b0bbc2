"""A mask of the original image becomes exactly the tokens whose cell it touches."""

from __future__ import annotations

import itertools
import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.layout.layout_examples import quick, square_layout, text_layout, tiled_layout, two_images_layout

from sightlens.errors import MaskError, SelectorError
from sightlens.layout import Layout, View, build_layout


def single(grid: tuple[int, int], box: tuple[int, int, int, int], size: tuple[int, int]) -> Layout:
    """A layout of one view and nothing else."""
    count = grid[0] * grid[1]
    return build_layout(["i"] * count, visual=range(count), views=[View("global", 0, grid, box)], image_sizes=[size])


def brute_force(layout: Layout, mask: np.ndarray, min_overlap: int) -> list[int]:
    """Compare every pixel square with every cell in exact fractions."""
    (x0, y0, x1, y1), (rows, columns) = (Fraction(edge) for edge in layout.views[0].box), layout.views[0].grid
    found = []
    for row, column in itertools.product(range(rows), range(columns)):
        left, right = (x0 + (x1 - x0) * Fraction(c, columns) for c in (column, column + 1))
        top, bottom = (y0 + (y1 - y0) * Fraction(r, rows) for r in (row, row + 1))
        met = sum(y < bottom and y + 1 > top and x < right and x + 1 > left for y, x in np.argwhere(mask).tolist())
        found += [row * columns + column] if met >= min_overlap else []
    return found


@quick
@given(st.data(), st.integers(1, 9), st.integers(1, 9), st.integers(1, 4))
def test_object_tokens_match_a_pixel_by_pixel_check(data: st.DataObject, height: int, width: int, min_overlap: int):
    grid = data.draw(st.tuples(st.integers(1, 7), st.integers(1, 7)))
    x0, y0 = data.draw(st.integers(-4, width - 1)), data.draw(st.integers(-4, height - 1))
    x1, y1 = data.draw(st.integers(x0 + 1, width + 4)), data.draw(st.integers(y0 + 1, height + 4))
    flags = data.draw(st.lists(st.booleans(), min_size=height * width, max_size=height * width).filter(any))
    mask = np.array(flags).reshape(height, width)
    layout = single(grid, (x0, y0, x1, y1), (height, width))
    assert layout.object(mask, min_overlap=min_overlap).positions.tolist() == brute_force(layout, mask, min_overlap)


def test_cells_that_only_border_on_the_image_are_padding():
    layout = single((4, 4), (-10, -10, 30, 30), (20, 20))
    inside = {5, 6, 9, 10}
    assert layout.select("padding_area").positions.tolist() == [cell for cell in range(16) if cell not in inside]


@quick
@given(st.integers(1, 12), st.integers(1, 12), st.integers(1, 3), st.integers(1, 3))
def test_one_pixel_is_found_in_every_view(height: int, width: int, rows: int, columns: int):
    layout = tiled_layout((rows, columns), 2, size=(height, width))
    for y, x in {(0, 0), (height - 1, width - 1), (height // 2, width // 3)}:
        mask = np.zeros((height, width), dtype=bool)
        mask[y, x] = True
        boxes = {kind: layout.object(mask).views(kind).boxes for kind in ("global", "tile")}
        for found in boxes.values():
            assert len(found) >= 1
            assert (found[:, 0] < x + 1).all()
            assert (found[:, 2] > x).all()
            assert (found[:, 1] < y + 1).all()
            assert (found[:, 3] > y).all()


def test_thirds_of_an_image_do_not_leak_into_neighbours():
    layout = tiled_layout((1, 3), 16, size=(448, 640))
    mask = np.zeros((448, 640), dtype=bool)
    mask[:, 40] = True
    columns = {int(x0) for x0, _, _, _ in layout.object(mask).views("tile").boxes}
    assert columns == {40}
    assert math.isclose(layout.views[0].cell_size[1], 40 / 3)


def test_the_worked_example_of_a_padded_square():
    layout = square_layout(8)
    mask = np.zeros((480, 640), dtype=bool)
    mask[0:81, 80:160] = True
    assert layout.object(mask).positions.tolist() == layout.positions(0)[1:3, 1].tolist()
    assert layout.object(mask, min_overlap=81).positions.tolist() == [layout.positions(0)[1, 1]]
    assert layout.object(mask, 1) == layout.object(mask).dilate(1)
    assert layout.object(mask, -1).count == 0


def test_an_object_outside_the_crop_has_no_token():
    layout = single((2, 2), (10, 0, 20, 10), (10, 30))
    mask = np.zeros((10, 30), dtype=bool)
    mask[:, :10] = True
    assert layout.object(mask).count == 0
    assert layout.with_object(mask).select("object").count == 0


def test_padding_area_is_what_shows_no_image():
    layout = square_layout(8)
    assert layout.select("padding_area") == layout.select("row[0] | row[-1]")
    assert tiled_layout().select("padding_area").count == 0
    assert square_layout(8, size=(480, 510)).select("padding_area").count == 0


def test_objects_are_bound_in_order_and_per_image():
    layout = two_images_layout()
    first, second = np.zeros((20, 30), dtype=bool), np.zeros((30, 20), dtype=bool)
    first[0, 0], second[29, 19] = True, True
    bound = layout.with_object(first).with_object(second, image=1)
    assert bound.select("object[0]").positions.tolist() == [1]
    assert bound.select("object[-1]").positions.tolist() == [13]
    assert bound.select("object").count == 2
    assert bound.select("background").count == 10
    assert bound.select("object | background") == bound.select("image")
    assert bound.select("object[0:1]") == bound.select("object[0]")
    with pytest.raises(SelectorError, match="one of 2 bound objects"):
        bound.select("object[2]")


@pytest.mark.parametrize("word", ["object", "background", "object[0]", "object.dilate(1)", "random(object, 0)"])
def test_an_unbound_object_says_how_to_bind(word: str):
    with pytest.raises(SelectorError, match="without objects") as caught:
        square_layout(4).select(word)
    assert "with_object(mask)" in caught.value.do


@pytest.mark.parametrize(
    ("mask", "options", "message"),
    [
        (np.zeros((480, 640), dtype=np.uint8), {}, "numpy array of bool; got an array of uint8"),
        (np.ones((640, 480), dtype=bool), {}, r"\(480, 640\); got the shape \(640, 480\)"),
        (np.ones((480, 640, 1), dtype=bool), {}, "got the shape"),
        (np.zeros((480, 640), dtype=bool), {}, "all False"),
        (np.ones((480, 640), dtype=bool), {"image": 1}, "one of 1 images"),
        (np.ones((480, 640), dtype=bool), {"min_overlap": 0}, "at least one pixel"),
    ],
)
def test_bad_masks_are_refused(mask: np.ndarray, options: dict, message: str):
    with pytest.raises(MaskError, match=message):
        square_layout(4).object(mask, **options)


def test_text_has_no_object():
    with pytest.raises(MaskError, match="one of 0 images"):
        text_layout().object(np.ones((1, 1), dtype=bool))
