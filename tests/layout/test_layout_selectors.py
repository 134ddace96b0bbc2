"""Selectors read, print and find what they say, and mistakes are shown where they are."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.layout.layout_examples import LAYOUTS, newline_layout, quick, square_layout, text_layout, tiled_layout, two_images_layout

from sightlens.errors import LayoutError, SelectorError
from sightlens.layout import (
    WORDS,
    Both,
    Either,
    Layout,
    Not,
    Random,
    Register,
    Reshape,
    Selector,
    Span,
    Top,
    Translate,
    Word,
    build_layout,
    parse,
)

numbers = st.integers(-30, 30)
spans = st.builds(Span, st.none() | numbers, st.none() | numbers)
names = st.sampled_from(["newline", "start", "image", "dilate", "random"])
seeds = st.integers(0, 10**6)


def words_with_indices() -> st.SearchStrategy[Selector]:
    """Every word with every number of indices that it may have."""
    made = []
    for name, rule in WORDS.items():
        index = numbers | spans | names if name in ("separator", "special") else numbers | spans
        made += [st.tuples(*[index] * arity).map(lambda indices, name=name: Word(name, indices)) for arity in rule.arities]
    return st.one_of(made)


def larger(inner: st.SearchStrategy[Selector]) -> st.SearchStrategy[Selector]:
    """Every way to build a selector from others."""
    return st.one_of(
        st.builds(Either, inner, inner),
        st.builds(Both, inner, inner),
        st.builds(Not, inner),
        st.builds(Reshape, inner, st.sampled_from(["dilate", "erode"]), st.integers(-3, 3)),
        st.builds(Reshape, inner, st.just("ring"), st.integers(1, 3)),
        st.builds(Random, st.integers(0, 99) | st.floats(1e-9, 0.999) | inner, seeds, st.none() | inner),
        st.builds(Translate, inner, seeds, st.none() | inner),
        st.builds(Register, st.floats(allow_nan=False, allow_infinity=False)),
        st.builds(Top, st.integers(0, 99) | st.floats(1e-9, 0.999) | inner),
    )


@pytest.mark.filterwarnings("ignore:Do not use the `random` module")  # the suite's type checker samples items at random
@quick
@given(st.recursive(words_with_indices(), larger, max_leaves=12))
def test_selectors_print_and_read_back(selector: Selector):
    assert parse(str(selector)) == selector
    assert str(parse(str(selector))) == str(selector)


@pytest.mark.parametrize(
    ("text", "canonical"),
    [
        (" image|row[ 3 ]", "image | row[3]"),
        ("a_b" and "tile", "tile[*]"),
        ("tile[*]", "tile[*]"),
        ("visual", "image"),
        ("(image | text) & last", "(image | text) & last"),
        ("image | (text & last)", "image | text & last"),
        ("~(image & row[:]).dilate(1)", "~(image & row[*]).dilate(1)"),
        ("(~image).dilate(1)", "(~image).dilate(1)"),
        ("image & (row[1] & row[2])", "image & (row[1] & row[2])"),
        ("random( 0.08,3 , image&~padding_area)", "random(0.08, 3, image & ~padding_area)"),
        ("register(2)", "register(2.0)"),
        ("top( object )|top(12)", "top(object) | top(12)"),
        ("translate(object.dilate(1),0)", "translate(object.dilate(1), 0)"),
        ("row[1:-1] | row[:2] | row[2:]", "row[1:-1] | row[:2] | row[2:]"),
    ],
)
def test_canonical_text(text: str, canonical: str):
    assert str(parse(text)) == canonical


def test_signs_in_python_build_the_same_selector():
    assert ~parse("image") & parse("last") | parse("text") == parse("~image & last | text")


@pytest.mark.parametrize(
    ("text", "column", "message"),
    [
        ("imge", 0, "Did you mean `image`"),
        ("image | texd", 8, "Did you mean `text`"),
        ("image |", 7, "a selector word; got `the end`"),
        ("", 0, "a selector word"),
        ("image text", 6, "the end of the selector"),
        ("(image", 6, r"`\)`"),
        ("image $", 6, "Remove this character"),
        ("object.grow(1)", 7, "dilate, erode, ring"),
        ("object.dilate(x)", 14, "whole number"),
        ("object.ring(0)", 7, "at least one cell"),
        ("row", 0, "1 index after `row`"),
        ("image & tile[1]", 8, "0 or 2 indices"),
        ("border[1]", 0, "0 indices"),
        ("row[start]", 0, "names only as in"),
        ("row[|]", 4, "a number, a slice"),
        ("random(3)", 8, "`,`"),
        ("random(1.5, 0)", 0, "a share between 0 and 1"),
        ("random(3, -1)", 0, "a seed of 0 or more"),
        ("register(object)", 9, "a number"),
        ("top(3, 0)", 5, r"`\)`"),
        ("top(1.5)", 0, "a share between 0 and 1"),
        ("translate(3, 0)", 10, "a selector word"),
    ],
)
def test_mistakes_are_shown_under_a_caret(text: str, column: int, message: str):
    with pytest.raises(SelectorError, match=message) as caught:
        parse(text)
    shown, caret = caught.value.do.split("\n")[-2:]
    assert shown == f"  {text}"
    assert caret == f"  {' ' * column}^"


def test_an_unknown_word_lists_the_known_ones():
    with pytest.raises(SelectorError) as caught:
        parse("nonsense")
    assert all(name in caught.value.expected for name in [*WORDS, "random", "translate", "register", "top"])
    with pytest.raises(SelectorError, match="Did you mean `row`"):
        Word("rows", (1,))


def positions(layout: Layout, selector: str) -> list[int]:
    """The members in ascending order."""
    return np.flatnonzero(layout.select(selector).mask).tolist()


def test_words_of_a_square_image():
    layout = square_layout(4, size=(40, 80))
    grid = layout.positions(0)
    assert positions(layout, "image") == list(range(5, 21))
    assert positions(layout, "row[1]") == grid[1].tolist()
    assert positions(layout, "column[-1]") == grid[:, 3].tolist()
    assert positions(layout, "cell[3,2]") == [grid[3, 2]]
    assert positions(layout, "cell[*,2]") == grid[:, 2].tolist()
    assert positions(layout, "row[1:3]") == grid[1:3].ravel().tolist()
    assert positions(layout, "border") == sorted(set(grid.ravel().tolist()) - set(grid[1:3, 1:3].ravel().tolist()))
    assert positions(layout, "padding_area") == [*grid[0].tolist(), *grid[3].tolist()]
    assert positions(layout, "special") == positions(layout, "special[bos]") == positions(layout, "position[0]") == [0]
    assert positions(layout, "pre_image") == [0, 1, 2, 3, 4]
    assert positions(layout, "question") == [22, 23, 24]
    assert positions(layout, "post_image") == list(range(21, 30))
    assert positions(layout, "template") == [1, 2, 3, 4, 21, 25, 26, 27, 28, 29]
    assert positions(layout, "text") == [1, 2, 3, 4, *range(21, 30)]
    assert positions(layout, "last") == positions(layout, "position[-1]") == [29]
    assert positions(layout, "position[1:3]") == [1, 2]
    assert positions(layout, "global") == positions(layout, "image")
    assert positions(layout, "tile[*]") == []
    assert positions(layout, "separator") == positions(layout, "answer") == positions(layout, "system") == []


def test_words_of_a_tiled_image():
    layout = tiled_layout((2, 3), 4)
    assert positions(layout, "tile[0,1]") == layout.positions(1).ravel().tolist() == positions(layout, "tile[-2,-2]")
    assert positions(layout, "global") == layout.positions(6).ravel().tolist()
    assert positions(layout, "tile[1,*]") == sorted(np.concatenate([layout.positions(k).ravel() for k in (3, 4, 5)]))
    assert layout.select("row[3]").count == 7 * 4
    assert positions(layout, "tile[0,1] & row[3]") == layout.positions(1)[3].tolist()
    assert positions(layout, "separator") == [3, 4 + 7 * 16]
    assert positions(layout, "separator[end]") == positions(layout, "separator[1]") == positions(layout, "separator[-1]")
    assert positions(layout, "system") == [0, 1, 2] == positions(layout, "pre_image")
    assert positions(layout, "post_image")[0] == 4 + 7 * 16 + 1
    border = layout.select("border")
    assert border.views("tile").count == 2 * (8 + 12) - 4
    assert border.views("global").count == 12


def test_words_of_other_arrangements():
    layout = newline_layout()
    assert positions(layout, "separator[newline]") == [11, 18]
    assert positions(layout, "separator[1]") == [18]
    assert positions(layout, "post_image") == [19, 20]
    images = two_images_layout()
    assert positions(images, "image[1]") == list(range(8, 14)) == positions(images, "image[-1]")
    assert positions(images, "row[2]") == [12, 13]
    assert positions(images, "post_image") == [14]
    assert positions(images, "pre_image") == [0]
    text = text_layout()
    assert positions(text, "image") == positions(text, "border") == []
    assert positions(text, "all") == [0, 1, 2]
    assert positions(text, "~special") == [1, 2]


@pytest.mark.parametrize(
    ("layout", "selector", "message"),
    [
        ("square", "row[5]", r"a row of the views global \(5×5\); got `row\[5\]`"),
        ("square", "column[-6]", "a column of the views"),
        ("square", "cell[0,5]", r"`cell\[0,5\]`"),
        ("square", "tile[0,0]", "a tile of the views global"),
        ("tiled", "tile[2,0]", r"tile\[1,2\] \(2×2\)"),
        ("two images", "image[2]", "one of 2 images"),
        ("tiled", "separator[2]", r"one of 2 separator segments \(start, end\)"),
        ("tiled", "separator[newline]", r"\(start, end\)"),
        ("square", "special[eos]", r"one of 1 special segments \(bos\)"),
        ("text", "position[3]", "one of 3 positions"),
        ("text", "row[0]", "an image for `row`"),
        ("text", "post_image", "a layout with an image"),
        ("text", "pre_image", "a layout with an image"),
        ("square", "random(26, 0)", "at most 25 tokens"),
        ("square", "register(2.0)", "one norm for each of 25 visual tokens"),
    ],
)
def test_what_a_layout_lacks_is_named(layout: str, selector: str, message: str):
    with pytest.raises(SelectorError, match=message) as caught:
        LAYOUTS[layout].select(selector)
    assert caught.value.do


@pytest.mark.parametrize("selector", ["row[1:3]", "tile[*]", "image[*]", "separator[*]", "cell[5:,*]", "answer", "row[99:]"])
def test_slices_may_be_empty(selector: str):
    assert text_layout().select(selector).count == 0


@quick
@given(seed=seeds)
def test_controls_in_selectors(seed: int):
    layout = tiled_layout((2, 2), 4)
    layout = layout.with_object(layout.at(layout.positions(0)[:2, :2].ravel()))
    target = layout.select("object")
    assert layout.select(f"random(7, {seed})").count == 7
    assert layout.select(f"random(object, {seed})") == target.random_like(seed)
    assert layout.select(f"random(0.25, {seed}, background)").count == 19
    assert (layout.select(f"random(object, {seed}, background)") & target).count == 0
    assert layout.select(f"translate(object, {seed})") == target.translate(seed)
    near = layout.select("background & tile[0,0]")
    assert layout.select(f"translate(object, {seed}, background & tile[0,0])") <= near


def test_register_uses_the_sample_deviation_of_each_image():
    layout = two_images_layout()
    norms = np.array([1, 1, 1, 1, 1, 9, 2, 2, 2, 2, 2, 2], dtype=float)
    assert positions_with(layout, "register(2.0)", norms) == [6]
    bound = (9 - norms[:6].mean()) / norms[:6].std(ddof=1)
    assert positions_with(layout, f"register({bound - 1e-9})", norms) == [6]
    assert positions_with(layout, f"register({bound + 1e-9})", norms) == []
    for wrong in (np.ones(3), np.full(12, np.nan)):
        with pytest.raises(LayoutError, match="each of 12 visual tokens"):
            layout.with_norms(wrong)


def positions_with(layout: Layout, selector: str, norms: np.ndarray) -> list[int]:
    """The members that given norms select."""
    return layout.with_norms(norms).select(selector).positions.tolist()


def test_top_takes_the_highest_scores_in_whatever_batch_the_example_lies():
    layout = LAYOUTS["square"]
    scores = np.zeros(25)
    scores[[3, 20, 7]] = (1.0, 2.0, 1.0)
    places = layout.visual_tokens()["position"]
    scored = layout.with_object(layout.at(places[:2])).with_scores(scores)
    for selector, chosen in (("top(1)", [20]), ("top(object)", [3, 20]), ("top(3)", [3, 7, 20]), ("top(0.04)", [20]), ("top(0)", [])):
        assert positions(scored, selector) == places[chosen].tolist()
        assert positions(scored.pad(left=3, right=1), selector) == (places[chosen] + 3).tolist()
        assert positions(scored.pad(left=3).unpad().with_answer(["a"]), selector) == places[chosen].tolist()
        assert positions(Layout.from_dict(scored.to_dict()), selector) == places[chosen].tolist()
    assert positions(scored, "top(1).dilate(1) & image") == positions(scored, f"position[{places[20]}].dilate(1)")
    assert (scored.hash, scored) == (layout.with_object(layout.at(places[:2])).hash, layout.with_object(layout.at(places[:2])))
    with pytest.raises(SelectorError, match="at most 25"):
        scored.select("top(26)")
    with pytest.raises(SelectorError, match="one score for each of 25"):
        layout.select("top(2)")
    with pytest.raises(LayoutError, match="25 visual tokens"):
        layout.with_scores(scores[1:])


def test_a_set_is_named_by_its_selector():
    assert square_layout().select("image&row[1]").name == "image & row[1]"


def test_last_of_a_single_token():
    assert build_layout(["a"]).select("last").positions.tolist() == [0]


@pytest.mark.parametrize(
    "text",
    [
        "~" * 3000 + "image",
        "(" * 3000 + "image" + ")" * 3000,
        " | ".join(["image"] * 3000),
        "image" + ".dilate(1)" * 2000,
        "translate(" * 300 + "image" + ", 0)" * 300,
    ],
    ids=["not", "parentheses", "terms", "methods", "functions"],
)
def test_selectors_too_deep_to_follow_are_refused(text):
    with pytest.raises(SelectorError, match="inside one another"):
        square_layout().select(text)


@pytest.mark.parametrize(
    "text", ["~" * 98 + "image", "(" * 39 + "image" + ")" * 39, " | ".join(["image"] * 100), "image" + ".dilate(1)" * 99]
)
def test_selectors_of_the_greatest_depth_are_found_and_print(text):
    layout = square_layout()
    assert layout.select(text) == layout.select("image")
    assert parse(str(parse(text))) == parse(text)


@pytest.mark.parametrize("selector", [None, 3, ["image"]])
@pytest.mark.usefixtures("unchecked")
def test_what_is_no_selector_is_refused(selector):
    with pytest.raises(SelectorError, match="a selector, or its text"):
        square_layout().select(selector)
