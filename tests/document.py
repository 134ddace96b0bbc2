"""Writes what is generated in the documents: `make docs` (`python -m tests.document`) after a change of families, sites or tutorials."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import nbformat
from nbclient import NotebookClient
from nbformat import NotebookNode
from transformers import PreTrainedConfig

from sightlens.families import FAMILIES
from sightlens.families.family import Family
from sightlens.families.sites import Attention, HeadResult, Input, Output, Site, Tap, Weight
from tests.tiny import TEXTS, VARIANTS, hf_model

ROOT = Path(__file__).parents[1]
HOOKS, README = ROOT / "tutorials" / "hooks.md", ROOT / "README.md"
TABLE = re.compile(r"(?<=<!-- the table of families, by `make docs` -->\n).*?(?=<!-- end -->)", re.DOTALL)
INTRODUCTION = """# Hook names

Made from the families' sites by `make docs`; a test keeps it true. `{l}` stands for a layer, counted from 0. Selectors after `@` choose
along the dimensions `position`, `query`, `key` and `token`. `model.hook_dict` lists the names of a loaded model; `sightlens check MODEL`
shows that each fires and has an effect there. "HF" is what transformers calls the same tensor, where it has a name for it.
"""


@dataclass(frozen=True)
class Row:
    """A hook name of all layers, as the document shows it."""

    name: str
    dims: str
    hf: str
    tapped: str


def configs() -> dict[str, list[PreTrainedConfig]]:
    """The tiny configurations of each family, by `model_type`."""
    found: dict[str, list[PreTrainedConfig]] = {model_type: [] for model_type in FAMILIES}
    for variant in [*VARIANTS, *TEXTS]:
        config = hf_model(variant).config
        found[config.model_type].append(config)
    return found


def row(site: Site) -> Row:
    """Collapse a site's layer to `{l}`."""
    layer = re.search(r"\.(\d+)\.", site.name)
    collapse = (lambda text: text) if layer is None else (lambda text: _without_layer(text, int(layer[1])))
    return Row(collapse(site.name), ", ".join(site.dims), collapse(site.hf or ""), f"{tapped(site.tap)} of `{collapse(site.module)}`")


def _without_layer(text: str, layer: int) -> str:
    text = re.sub(rf"(?<=[.\[]){layer}(?=[.\]]|$)", "{l}", text)
    return text.replace(f"[{layer + 1}]", "[{l} + 1]")


def tapped(tap: Tap) -> str:
    """How a tap reads its module."""
    match tap:
        case Input():
            return f"`{tap.argument}`"
        case Output():
            which = "output" if tap.index is None else f"output {tap.index}"
            part = f", part {tap.part[0] + 1} of {tap.part[1]}," if tap.part else ""
            return which + (f" × `{tap.scale.rpartition('.')[2]}`" if tap.scale else "") + part
        case Attention():
            return "inside"
        case HeadResult():
            return "weight and input" + (f" × `{tap.norm.rpartition('.')[2]}`" if tap.norm else "")
        case Weight():
            return f"parameter `{tap.parameter}`"
    raise TypeError(tap)


def rows(family: Family, given: Sequence[PreTrainedConfig]) -> list[Row]:
    """Every row of a family, in the order of its sites."""
    return list(dict.fromkeys(row(site) for config in given for site in family.sites(config)))


def hooks() -> str:
    """The document of hook names: what all families share, then what only some have."""
    owners: dict[Row, list[str]] = {}
    for model_type, given in configs().items():
        for entry in rows(FAMILIES[model_type], given):
            owners.setdefault(entry, []).append(FAMILIES[model_type].name)
    groups: dict[tuple[str, ...], list[Row]] = {}
    for entry, names in owners.items():
        groups.setdefault(tuple(names), []).append(entry)
    parts = [INTRODUCTION]
    for names, entries in sorted(groups.items(), key=lambda group: -len(group[0])):
        title = "Every family" if len(names) == len(FAMILIES) else ", ".join(names)
        body = table(("name", "dimensions", "HF", "tapped at"), ((f"`{e.name}`", e.dims, e.hf, e.tapped) for e in entries))
        parts.append(f"## {title}\n\n{body}")
    return "\n".join(parts)


def families() -> str:
    """README's table of families."""
    given = configs()
    offered = {model_type: {entry.name for entry in rows(FAMILIES[model_type], each)} for model_type, each in given.items()}
    return table(
        ("family", "models", "tested towers", "tested language models", "options", "boxes", "hooks it lacks"),
        (
            (
                f"`{family.name}`",
                first_line(type(family)),
                ", ".join(dict.fromkeys(config.vision_config.model_type for config in given[model_type])) if family.images else "none",
                ", ".join(dict.fromkeys(config.get_text_config().model_type for config in given[model_type])),
                ", ".join(f"`{option}`" for option in sorted(family.options)),
                first_line(family.box_format) if family.images else "none",
                ", ".join(f"`{name}`" for name in sorted(lacking(family, usual(offered) - offered[model_type]))) or "none",
            )
            for model_type, family in FAMILIES.items()
        ),
    )


def usual(offered: Mapping[str, set[str]]) -> set[str]:
    """The names that more than half of the families offer."""
    every = [name for names in offered.values() for name in names]
    return {name for name in every if every.count(name) * 2 > len(offered)}


def lacking(family: Family, names: Iterable[str]) -> list[str]:
    """The names a family could have: one without pictures has no tower."""
    return [name for name in names if family.images or not name.startswith(("vision_", "hook_visual"))]


def first_line(documented: object) -> str:
    """The first sentence of a docstring."""
    return (documented.__doc__ or "").partition("\n")[0].rstrip(".")


def table(head: Sequence[str], body: Iterable[Sequence[str]]) -> str:
    """A markdown table."""
    return "".join(f"| {' | '.join(cells)} |\n" for cells in (head, ["---"] * len(head), *body))


def tutorial(path: Path) -> NotebookNode:
    """A notebook run from top to bottom, without what libraries write about themselves on the way."""
    notebook = nbformat.read(path, as_version=4)
    with TemporaryDirectory() as folder:
        NotebookClient(notebook, timeout=300, resources={"metadata": {"path": folder}}).execute()
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)
        if cell.cell_type == "code":
            cell.outputs = [output for output in cell.outputs if output.get("name") != "stderr"]
    return notebook


def readme() -> str:
    """README with its table made again."""
    return TABLE.sub(lambda _: families(), README.read_text(encoding="utf-8"))


if __name__ == "__main__":
    HOOKS.write_text(hooks(), encoding="utf-8")
    README.write_text(readme(), encoding="utf-8")
    for path in sorted(HOOKS.parent.glob("*.ipynb")):
        nbformat.write(tutorial(path), path)
