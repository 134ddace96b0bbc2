"""Charts, strips, attention and reports show the numbers they were given."""

from __future__ import annotations

import json
import re
from html import unescape

import numpy as np
import pandas as pd
import pytest
from jaxtyping import TypeCheckError

from sightlens import render
from sightlens.errors import SightLensError
from sightlens.render.attention import LIMIT
from sightlens.render.style import Scale
from sightlens.store import Provenance

EVIL = "</script><img src=x onerror=alert(1)>"
EXTERNAL = re.compile(r"""(?:src|href)\s*=\s*(?!["']?(?:data:|#))|@import|url\((?!["']?data:)""", re.IGNORECASE)
TABLE = pd.DataFrame(
    [(w, g, 0.1 * w + s, 0.1 * w + s - 0.05, 0.1 * w + s + 0.1) for g, s in (("object", 0.1), ("random", 0.5)) for w in (4, 0, 8)],
    columns=["layer", "keys", "mean", "low", "high"],
).assign(metric="loc", n=[9, 9, 9, 9, 9, 8])


def test_curves_pass_through_the_means():
    axes = render.plot_curves(TABLE, x="layer", group="keys").canvas.axes[0]
    assert [line.get_label() for line in axes.lines] == ["object", "random"]
    for line, (_, rows) in zip(axes.lines, TABLE.groupby("keys", sort=False), strict=True):
        rows = rows.sort_values("layer")
        assert line.get_xdata().tolist() == rows["layer"].tolist()
        assert line.get_ydata().tolist() == rows["mean"].tolist()
    band = axes.collections[1].get_paths()[0].vertices
    assert band[:, 1].min() == pytest.approx(TABLE.low[3:].min())
    assert band[:, 1].max() == pytest.approx(TABLE.high[3:].max())
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("layer", "loc")


def test_windows_keep_their_order():
    table = TABLE[TABLE["keys"] == "object"].assign(layer=["8-11", "0-3", "all"])
    axes = render.plot_curves(table, x="layer").canvas.axes[0]
    assert [label.get_text() for label in axes.get_xticklabels()] == ["8-11", "0-3", "all"]
    assert axes.lines[0].get_xdata().tolist() == [0, 1, 2]
    axes = render.plot_curves(table, x="layer", apart=["all"]).canvas.axes[0]
    assert [line.get_xdata().tolist() for line in axes.lines][:2] == [[0, 1], [2]]
    assert axes.lines[1].get_ydata().tolist() == table["mean"].tolist()[2:]
    whisker = axes.collections[-1].get_segments()[0]
    assert whisker[:, 1].tolist() == pytest.approx([table["low"].iloc[2], table["high"].iloc[2]])


def test_bars_are_as_high_as_the_means():
    axes = render.plot_bars(TABLE, x="layer", group="keys", labels=render.Labels(y="share")).canvas.axes[0]
    heights = [bar.get_height() for container in axes.containers if hasattr(container, "patches") for bar in container.patches]
    assert heights == TABLE["mean"].tolist()
    assert [label.get_text() for label in axes.get_xticklabels()] == ["4", "0", "8"]
    lows = sorted(segment[:, 1].min() for lines in axes.collections for segment in lines.get_segments())
    assert lows == pytest.approx(sorted(TABLE.low))
    assert axes.get_ylabel() == "share"


def test_charts_say_how_many_examples():
    canvas = render.plot_curves(TABLE, x="layer", group="keys").canvas
    assert "n = 8 to 9" in canvas.get_supxlabel()


@pytest.mark.parametrize("draw", [render.plot_curves, render.plot_bars])
def test_charts_refuse_tables_that_are_no_curve(draw):
    with pytest.raises(SightLensError, match="layer=4"):
        draw(TABLE, x="layer")
    with pytest.raises(SightLensError, match="depth"):
        draw(TABLE, x="depth")
    with pytest.raises(SightLensError, match="no rows"):
        draw(TABLE[:0], x="layer")


def test_maps_hold_their_matrix():
    values = np.array([[0.0, 1.0, np.nan], [-2.0, 0.5, 1.0]])
    drawn = render.heat_map(values, labels=render.Labels(title="$t_$", colour="MF"), columns=["a", "$b$", EVIL])
    axes, bar = drawn.canvas.axes
    assert np.array_equal(axes.images[0].get_array().filled(np.nan), values, equal_nan=True)
    assert axes.images[0].origin == "lower"
    assert (axes.images[0].norm.vmin, axes.images[0].norm.vmax) == (-2, 2)
    assert bar.get_ylabel() == "MF"
    assert {text.get_text() for text in axes.texts} == {"0.0", "1.0", "-2.0", "0.5"}
    assert {text.get_text() for text in render.heat_map(values / 10).canvas.axes[0].texts} == {"0.00", "0.10", "-0.20", "0.05"}
    assert axes.lines[0].get_xydata().tolist() == [[2, 0]]
    assert render.heat_map(values, rows=["x", "y"]).canvas.axes[0].images[0].origin == "upper"
    assert drawn.image("png").startswith(b"\x89PNG")  # a dollar sign is a dollar sign


def test_maps_refuse_names_that_do_not_fit():
    for values, names in ((np.zeros((2, 3)), ["a"]), (np.zeros((0, 3)), None)):
        with pytest.raises(SightLensError, match="rows"):
            render.heat_map(values, rows=names)


def test_strips_colour_each_token():
    values = np.array([0.0, 1.0, np.nan, 0.5])
    strip = render.token_strip(["▁a", EVIL, "\n", "$x_$"], values)
    html = strip.html()
    spans = re.findall(r'<span title="position (\d): ([^"]*)" style="background:(#\w+);color:#\w+">(.*?)</span>', html)
    assert [span[0] for span in spans] == ["0", "1", "2", "3"]
    assert [span[2] for span in spans] == [Scale.of(values).css(value)[0] for value in values]
    assert [span[3] for span in spans][::2] == ["·a", "↵"]
    assert "<img" not in html
    assert strip.image("png").startswith(b"\x89PNG")
    assert len(strip.draw().canvas.axes[0].texts) == 5  # four tokens and the legend


def test_long_strips_wrap_and_stay_small():
    assert len(render.token_strip(["token"] * 3000, np.linspace(-1, 1, 3000)).html()) < 1_000_000
    drawn = render.token_strip(["token"] * 100, np.linspace(-1, 1, 100)).draw()
    places = {text.get_position()[1] for text in drawn.canvas.axes[0].texts[:-1]}
    assert len(places) == -(-100 // 16)


def test_strips_need_a_value_per_token():
    for tokens, values in ((["a"], np.zeros(2)), ([], np.zeros(0))):
        with pytest.raises((SightLensError, TypeCheckError)):
            render.token_strip(tokens, values)


def test_attention_holds_the_pattern_and_no_token_breaks_out():
    pattern = np.tril(np.random.default_rng(0).dirichlet(np.ones(3), size=(2, 3)))
    html = render.draw_attention(["a", EVIL, "PROPS"], pattern, title=EVIL).html()
    props = json.loads(re.search(r"CircuitsVis\.AttentionHeads, (\{.*\})\);", html).group(1))
    assert np.abs(np.array(props["attention"]) - pattern).max() <= 0.0005 + 1e-9
    assert props["tokens"] == ["a", EVIL, "PROPS"]
    assert props["attentionHeadNames"] == ["head 0", "head 1"]
    assert EVIL not in html
    assert html.count("</script>") == 1
    assert len(html) < LIMIT


def test_attention_that_does_not_fit_is_refused():
    with pytest.raises(SightLensError, match="same tokens"):
        render.draw_attention(["a"], np.zeros((1, 2, 2)))
    with pytest.raises(SightLensError, match="browse_values"):
        render.draw_attention(["a"] * 200, np.random.default_rng(0).random((8, 200, 200)))


PROVENANCE = Provenance(
    model_id=EVIL, content_hash="abc", dtype="float32", attention="sdpa", seed=0, layout_hash="00", device="cpu", sightlens="0.1"
)


def evil_report() -> render.Report:
    figures = render.token_strip([EVIL], np.ones(1), labels=render.Labels(title=EVIL)), render.heat_map(np.eye(2))
    table = pd.DataFrame({EVIL: [EVIL]})
    return render.Report(EVIL, provenance=(PROVENANCE,)).add(EVIL, f"{EVIL}\n\nsecond", *figures).add("Table", table)


def test_reports_hold_everything_and_need_no_network(tmp_path):
    path = evil_report().save(tmp_path / "new" / "page.html")
    page = path.read_text()
    assert EVIL not in page
    assert page.count("<h2>") == 2
    assert page.count("<p>") == 2
    assert page.count("<figure>") == 2
    assert page.count("<table") == 1
    assert "float32" in page
    assert not EXTERNAL.search(re.sub(r"base64,[A-Za-z0-9+/=]+", "base64,", page).replace("src=x", ""))
    assert len(list(path.parent.glob("page-*.png"))) == 2
    framed = re.match(r'<iframe srcdoc="([^"]*)"', evil_report()._repr_html_())
    assert unescape(framed.group(1)) == page


def test_reports_grow_by_copies():
    empty = render.Report("a")
    longer = empty.add("b", "text")
    assert empty.sections == ()
    assert [section.heading for section in longer.sections] == ["b"]


def test_reports_refuse_what_they_cannot_show(tmp_path):
    with pytest.raises((SightLensError, TypeCheckError)):
        render.Report("a").add("b", 3)
    with pytest.raises(SightLensError, match=r"\.html"):
        render.Report("a").save(tmp_path / "a.pdf")
