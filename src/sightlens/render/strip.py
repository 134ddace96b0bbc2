"""Tokens in a row, coloured by a number each."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from html import escape

import numpy as np
from jaxtyping import Float
from matplotlib.collections import PatchCollection
from matplotlib.figure import Figure as Canvas
from matplotlib.patches import Rectangle

from sightlens.errors import SightLensError
from sightlens.render.figure import Markup, Plot
from sightlens.render.style import FAINT, QUIET, Labels, Scale, house_style

TOKENS = Labels(title="Tokens", colour="value")

_WIDE = 100


def token_strip(
    tokens: Sequence[str],
    values: Float[np.ndarray, " token"],
    *,
    labels: Labels = TOKENS,
    scale: Scale | None = None,
) -> Markup:
    """Draw tokens as text on coloured ground; pointing at one shows its position and value.

    Written here and not with circuitsvis, whose scripts add 1.3 MB to every figure and whose tokens are not escaped.

    Args:
        tokens: as the tokenizer prints them; white space is made visible.
        values: one per token; NaN is left white.
        labels: title, and what the colour means with its unit.
        scale: colours and their range; None spans the values.

    Raises:
        SightLensError: when there are no tokens, or not one value each.
    """
    if len(tokens) != len(values) or not tokens:
        got = f"{len(tokens)} tokens and {len(values)} values"
        raise SightLensError("one value per token, and at least one token", got, "Give both for the same positions.")
    scale = Scale.of(values) if scale is None else scale
    shown = [_visible(token) for token in tokens]
    fragment = _html(shown, values, labels=labels, scale=scale)
    return Markup(labels.title, fragment, partial(_drawn, shown, values, labels=labels, scale=scale))


def _visible(token: str) -> str:
    """Return a token with its white space shown."""
    for hidden, sign in (("▁", " "), ("Ġ", " "), (" ", "·"), ("\n", "↵"), ("Ċ", "↵"), ("\t", "⇥"), ("\r", "␍")):
        token = token.replace(hidden, sign)
    return token if token else "∅"


def _html(tokens: Sequence[str], values: Float[np.ndarray, " token"], *, labels: Labels, scale: Scale) -> str:
    spans = []
    for position, (token, value) in enumerate(zip(tokens, values, strict=True)):
        ground, ink = scale.css(float(value))
        tip = escape(f"position {position}: {value:.4g}")
        spans.append(f'<span title="{tip}" style="background:{ground};color:{ink}">{escape(token)}</span>')
    style = (
        "<style>.sl-strip{font:13px/2 ui-monospace,Menlo,Consolas,monospace;background:#fff;color:#1f2430;padding:6px}"
        ".sl-strip span{padding:3px 2px;border:1px solid #d0d5dd;border-radius:3px;margin:0 1px;white-space:pre}"
        ".sl-strip b,.sl-strip i{font-family:system-ui,sans-serif}.sl-strip i{color:#667085}</style>"
    )
    legend = f"{labels.colour}: {scale.low:.3g} to {scale.high:.3g}"
    return f'{style}<div class="sl-strip"><b>{escape(labels.title)}</b> <i>{escape(legend)}</i><br>{" ".join(spans)}</div>'


def _drawn(tokens: Sequence[str], values: Float[np.ndarray, " token"], *, labels: Labels, scale: Scale) -> Plot:
    places, lines = _wrapped(tokens)
    with house_style():
        canvas = Canvas(figsize=(10, 0.7 + 0.34 * lines))
        canvas.set_layout_engine("none")
        axes = canvas.subplots()
        grounds = []
        for token, value, (line, start) in zip(tokens, values, places, strict=True):
            ground, ink = scale.css(float(value))
            grounds.append(Rectangle((start, -line - 0.42), len(token) + 0.7, 0.84, facecolor=ground, edgecolor=FAINT))
            axes.text(start + 0.35, -line, token, family="DejaVu Sans Mono", fontsize=9, color=ink, va="center_baseline")
        axes.add_collection(PatchCollection(grounds, match_original=True, linewidth=0.6, zorder=1))
        axes.set(xlim=(0, _WIDE), ylim=(-lines + 0.4, 0.7))
        axes.axis("off")
        axes.set_title(labels.title)
        legend = f"{labels.colour}: {scale.low:.3g} to {scale.high:.3g}"
        axes.text(1, 1.02, legend, transform=axes.transAxes, ha="right", va="bottom", fontsize=8, color=QUIET)
    return Plot(canvas, labels.title)


def _wrapped(tokens: Sequence[str]) -> tuple[list[tuple[int, float]], int]:
    """Return the line and column of each token, and the number of lines."""
    places, line, column = [], 0, 0.0
    for token in tokens:
        width = len(token) + 1.0
        if column and column + width > _WIDE:
            line, column = line + 1, 0.0
        places.append((line, column))
        column += width
    return places, line + 1
