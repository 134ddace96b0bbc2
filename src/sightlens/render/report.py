"""One page that holds texts, figures and tables, for reading and for keeping."""

from __future__ import annotations

import dataclasses
import re
from html import escape
from pathlib import Path

import pandas as pd

from sightlens.errors import SightLensError
from sightlens.render.figure import Figure, page
from sightlens.store import Provenance

Block = str | Figure | pd.DataFrame

_CSS = """
h1{font-size:1.9rem;line-height:1.2;margin:0 0 .3em}h2{font-size:1.3rem;margin:2em 0 .5em;padding-top:.6em;border-top:1px solid #d0d5dd}
p{max-width:75ch}nav{margin:0 0 1.5em}nav a{margin-right:1.1em}a{color:#0072b2}.table{overflow-x:auto;margin:16px 0}
table{border-collapse:collapse;font-size:.875rem;font-variant-numeric:tabular-nums}
th,td{padding:5px 12px;text-align:right;border-bottom:1px solid #e4e7ec;white-space:nowrap}
th:first-child,td:first-child{text-align:left}thead th{border-bottom:2px solid #98a2b3}
footer{margin-top:3em;padding-top:1em;border-top:1px solid #d0d5dd;color:#667085;font-size:.8125rem}
footer dt{float:left;clear:left;width:9em}footer dd{margin:0 0 0 9.5em;overflow-wrap:anywhere}
@media(prefers-color-scheme:dark){h2,footer{border-color:#2b303a}th,td{border-color:#2b303a}footer{color:#98a2b3}a{color:#56b4e9}}
"""


@dataclasses.dataclass(frozen=True)
class Section:
    """A heading and what stands under it."""

    heading: str
    blocks: tuple[Block, ...]


@dataclasses.dataclass(frozen=True)
class Report:
    """A page under construction; `add` returns it with one more section.

    Attributes:
        title: the page's heading.
        sections: what it holds.
        provenance: where its numbers came from, printed at the end.
    """

    title: str
    sections: tuple[Section, ...] = ()
    provenance: tuple[Provenance, ...] = ()

    def add(self, heading: str, *blocks: Block) -> Report:
        """Return the report with a section of texts (blank lines part paragraphs), figures and tables.

        Raises:
            SightLensError: for a block of another type.
        """
        for block in blocks:
            if not isinstance(block, str | Figure | pd.DataFrame):
                do = "Draw numbers first, or put them into a DataFrame."
                raise SightLensError("texts, figures and tables", type(block).__name__, do)
        return dataclasses.replace(self, sections=(*self.sections, Section(heading, blocks)))

    def html(self) -> str:
        """Return the whole page, which needs no other file."""
        links = " ".join(f'<a href="#s{n}">{escape(section.heading)}</a>' for n, section in enumerate(self.sections))
        bodies = [
            f'<section id="s{number}"><h2>{escape(section.heading)}</h2>{"".join(map(_block, section.blocks))}</section>'
            for number, section in enumerate(self.sections)
        ]
        body = f"<h1>{escape(self.title)}</h1><nav>{links}</nav>{''.join(bodies)}{_footer(self.provenance)}"
        return page(self.title, body, css=_CSS)

    def save(self, path: str | Path) -> Path:
        """Write the page, and each figure as a PNG beside it, and return the page's path.

        Args:
            path: ends in .html; missing folders are made.

        Raises:
            SightLensError: for another ending.
        """
        path = Path(path)
        if path.suffix.lower() != ".html":
            raise SightLensError("a file name that ends in .html", repr(path.name), "Save single figures as .png or .svg.")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(self.html(), encoding="utf-8")
        figures = [block for section in self.sections for block in section.blocks if isinstance(block, Figure)]
        for number, figure in enumerate(figures, start=1):
            name = re.sub(r"[^a-z0-9]+", "-", figure.title.lower()).strip("-")
            name = name if len(name) <= 50 else name[:51].rpartition("-")[0]
            figure.save(path.with_name(f"{path.stem}-{number:02d}-{name or 'figure'}.png"))
        return path

    def _repr_html_(self) -> str:
        """Show the page in a frame, so that its style stays its own."""
        return f'<iframe srcdoc="{escape(self.html())}" style="width:100%;height:720px;border:1px solid #d0d5dd"></iframe>'


def _block(block: Block) -> str:
    if isinstance(block, str):
        return "".join(f"<p>{escape(part.strip())}</p>" for part in re.split(r"\n\s*\n", block) if part.strip())
    if isinstance(block, Figure):
        return f"<figure>{block.html()}</figure>"
    return f'<div class="table">{block.to_html(escape=True, index=False, border=0, float_format="{:.3g}".format, max_rows=200)}</div>'


def _footer(provenance: tuple[Provenance, ...]) -> str:
    """Print where the numbers came from."""
    lists = []
    for source in provenance:
        fields = {name.replace("_", " "): value for name, value in dataclasses.asdict(source).items()}
        fields["versions"] = ", ".join(f"{library} {version}" for library, version in source.versions)
        fields["warnings"] = "; ".join(source.warnings)
        rows = (f"<dt>{escape(name)}</dt><dd>{escape(str(value))}</dd>" for name, value in fields.items() if value != "")
        lists.append(f"<dl>{''.join(rows)}</dl>")
    return f"<footer><b>Where the numbers came from</b>{''.join(lists)}</footer>" if lists else ""
