"""Segments partition the positions; views tell where each visual token lies; layouts survive JSON and padding."""

from __future__ import annotations

import json
import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.layout.layout_examples import (
    LAYOUTS,
    newline_layout,
    quick,
    square_layout,
    text_layout,
    tiled_layout,
    tiled_views,
    two_images_layout,
)

from sightlens.errors import LayoutError
from sightlens.layout import Layout, Padding, Separator, Special, Structure, Text, View, Visual, build_layout

every_layout = pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)


@every_layout
def test_segments_partition_all_positions(layout: Layout):
    covered = [place for segment in layout.segments for place in range(segment.start, segment.stop)]
    assert covered == list(range(layout.length)) == list(range(len(layout.tokens)))


@every_layout
def test_every_visual_position_is_one_cell(layout: Layout):
    cells = [place for grid in layout.grid_positions for place in grid.ravel().tolist()]
    assert sorted(cells) == np.flatnonzero(layout.structure.visual).tolist() == layout.visual_tokens()["position"].tolist()


@every_layout
def test_layout_survives_json_and_pickle(layout: Layout):
    bound = layout.with_object(layout.at(np.flatnonzero(layout.structure.visual)[:2]))
    again = Layout.from_dict(json.loads(json.dumps(bound.to_dict())))
    assert again == bound == pickle.loads(pickle.dumps(bound))
    assert again.hash == bound.hash
    assert hash(again) == hash(bound)


def test_hash_sees_every_part():
    base = square_layout(4)
    others = [
        square_layout(4, size=(480, 641)),
        base.pad(left=1),
        base.with_object(base.at([5])),
        base.with_answer(["x"]),
        Layout(base.structure, (*base.tokens[:-1], "other")),
        Layout(
            Structure(
                base.segments,
                tuple(View(v.kind, v.image, v.grid, v.box, merge=2) for v in base.views),
                base.image_sizes,
            ),
            base.tokens,
        ),
    ]
    assert len({layout.hash for layout in [base, *others]}) == 1 + len(others)
    assert square_layout(4).hash == base.hash


def test_a_structures_digest_is_the_same_in_every_process():
    structure = Structure((Text(0, 2, "question"), Visual(2, 6, 0)), (View("global", 0, (2, 2), (0, 0, 4, 4)),), ((4, 4),))
    assert structure.digest == "d5e5055bbc44b1a9"
    assert structure.pad(left=1).digest != structure.digest


@pytest.mark.parametrize(("left", "right"), [(0, 0), (3, 0), (2, 1)])
def test_unpad_undoes_padding(left: int, right: int):
    layout = square_layout(4)
    layout = layout.with_object(layout.at([5, 6]))
    padded = layout.pad(left=left, right=right)
    assert padded.unpad() == layout
    assert padded.unpad().hash == layout.hash
    with pytest.raises(LayoutError, match="at least one position"):
        Structure((Padding(0, 3),)).unpad()


def test_hash_ignores_whether_a_box_was_written_with_ints():
    boxes = [(0, 0, 4, 4), (0.0, 0.0, 4.0, 4.0)]
    built = [build_layout(["i"] * 4, visual=range(4), views=[View("global", 0, (2, 2), box)], image_sizes=[(4, 4)]) for box in boxes]
    assert built[0].hash == built[1].hash


@pytest.mark.parametrize(
    ("layout", "text"),
    [
        (square_layout(), "t1 text[4] image(8×8) text[9]"),
        (
            square_layout().with_answer(["a", "b"]).pad(left=2, right=1),
            "pad[2] t1 text[4] image(8×8) text[9] answer[2] pad[1]",
        ),
        (tiled_layout(), "text[3] <img> tile[0,0](4×4) … tile[1,2](4×4) global(4×4) </img> text[9]"),
        (tiled_layout((1, 2)), "text[3] <img> tile[0,0](4×4) tile[0,1](4×4) global(4×4) </img> text[9]"),
        (newline_layout(), "<1> global(2×2) tile[0,0](2×3) tile[0,1](2×3) <7> text[2]"),
        (two_images_layout(), "text[1] image[0](2×3) text[1] image[1](3×2) text[1]"),
        (text_layout(), "<s> text[2]"),
    ],
)
def test_repr_is_one_readable_line(layout: Layout, text: str):
    assert repr(layout) == text


def test_rows_that_run_across_tiles_are_found():
    layout = newline_layout()
    assert layout.positions(1).tolist() == [[5, 6, 7], [12, 13, 14]]
    assert layout.positions(2).tolist() == [[8, 9, 10], [15, 16, 17]]
    tiles = next(sheet for sheet in layout.structure.sheets if sheet.kind == "tile")
    assert tiles.positions.tolist() == [[5, 6, 7, 8, 9, 10], [12, 13, 14, 15, 16, 17]]


def test_visual_table_has_the_hand_worked_rows():
    table = tiled_layout((2, 3), 4, size=(480, 600)).visual_tokens()
    assert len(table) == 7 * 16
    row = table[16 * 4 + 6]
    assert row["position"] == 4 + 16 * 4 + 6
    assert (row["image"], row["view"], row["row"], row["column"], row["patches"]) == (0, 4, 1, 2, 4)
    assert row["box"].tolist() == [300, 300, 350, 360]


def test_cell_sizes_are_height_first():
    layout = tiled_layout((2, 3), 4, size=(480, 600))
    assert layout.views[0].cell_size == (60, 50)
    assert newline_layout().views[1].cell_size == (10, 20 / 3)
    assert [sheet.cell_size for sheet in layout.structure.sheets] == [(60, 50), (120, 150)]


def test_padded_square_cells_reach_outside_the_image():
    view = square_layout(8).views[0]
    assert view.box == (0, -80, 640, 560)
    assert view.cell_box(0, 0) == (0, -80, 80, 0)
    assert view.cell_box(7, 7) == (560, 480, 640, 560)
    assert view.cell_size == (80, 80)


@quick
@given(
    st.tuples(st.integers(1, 9), st.integers(1, 9)),
    st.tuples(st.integers(-9, 9), st.integers(-9, 9), st.integers(1, 99), st.integers(1, 99)),
)
def test_cells_tile_their_view(grid: tuple[int, int], place: tuple[int, int, int, int]):
    x, y, width, height = place
    view = View("global", 0, grid, (x, y, x + width, y + height))
    boxes = view.cell_boxes()
    assert boxes.shape == (*grid, 4)
    assert np.array_equal(boxes[:, 1:, 0], boxes[:, :-1, 2])
    assert np.array_equal(boxes[1:, :, 1], boxes[:-1, :, 3])
    assert (*boxes[0, 0, :2], *boxes[-1, -1, 2:]) == view.box
    area = (boxes[..., 2] - boxes[..., 0]) * (boxes[..., 3] - boxes[..., 1])
    assert np.allclose(area, width * height / view.count)


@pytest.mark.parametrize(("width", "tiles", "tile", "edge", "pixel"), [(400, 3, 0, 15, 125), (328, 5, 1, 14, 123), (656, 5, 1, 14, 246)])
def test_cell_edges_snap_to_whole_pixels(width: int, tiles: int, tile: int, edge: int, pixel: int):
    view = View("tile", 0, (1, 16), (tile * width / tiles, 0, (tile + 1) * width / tiles, 1), tile=(0, tile))
    assert view.edges()[1][edge] == pixel


@quick
@given(st.integers(0, 5), st.integers(0, 5))
def test_padding_shifts_everything(left: int, right: int):
    layout = tiled_layout((1, 2), 2)
    layout = layout.with_object(layout.at([5, 6]))
    padded = layout.pad(left=left, right=right)
    assert padded.length == layout.length + left + right
    for before, after in zip(layout.grid_positions, padded.grid_positions, strict=True):
        assert np.array_equal(before + left, after)
    for selector in [
        "all",
        "image",
        "object",
        "last",
        "position[3]",
        "position[-1]",
        "post_image",
        "separator",
        "~image",
    ]:
        assert np.array_equal(layout.select(selector).positions + left, padded.select(selector).positions), selector
    assert padded.pad(left=1).segments[0] == Padding(0, left + 1)


def test_padding_belongs_to_no_set():
    layout = square_layout(4).pad(left=3, right=2)
    assert layout.select("all").count == layout.length - 5
    assert layout.select("~image").positions.min() == 3
    with pytest.raises(LayoutError, match="without padding"):
        layout.at([0])


def test_answer_follows_the_prompt():
    layout = square_layout(4).with_answer(["yes", "!"]).pad(left=1, right=2)
    answer, last = layout.select("answer"), layout.select("last")
    assert answer.positions.tolist() == [layout.prompt_stop, layout.prompt_stop + 1]
    assert last.positions.tolist() == [layout.prompt_stop - 1]
    assert answer <= layout.select("post_image")
    assert answer <= layout.select("text")
    with pytest.raises(LayoutError, match="Append the answer before padding"):
        layout.with_answer(["more"])


def test_neighbouring_cells_are_one_segment():
    assert [segment for segment in square_layout(3).segments if isinstance(segment, Visual)] == [Visual(5, 14, 0)]
    assert [segment for segment in newline_layout().segments if isinstance(segment, Visual)] == [
        Visual(1, 5, 0),
        Visual(5, 8, 1, 0),
        Visual(8, 11, 2, 0),
        Visual(12, 15, 1, 3),
        Visual(15, 18, 2, 3),
    ]


def test_text_spans_leave_special_tokens_special():
    layout = build_layout(
        ["<s>", "sys", "<e>", "tem", "q", "q"],
        known=[Special(2, 3, "eos"), Text(0, 3, "system"), Text(4, 6, "question")],
    )
    assert layout.segments == (Text(0, 2, "system"), Special(2, 3, "eos"), Text(3, 4), Text(4, 6, "question"))


VIEW = View("global", 0, (2, 2), (0, 0, 4, 4))
TILE = View("tile", 0, (2, 2), (0, 0, 4, 4), tile=(0, 1))
REFUSED = {
    "gap": (lambda: Structure((Text(0, 2), Text(3, 4))), "starts at 2"),
    "overlap": (lambda: Structure((Text(0, 2), Text(1, 4))), "starts at 2"),
    "empty": (lambda: Structure(()), "at least one position"),
    "inner padding": (lambda: Structure((Text(0, 1), Padding(1, 2), Text(2, 3))), "padding only at the two ends"),
    "missing cells": (lambda: Structure((Visual(0, 3, 0),), (VIEW,), ((4, 4),)), "each of the 4 cells"),
    "double cells": (
        lambda: Structure((Visual(0, 4, 0), Visual(4, 5, 0)), (VIEW,), ((4, 4),)),
        "5 visual positions for 4",
    ),
    "unknown view": (lambda: Structure((Visual(0, 4, 1),), (VIEW,), ((4, 4),)), "one of 1 views"),
    "no size": (lambda: Structure((Visual(0, 4, 0),), (VIEW,)), "one size per image"),
    "no view": (lambda: Structure((Text(0, 1),), (), ((4, 4),)), "at least one view"),
    "lone tile": (lambda: Structure((Visual(0, 4, 0),), (TILE,), ((4, 4),)), "1 × 2 different tiles"),
    "tokens": (lambda: Layout(Structure((Text(0, 2),)), ("a",)), "one token for each of 2"),
    "tile index": (lambda: View("global", 0, (1, 1), (0, 0, 1, 1), tile=(0, 0)), "to tiles only"),
    "no tile index": (lambda: View("tile", 0, (1, 1), (0, 0, 1, 1)), "to tiles only"),
    "no rows": (lambda: View("global", 0, (0, 1), (0, 0, 1, 1)), "at least one row"),
    "flat box": (lambda: View("global", 0, (1, 1), (0, 0, 0, 1)), "positive area"),
    "cell": (lambda: VIEW.cell_box(2, 0), r"inside the grid \(2, 2\)"),
    "count": (
        lambda: build_layout(["i"] * 3, visual=range(3), views=[VIEW], image_sizes=[(4, 4)]),
        r"expected 4 visual positions \(global 2×2\); got 3 visual positions",
    ),
    "claimed twice": (
        lambda: build_layout(["a"], known=[Special(0, 1, "bos"), Separator(0, 1, "end")]),
        "one segment per position",
    ),
    "outside": (lambda: build_layout(["a"], known=[Special(1, 2, "bos")]), "inside 1 positions"),
    "text outside": (lambda: build_layout(["a"], known=[Text(0, 2)]), "inside 1 positions"),
    "position": (lambda: text_layout().at([3]), "positions from 0 to 2"),
    "view index": (lambda: text_layout().positions(0), "one of 0 views"),
    "negative pad": (lambda: text_layout().pad(left=-1), "0 or more"),
    "json": (lambda: Layout.from_dict({"segments": [{"is": "song"}], "views": [], "image_sizes": []}), "written by"),
}


@pytest.mark.parametrize(("make", "message"), REFUSED.values(), ids=REFUSED)
def test_contradictions_are_refused(make, message: str):
    with pytest.raises(LayoutError, match=message) as caught:
        make()
    assert all([caught.value.expected, caught.value.got, caught.value.do])


def test_an_unknown_role_is_refused_without_type_checks_too(unchecked: None):
    with pytest.raises(LayoutError, match="system, context, question, answer, template"):
        Text(0, 1, "user")


def test_unequal_tiles_stitch_when_they_fit_and_are_refused_when_not():
    grids = {(0, 0): (2, 3), (0, 1): (2, 1), (1, 0): (1, 3), (1, 1): (1, 1)}
    views = [View("tile", 0, grid, (c * 3, r * 2, c * 3 + grid[1], r * 2 + grid[0]), tile=(r, c)) for (r, c), grid in grids.items()]
    layout = build_layout(["i"] * 12, visual=range(12), views=views, image_sizes=[(3, 4)])
    assert layout.structure.sheets[0].positions.shape == (3, 4)
    clash = [*views[:3], View("tile", 0, (2, 1), (3, 2, 4, 3), tile=(1, 1))]
    with pytest.raises(LayoutError, match="fit side by side"):
        build_layout(["i"] * 13, visual=range(13), views=clash, image_sizes=[(3, 4)])


def test_several_tiled_images_have_their_own_sheets():
    views = [*tiled_views((1, 2), 2, size=(10, 20)), *tiled_views((2, 1), 2, size=(20, 10), image=1)]
    layout = build_layout(["i"] * 24, visual=range(24), views=views, image_sizes=[(10, 20), (20, 10)])
    shapes = [(sheet.image, sheet.kind, sheet.positions.shape) for sheet in layout.structure.sheets]
    assert shapes == [(0, "tile", (2, 4)), (0, "global", (2, 2)), (1, "tile", (4, 2)), (1, "global", (2, 2))]
