"""Token sets obey the laws of sets, grow and shrink on the picture, and have fair controls."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from tests.layout.layout_examples import (
    any_set,
    any_visual_set,
    image_layouts,
    layouts,
    newline_layout,
    quick,
    square_layout,
    text_layout,
    tiled_layout,
    two_images_layout,
)

from sightlens.errors import LayoutError, SelectorError
from sightlens.layout import Layout, TokenSet

WORDS_OF_THE_PROMPT = [
    *["image", "global", "border", "padding_area", "separator", "special", "system", "question", "template", "pre_image"],
    *["last", "position[0]"],
]
seeds = st.integers(0, 10_000)


@quick
@given(st.data(), layouts)
def test_sets_obey_the_laws_of_sets(data: st.DataObject, layout: Layout):
    a, b, c = (any_set(data, layout) for _ in range(3))
    everything, nothing = layout.select("all"), layout.at([])
    assert a | b == b | a
    assert a & b == b & a
    assert (a | b) | c == a | (b | c)
    assert (a & b) & c == a & (b & c)
    assert a & (b | c) == (a & b) | (a & c)
    assert a | (b & c) == (a | b) & (a | c)
    assert ~(a | b) == ~a & ~b
    assert ~~a == a
    assert a | ~a == everything
    assert a & ~a == nothing
    assert a - b == a & ~b
    assert (a - b) & b == nothing
    assert a & b <= a <= a | b
    assert (a <= b) == (a | b == b)
    assert hash(a | b) == hash(b | a)


@quick
@given(st.data(), layouts, st.integers(0, 5))
def test_generated_positions_follow_the_algebra(data: st.DataObject, layout: Layout, more: int):
    a, b = (any_set(data, layout) for _ in range(2))
    length = layout.length + more
    assert np.array_equal((a | b).extended(length), a.extended(length) | b.extended(length))
    assert np.array_equal((a & b).extended(length), a.extended(length) & b.extended(length))
    assert np.array_equal((~a).extended(length)[layout.length :], ~a.extended(length)[layout.length :])
    assert np.array_equal(a.extended(length)[: layout.length], a.mask)


@pytest.mark.parametrize(
    "selector",
    ["all", "text", "answer", "post_image", "~image", "post_image | image", "~(image & border)"],
)
def test_words_that_hold_generated_positions(selector: str):
    assert square_layout().select(selector).extended(80)[-2:].tolist() == [True, True]


@pytest.mark.parametrize(
    "selector",
    [*WORDS_OF_THE_PROMPT, "post_image & ~answer", "text & image", "random(3, 0)", "~all"],
)
def test_words_that_hold_no_generated_positions(selector: str):
    assert square_layout().select(selector).extended(80)[-2:].tolist() == [False, False]


def test_extending_below_the_layout_is_refused():
    with pytest.raises(LayoutError, match="at least 3 positions"):
        text_layout().select("all").extended(2)


def test_sets_of_different_layouts_do_not_mix_but_objects_and_tokens_do_not_matter():
    layout = square_layout(4)
    bound = layout.with_object(layout.at([5]))
    assert (layout.select("image") & bound.select("object")).count == 1
    with pytest.raises(LayoutError, match="of one layout"):
        layout.select("image") | layout.pad(left=1).select("image")


def test_a_set_copies_its_mask_and_never_changes():
    layout = square_layout(4)
    mask = np.zeros(layout.length, dtype=bool)
    chosen = TokenSet(layout.structure, mask)
    mask[5] = True
    assert chosen.count == 0
    with pytest.raises(ValueError, match="read-only"):
        chosen.mask[5] = True
    with pytest.raises(ValueError, match="read-only"):
        layout.positions(0)[0, 0] = 1


@quick
@given(st.data(), image_layouts, st.integers(0, 3), st.sampled_from([4, 8]))
def test_growing_is_monotone_and_closing_loses_nothing(data: st.DataObject, layout: Layout, p: int, connectivity: int):
    a, b = (any_visual_set(data, layout) for _ in range(2))
    grown, shrunk = a.dilate(p, connectivity=connectivity), a.erode(p, connectivity=connectivity)
    assert shrunk <= a <= grown
    assert grown <= a.dilate(p + 1, connectivity=connectivity)
    assert grown <= (a | b).dilate(p, connectivity=connectivity)
    assert a <= grown.dilate(-p, connectivity=connectivity)
    assert shrunk.dilate(p, connectivity=connectivity) <= a
    assert a.dilate(p, connectivity=4) <= a.dilate(p, connectivity=8)
    assert a.dilate(p).dilate(1) == a.dilate(p + 1)
    assert a.erode(p) == a.dilate(-p)
    assert a.erode(p, border="background") <= a.erode(p, border="object")


@quick
@given(st.data(), image_layouts, st.integers(1, 3))
def test_a_ring_is_what_growing_adds(data: st.DataObject, layout: Layout, p: int):
    a = any_visual_set(data, layout)
    ring = a.ring(p)
    assert (ring & a).count == 0
    assert ring | a == a.dilate(p)


def shape_of(layout: Layout, chosen: TokenSet, sheet: int = 0) -> list[str]:
    """Draw a set on one sheet, a string per row."""
    return ["".join(".#"[int(flag)] for flag in row) for row in chosen.mask[layout.structure.sheets[sheet].positions]]


def test_dilation_and_erosion_by_hand():
    layout = square_layout(5)
    cells = layout.positions(0)
    one = layout.at([cells[0, 1]])
    assert shape_of(layout, one.dilate(1)) == ["###..", "###..", ".....", ".....", "....."]
    assert shape_of(layout, one.dilate(1, connectivity=4)) == ["###..", ".#...", ".....", ".....", "....."]
    corner = layout.at(cells[:3, :3].ravel())
    assert shape_of(layout, corner.erode(1)) == ["##...", "##...", ".....", ".....", "....."]
    assert shape_of(layout, corner.erode(1, border="background")) == [".....", ".#...", ".....", ".....", "....."]
    plus = layout.at([cells[2, 2], cells[1, 2], cells[3, 2], cells[2, 1], cells[2, 3]])
    assert shape_of(layout, plus.erode(1)) == ["....."] * 5
    assert shape_of(layout, plus.erode(1, connectivity=4)) == [".....", ".....", "..#..", ".....", "....."]


def test_dilation_crosses_tile_borders_but_not_views():
    layout = tiled_layout((2, 2), 2)
    corner = layout.at([layout.positions(0)[1, 1]])
    grown = corner.dilate(1)
    assert shape_of(layout, grown) == ["###.", "###.", "###.", "...."]
    assert set(grown.by_view()) == {0, 1, 2, 3}
    assert grown.views("global").count == 0


def test_dilation_stays_in_its_image():
    layout = two_images_layout()
    assert layout.select("image[0]").dilate(2) == layout.select("image[0]")


@pytest.mark.parametrize("change", ["dilate(1)", "erode(1)", "ring(1)"])
@pytest.mark.parametrize("word", ["text", "all", "special"])
def test_only_visual_tokens_have_a_shape(word: str, change: str):
    with pytest.raises(SelectorError, match="only visual tokens") as caught:
        square_layout().select(f"{word}.{change}")
    assert "& image" in caught.value.do


@pytest.mark.parametrize(
    ("selector", "shape"),
    [
        ("image", None), ("global", (4, 4)), ("tile[*]", (8, 12)), ("tile[0,1]", (4, 4)), ("tile[0,*]", (4, 12)),
        ("tile[*,1]", (8, 4)), ("tile[0,1] & row[3]", (1, 4)), ("global & column[0]", (4, 1)), ("global & cell[1:3,2]", (2, 1)),
        ("tile[*] & row[0]", None), ("tile[0,0] | tile[1,1]", None), ("tile[1,0] | tile[1,1]", (4, 8)), ("row[0]", None),
        ("text", None), ("global | last", None), ("random(16, 0)", None), ("global & random(112, 0)", None),
        ("(global & row[1:3]).dilate(1)", (4, 4)), ("padding_area", None), ("separator", None),
    ],
)  # fmt: skip
def test_grid_shapes_of_a_tiled_image(selector: str, shape: tuple[int, int] | None):
    assert tiled_layout().select(selector).grid_shape == shape


def test_grid_positions_come_in_raster_order():
    layout = tiled_layout((2, 2), 2)
    tiles = layout.select("tile[*]")
    assert tiles.positions.reshape(tiles.grid_shape)[0].tolist() == [4, 5, 8, 9]
    scattered = layout.select("image")
    assert scattered.positions.tolist() == sorted(scattered.positions.tolist())
    assert newline_layout().select("tile[0,1]").positions.tolist() == [8, 9, 10, 15, 16, 17]


def test_one_view_is_a_grid_and_an_object_never_is():
    layout = square_layout(4)
    assert layout.select("image").grid_shape == (4, 4)
    assert layout.select("image & ~padding_area").grid_shape == (4, 4)
    wide = square_layout(8)
    assert wide.select("image & ~padding_area").grid_shape == (6, 8)
    bound = layout.with_object(layout.at(layout.positions(0)[:2, :2].ravel()))
    assert bound.select("object").grid_shape is None
    assert bound.select("background & row[3]").grid_shape is None


def test_share_boxes_and_views():
    layout = tiled_layout((1, 2), 2, size=(20, 40))
    chosen = layout.select("tile[0,1] | global")
    assert chosen.share == pytest.approx(8 / 12)
    assert chosen.boxes[0].tolist() == [20, 0, 30, 10]
    assert chosen.boxes[-1].tolist() == [20, 10, 40, 20]
    assert {index: part.count for index, part in chosen.by_view().items()} == {1: 4, 2: 4}
    assert chosen.views("tile") == layout.select("tile[0,1]")
    tiles = layout.select("tile[*]")
    assert tiles.boxes[:, 0].tolist() == [0, 10, 20, 30] * 2
    with pytest.raises(SelectorError, match="only visual tokens"):
        _ = layout.select("text").boxes
    with pytest.raises(SelectorError, match="only text"):
        _ = text_layout().select("text").share


def test_require_names_the_selector_and_the_layout():
    layout = square_layout(4)
    layout = layout.with_object(layout.at([6]))
    empty = layout.select("object.erode(1)")
    with pytest.raises(SelectorError, match=r"keys with at least one token; got the selector `object\.erode\(1\)`") as caught:
        empty.require("keys")
    assert "30 positions with 16 visual tokens" in caught.value.got
    assert layout.select("object").require("keys").count == 1
    assert layout.select("answer").require("queries").generated


@quick
@given(st.data(), image_layouts, seeds)
def test_random_sets_keep_count_and_pool(data: st.DataObject, layout: Layout, seed: int):
    a = any_visual_set(data, layout)
    drawn = a.random_like(seed)
    assert drawn.count == a.count
    assert drawn <= layout.select("image")
    assert drawn == a.random_like(seed)
    spare = layout.select("image") - a
    if spare.count >= a.count:
        assert (a.random_like(seed, exclude=a) & a).count == 0
        assert a.random_like(seed, pool=spare) <= spare
    else:
        with pytest.raises(SelectorError, match=f"at most {spare.count} tokens"):
            a.random_like(seed, exclude=a)


def test_random_sets_are_uniform():
    layout = square_layout(4)
    three = layout.at(layout.positions(0)[0, :3])
    hits = sum(three.random_like(seed).mask.astype(int) for seed in range(600))[layout.structure.visual]
    assert np.abs(hits / 600 - 3 / 16).max() < 0.07


@quick
@given(st.data(), image_layouts, seeds)
def test_translated_sets_keep_shape_and_leave_the_original(data: st.DataObject, layout: Layout, seed: int):
    sheet = data.draw(st.sampled_from(layout.structure.sheets))
    rows, columns = sheet.positions.shape
    r, c = data.draw(st.integers(0, rows - 1)), data.draw(st.integers(0, columns - 1))
    a = layout.at(sheet.positions[r : r + 2, c : c + 2].ravel())
    assume(a.count <= 4)
    moved = moved_or_none(a, seed)
    assume(moved is not None)
    assert moved.count == a.count
    assert (moved & a).count == 0
    assert (moved & layout.select("padding_area")).count == 0
    before, after = (np.argwhere(chosen.mask[sheet.positions]) for chosen in (a, moved))
    assert len(np.unique(after - before, axis=0)) == 1


def moved_or_none(chosen: TokenSet, seed: int) -> TokenSet | None:
    """The shape elsewhere, or None when it fits nowhere."""
    try:
        return chosen.translate(seed)
    except SelectorError:
        return None


def test_every_place_of_a_translation_is_reached_and_none_is_padding():
    layout = square_layout(8)
    corner = layout.at(layout.positions(0)[1:3, :2].ravel())
    places = {tuple(corner.translate(seed).positions.tolist()) for seed in range(250)}
    rows, columns = 5, 7
    overlapping = 2 * 2
    assert len(places) == rows * columns - overlapping


def test_translation_is_the_same_in_every_view():
    layout = tiled_layout((2, 3), 4)
    mask = np.zeros((480, 640), dtype=bool)
    mask[10:100, 10:100] = True
    for seed in range(8):
        chosen = layout.object(mask)
        moved = chosen.translate(seed)
        assert {i: part.count for i, part in enumerate(split(chosen))} == {i: part.count for i, part in enumerate(split(moved))}
        tiles, thumbnail = (np.mean([part.boxes[:, :2].min(axis=0)], axis=0) for part in split(moved))
        assert np.allclose(tiles, thumbnail)


def split(chosen: TokenSet) -> tuple[TokenSet, TokenSet]:
    """The tiles' part and the thumbnail's part."""
    return chosen.views("tile"), chosen.views("global")


def test_translation_respects_a_pool_and_says_when_nothing_fits():
    layout = square_layout(4)
    half = layout.at(layout.positions(0)[:, :2].ravel())
    assert half.translate(0) == layout.select("column[2:4]")
    with pytest.raises(SelectorError, match="fits nowhere else"):
        half.translate(0, pool=layout.select("column[:3]"))
    with pytest.raises(SelectorError, match="a shape to move with at least one token"):
        layout.at([]).translate(0)
    with pytest.raises(SelectorError, match="only visual tokens"):
        layout.select("question").translate(0)


@pytest.mark.parametrize(("option", "value"), [("connectivity", 6), ("border", "mirror")])
def test_unknown_options_are_named(option: str, value: object, unchecked: None):
    with pytest.raises(SelectorError, match=f"{option} .* or "):
        square_layout(4).select("image").erode(1, **{option: value})


@pytest.mark.parametrize("steps", [100_000_000_000, 8])
def test_growing_and_shrinking_stop_where_nothing_changes(steps):
    layout = square_layout()
    assert layout.select(f"cell[0,0].dilate({steps})") == layout.select("image")
    corner = layout.select("cell[0,0]")
    assert corner.erode(steps).count == 0
    assert layout.select("image").erode(steps) == layout.select("image")
    assert layout.select("image").erode(steps, border="background").count == 0
