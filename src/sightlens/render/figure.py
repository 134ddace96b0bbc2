"""What every drawing function returns: something a notebook shows and a file keeps."""

from __future__ import annotations

import base64
import dataclasses
import io
from abc import ABC, abstractmethod
from collections.abc import Callable
from html import escape
from pathlib import Path

from matplotlib.figure import Figure as Canvas

from sightlens.errors import SightLensError
from sightlens.render.style import house_style

CSS = """
:root{color-scheme:light dark}
body{font:16px/1.55 system-ui,-apple-system,"Segoe UI",Roboto,sans-serif;color:#1f2430;background:#fff;margin:0}
main{max-width:1120px;margin:0 auto;padding:24px 20px 60px}
figure{margin:18px 0;padding:12px;background:#fff;border:1px solid #e4e7ec;border-radius:8px;color:#1f2430;overflow-x:auto}
figure img{display:block;max-width:100%;height:auto;margin:0 auto}
@media(prefers-color-scheme:dark){body{background:#15181e;color:#e4e7ec}figure{border-color:#2b303a}}
"""


class Figure(ABC):
    """A picture. Put it last in a notebook cell to see it; it needs no network, then or later."""

    @property
    @abstractmethod
    def title(self) -> str:
        """What the picture shows, for readers who cannot see it."""

    @abstractmethod
    def html(self) -> str:
        """Return an HTML fragment that holds everything it needs."""

    @abstractmethod
    def image(self, kind: str) -> bytes:
        """Return the picture as the bytes of a "png", "svg" or "webp" file."""

    def save(self, path: str | Path) -> Path:
        """Write the picture to a file and return its path.

        Args:
            path: ends in .html, .png or .svg; missing folders are made.

        Raises:
            SightLensError: for any other ending.
        """
        path = Path(path)
        kind = path.suffix.lower().lstrip(".")
        if kind not in ("html", "png", "svg"):
            do = "Choose one of these endings."
            raise SightLensError("a file name that ends in .html, .png or .svg", repr(path.name), do)
        data = page(self.title, f"<figure>{self.html()}</figure>").encode() if kind == "html" else self.image(kind)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
        return path

    def __repr__(self) -> str:
        """Say what it is where it cannot be shown."""
        return f"<{type(self).__name__} {self.title!r}>"


@dataclasses.dataclass(frozen=True, repr=False, eq=False)
class Plot(Figure):
    """A picture drawn with matplotlib.

    Attributes:
        canvas: the matplotlib figure, for those who want to change it.
        description: what it shows.
    """

    canvas: Canvas
    description: str

    @property
    def title(self) -> str:
        """What the picture shows."""
        return self.description

    def image(self, kind: str) -> bytes:
        """Return the picture as the bytes of a file."""
        buffer = io.BytesIO()
        options = {"svg": {"metadata": {"Date": None}}, "webp": {"pil_kwargs": {"quality": 88}}}.get(kind, {})
        with house_style():
            self.canvas.savefig(buffer, format=kind, dpi=150, bbox_inches="tight", pad_inches=0.12, **options)
        return buffer.getvalue()

    def html(self) -> str:
        """Return an image element that holds the picture."""
        width = round(self.canvas.get_figwidth() * 100)
        return f'<img alt="{escape(self.title)}" width="{width}" src="data:image/webp;base64,{encoded(self.image("webp"))}">'

    def _repr_png_(self) -> bytes:
        return self.image("png")


@dataclasses.dataclass(frozen=True, repr=False, eq=False)
class Markup(Figure):
    """A picture made of HTML, with a drawn twin for files that are not HTML.

    Attributes:
        description: what it shows.
        fragment: the HTML.
        draw: makes the twin; called only when it is needed.
    """

    description: str
    fragment: str
    draw: Callable[[], Plot]

    @property
    def title(self) -> str:
        """What the picture shows."""
        return self.description

    def html(self) -> str:
        """Return the HTML fragment."""
        return self.fragment

    def image(self, kind: str) -> bytes:
        """Return the twin as the bytes of a file."""
        return self.draw().image(kind)

    def _repr_html_(self) -> str:
        return self.fragment


def page(title: str, body: str, *, css: str = "") -> str:
    """Return a complete HTML page around a body."""
    head = f'<meta charset="utf-8"><meta name="viewport" content="width=device-width,initial-scale=1"><title>{escape(title)}</title>'
    return f"<!doctype html><html lang=en><head>{head}<style>{CSS}{css}</style></head><body><main>{body}</main></body></html>"


def encoded(data: bytes) -> str:
    """Return bytes as base64 text."""
    return base64.b64encode(data).decode("ascii")
