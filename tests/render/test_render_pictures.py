"""Image pictures: every number stands in its own cell, and what belongs elsewhere is refused."""

from __future__ import annotations

import base64
import json
import re

import matplotlib
import numpy as np
import pytest
from jaxtyping import TypeCheckError
from PIL import Image
from tests.layout.layout_examples import newline_layout, square_layout, tiled_layout, two_images_layout

from sightlens import render
from sightlens.errors import LayoutError, SightLensError
from sightlens.layout import View, build_layout
from sightlens.render.layout_picture import CHOSEN
from sightlens.render.style import Scale, house_style
from sightlens.render.values_picture import view_values

EVIL = "</script><img src=x onerror=alert(1)>"


def picture(height: int = 480, width: int = 640, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)


def cropped_layout():
    """One view of the central square."""
    views = [View("global", 0, (2, 2), (10.0, 0.0, 30.0, 20.0))]
    return build_layout(["i"] * 4, visual=[0, 1, 2, 3], views=views, image_sizes=[(20, 40)], known=[])


CASES = {
    "padded": (square_layout(6), picture()),
    "tiled": (tiled_layout(), picture()),
    "newlines": (newline_layout(), picture(20, 40)),
    "two": (two_images_layout(), [picture(20, 30), Image.fromarray(picture(30, 20))]),
    "cropped": (cropped_layout(), Image.fromarray(picture(20, 40)[..., 0])),
}


@pytest.mark.parametrize("name", CASES)
def test_values_stand_where_their_tokens_are(name):
    layout, image = CASES[name]
    values = np.arange(layout.length, dtype=float)
    drawn = render.draw_values(image, layout, values=values)
    heats = [heat for axes in drawn.canvas.axes for heat in axes.images if np.ndim(heat.get_array()) == 2]
    order = [
        index
        for kind in dict.fromkeys((v.image, v.kind) for v in layout.views)
        for index, v in enumerate(layout.views)
        if (v.image, v.kind) == kind
    ]
    assert len(heats) == len(layout.views)
    for heat, index in zip(heats, order, strict=True):
        x0, y0, x1, y1 = layout.views[index].box
        assert heat.get_extent() == [x0, x1, y1, y0]
        assert (heat.get_array() == layout.positions(index)).all()
        assert heat.origin == "upper"
        height, width = layout.image_sizes[layout.views[index].image]
        assert heat.axes.images[0].get_extent() == [0, width, height, 0]


@pytest.mark.parametrize("name", CASES)
def test_values_per_token_and_per_position_agree(name):
    layout, _ = CASES[name]
    values = np.random.default_rng(0).normal(size=layout.length)
    by_token = view_values(layout, values[layout.visual_tokens()["position"]])
    for a, b in zip(by_token, view_values(layout, values), strict=True):
        assert (a == b).all()


def test_the_colour_scale_is_signed_only_when_values_are():
    assert Scale.of(np.array([0.0, 2.0])) == Scale(0.0, 2.0, signed=False)
    assert Scale.of(np.array([-1.0, 3.0, np.nan])) == Scale(-3.0, 3.0, signed=True)
    assert Scale.of(np.array([np.nan])) == Scale(0.0, 1.0, signed=False)
    assert Scale.of(np.zeros(3)) == Scale(0.0, 1.0, signed=False)
    assert Scale(0.0, 1.0, signed=False).css(0.0)[1] == "#ffffff"
    assert Scale(0.0, 1.0, signed=False).css(1.0)[1] != "#ffffff"
    assert Scale(0.0, 1.0, signed=False).css(float("nan"))[0] == "#ffffff"


def test_pictures_to_be_compared_share_a_scale():
    layout, image = CASES["cropped"]
    drawn = render.draw_values(image, layout, values=np.ones(4), scale=Scale(0.0, 9.0, signed=False))
    heat = drawn.canvas.axes[0].images[-1]
    assert (heat.norm.vmin, heat.norm.vmax) == (0, 9)


@pytest.mark.parametrize("name", CASES)
def test_layouts_tint_each_chosen_cell_once(name):
    layout, image = CASES[name]
    tokens = layout.select("random(3, 0)")
    drawn = render.draw_layout(image, layout, tokens=tokens)
    colour = matplotlib.colors.to_rgba(CHOSEN, 0.5)
    panels = [axes for axes in drawn.canvas.axes if axes.images]
    tinted = [patch for axes in panels for patch in axes.patches if patch.get_facecolor() == colour]
    found = {
        tuple(np.round([*patch.get_xy(), patch.get_x() + patch.get_width(), patch.get_y() + patch.get_height()], 6)) for patch in tinted
    }
    assert len(tinted) == 3
    assert found == {tuple(np.round(box, 6)) for box in tokens.boxes}


def test_layouts_name_tiles_and_segments():
    layout, image = CASES["tiled"]
    *panels, strip = render.draw_layout(image, layout).canvas.axes
    words = {text.get_text() for axes in panels for text in axes.texts}
    names = {f"tile[{row},{column}]" for row in range(2) for column in range(3)}
    ends = {str(layout.positions(index)[corner, corner]) for index in range(7) for corner in (0, -1)}
    assert words == names | ends
    assert {*names, "global", "system", "start"} <= {text.get_text() for text in strip.texts}


def test_pictures_of_another_layout_are_refused():
    layout, image = CASES["tiled"]
    with pytest.raises(LayoutError, match="480"):
        render.draw_layout(picture(20, 40), layout)
    with pytest.raises(LayoutError):
        render.draw_layout([image, image], layout)
    with pytest.raises(LayoutError, match="this layout"):
        render.draw_layout(image, layout, tokens=square_layout(6).select("image"))
    with pytest.raises(LayoutError, match="visual tokens"):
        render.draw_values(image, layout, values=np.zeros(5))


def test_files_are_what_their_names_say(tmp_path):
    layout, image = CASES["cropped"]
    drawn = render.draw_layout(image, layout)
    assert drawn.save(tmp_path / "new" / "a.png").read_bytes().startswith(b"\x89PNG")
    assert b"<svg" in drawn.save(tmp_path / "a.SVG").read_bytes()
    page = drawn.save(tmp_path / "a.html").read_text()
    assert page.startswith("<!doctype html>")
    assert 'src="data:image/webp' in page
    assert drawn._repr_png_().startswith(b"\x89PNG")
    with pytest.raises(SightLensError, match=r"\.html, \.png or \.svg"):
        drawn.save(tmp_path / "a.pdf")
    assert not (tmp_path / "a.pdf").exists()


def test_users_settings_are_left_alone(tmp_path):
    before = dict(matplotlib.rcParams)
    matplotlib.rcParams["axes.facecolor"] = "black"
    try:
        layout, image = CASES["cropped"]
        drawn = render.draw_layout(image, layout)
        drawn.save(tmp_path / "a.png")
        assert matplotlib.rcParams["axes.facecolor"] == "black"
        assert drawn.canvas.get_facecolor() == (1, 1, 1, 1)
        with house_style():
            assert matplotlib.rcParams["axes.facecolor"] == "white"
    finally:
        matplotlib.rcParams.update(before)


def browse_data(fragment: str) -> dict:
    return json.loads(re.search(r"const d = (\{.*?\});\n", fragment).group(1))


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("name", CASES)
def test_browsed_maps_hold_the_values(name):
    layout, image = CASES[name]
    values = np.random.default_rng(1).normal(size=(3, layout.length))
    values[1, layout.positions(0)[0, 0]] = np.nan
    data = browse_data(render.browse_values(image, layout, values=values, names=["a", "b", "c"]).html())
    codes = np.frombuffer(base64.b64decode(data["codes"]), np.uint8).reshape(3, data["count"])
    found = np.where(codes == 0, np.nan, data["low"] + (codes - 1.0) / 254 * (data["high"] - data["low"]))
    expected = values[:, data["positions"]]
    step = (data["high"] - data["low"]) / 254
    assert (np.isnan(found) == np.isnan(expected)).all()
    assert np.nanmax(np.abs(found - expected)) <= step / 2 + 1e-9
    assert sum(len(panel["views"]) for panel in data["panels"]) == len(layout.views)
    for panel in data["panels"]:
        for view in panel["views"]:
            index = next(
                i
                for i, v in enumerate(layout.views)
                if v.name == view["name"] and list(v.box) == view["box"] and list(v.grid) == [view["rows"], view["columns"]]
            )
            cells = data["positions"][view["first"] : view["first"] + view["rows"] * view["columns"]]
            assert cells == layout.positions(index).ravel().tolist()


def test_browsing_colours_steps_like_the_scale():
    layout, image = CASES["cropped"]
    data = browse_data(render.browse_values(image, layout, values=np.array([[0.0, 1.0, 2.0, 3.0]]), names=["a"]).html())
    lut = np.frombuffer(base64.b64decode(data["lut"]), np.uint8).reshape(256, 3)
    scale = Scale.of(np.array([0.0, 3.0]))
    assert "#{:02x}{:02x}{:02x}".format(*tuple(lut[1])) == scale.css(0.0)[0]
    assert "#{:02x}{:02x}{:02x}".format(*tuple(lut[255])) == scale.css(3.0)[0]


def test_3000_tokens_of_32_heads_stay_below_a_megabyte():
    layout = square_layout(55)
    values = np.random.default_rng(0).random((32, layout.length))
    html = render.browse_values(picture(), layout, values=values, names=[f"head {head}" for head in range(32)]).html()
    assert len(html) < 1_000_000
    assert len(render.draw_values(picture(), layout, values=values[0]).html()) < 1_000_000


def test_browsing_refuses_maps_without_names():
    layout, image = CASES["cropped"]
    for names in ([], ["a"]):
        with pytest.raises((LayoutError, TypeCheckError), match="name"):
            render.browse_values(image, layout, values=np.zeros((2, 4)), names=names)


def test_names_cannot_break_out_of_the_page():
    layout, image = CASES["cropped"]
    labels = render.Labels(title=EVIL, colour=EVIL)
    html = render.browse_values(image, layout, values=np.zeros((1, 4)), names=[EVIL + " ID DATA"], labels=labels).html()
    assert EVIL not in html
    assert "<img" not in html
    assert html.count("</script>") == 1
    assert browse_data(html)["names"] == [EVIL + " ID DATA"]
