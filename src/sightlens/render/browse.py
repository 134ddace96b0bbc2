"""Many maps over one image, such as one per head, with a slider between them."""

from __future__ import annotations

import hashlib
import io
import json
from collections.abc import Sequence
from functools import partial
from html import escape
from importlib.resources import files
from typing import Any

import numpy as np
from jaxtyping import Float, UInt8
from PIL import Image

from sightlens._types import PILImage
from sightlens.errors import LayoutError
from sightlens.layout import Layout
from sightlens.render.figure import Markup, encoded
from sightlens.render.panels import Panel, Picture, panels_of
from sightlens.render.style import Labels, Scale
from sightlens.render.values_picture import PER_TOKEN, draw_values, view_values

_SIDE = 560
"""Pixels of the longer side of an embedded image."""


def browse_values(
    image: Picture | Sequence[Picture],
    layout: Layout,
    *,
    values: Float[np.ndarray, "map token"],
    names: Sequence[str],
    labels: Labels = PER_TOKEN,
) -> Markup:
    """Draw many maps of numbers per visual token over one image, with a slider to choose among them.

    All maps share one scale. The page holds numbers in 254 steps, so 32 maps of 3,000 tokens take 130 kB. As PNG or
    SVG it is its first map.

    Args:
        image: the original image, or a list of them.
        layout: of the prompt.
        values: per map one number per visual token, or one per position; NaN is not drawn.
        names: of the maps.
        labels: title, and what the colour means with its unit.

    Raises:
        LayoutError: when the images, the names or the number of values do not fit.
    """
    if len(names) != len(values) or not names:
        got = f"{len(names)} names and {len(values)} maps"
        raise LayoutError("a name per map, and at least one map", got, "Name every map.")
    panels, grids = panels_of(image, layout), view_values(layout, np.asarray(values, dtype=np.float64))
    scale = Scale.of(np.asarray(values, dtype=np.float64))
    flat = np.concatenate([grid.reshape(len(values), -1) for grid in grids], axis=1)
    data = {
        "codes": encoded(_codes(flat, scale).tobytes()),
        "lut": encoded((scale.colours(np.linspace(-1 / 254, 1, 256))[:, :3] * 255).round().astype(np.uint8).tobytes()),
        "low": scale.low,
        "high": scale.high,
        "count": flat.shape[1],
        "names": list(names),
        "positions": np.concatenate([layout.positions(index).ravel() for index in range(len(layout.views))]).tolist(),
        "panels": _panels(panels, layout),
    }
    first = Labels(title=f"{labels.title}: {names[0]}", colour=labels.colour)
    twin = partial(draw_values, image, layout, values=np.asarray(values[0]), labels=first, scale=scale)
    return Markup(labels.title, _page(data, panels, labels=labels, scale=scale), twin)


def _codes(values: Float[np.ndarray, "map token"], scale: Scale) -> UInt8[np.ndarray, "map token"]:
    """Return each value as a step from 1 to 255, 0 where it is missing."""
    steps = 1 + np.rint(np.clip((values - scale.low) / (scale.high - scale.low), 0, 1) * 254)
    return np.where(np.isfinite(values), steps, 0).astype(np.uint8)


def _panels(panels: Sequence[Panel], layout: Layout) -> list[dict[str, object]]:
    firsts = np.cumsum([0, *(view.count for view in layout.views)])
    return [
        {
            "box": panel.extent,
            "size": panel.picture.size,
            "image": f"data:image/webp;base64,{encoded(_small(panel.picture))}",
            "views": [
                {"box": view.box, "rows": view.grid[0], "columns": view.grid[1], "first": int(firsts[index]), "name": view.name}
                for index, view in panel.views
            ],
        }
        for panel in panels
    ]


def _small(picture: PILImage) -> bytes:
    """Return an image in light grey as the bytes of a small file."""
    small = picture.convert("L")
    small.thumbnail((_SIDE, _SIDE))
    light = Image.fromarray((76.5 + 0.7 * np.asarray(small, dtype=np.float64)).round().astype(np.uint8))
    buffer = io.BytesIO()
    light.save(buffer, "webp", quality=80)
    return buffer.getvalue()


def _page(data: dict[str, Any], panels: Sequence[Panel], *, labels: Labels, scale: Scale) -> str:
    text = json.dumps(data, separators=(",", ":")).replace("<", "\\u003c").replace("\u2028", "\\u2028")
    maps = len(data["names"])
    key = hashlib.sha256(text.encode()).hexdigest()[:12]
    canvases = "".join(map(_canvas, panels))
    stops = ",".join(scale.css(float(value))[0] for value in np.linspace(scale.low, scale.high, 9))
    bar = f'<span style="background:linear-gradient(90deg,{stops});width:160px;height:12px;display:inline-block"></span>'
    legend = f"{scale.low:.3g} {bar} {scale.high:.3g} {escape(labels.colour)}"
    script = files("sightlens.render").joinpath("browse.js").read_text(encoding="utf-8")
    return (
        f'<div data-sightlens="{key}" style="background:#fff;color:#1f2430;font:14px system-ui,sans-serif;padding:10px;max-width:1100px">'
        f'<strong>{escape(labels.title)}</strong><div><input type="range" min="0" max="{maps - 1}" value="0" style="width:260px" '
        f'aria-label="map"> <b></b></div><div style="display:flex;gap:12px">{canvases}</div><div>{legend}</div>'
        f"<i>&nbsp;</i></div><script>{script.split(chr(10), 1)[1].replace('ID', key, 1).replace('DATA', text, 1)}</script>"
    )


def _canvas(panel: Panel) -> str:
    width, height = round(_SIDE * min(1.0, panel.aspect)), round(_SIDE / max(1.0, panel.aspect))
    canvas = f'<canvas width="{width}" height="{height}" style="width:100%"></canvas>'
    return f'<span style="flex:{panel.aspect:.4f} 1 0"><small>{escape(panel.name)}</small>{canvas}</span>'
