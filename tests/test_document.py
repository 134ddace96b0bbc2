"""The generated documents are up to date, and collapse layers truly."""

from __future__ import annotations

import json
import re

import pytest

from sightlens.families import FAMILIES
from sightlens.families.sites import Input, Output, Site
from sightlens.store import read_store
from tests import document
from tests.tiny import TEXTS, VARIANTS, hf_model


def test_the_documents_are_up_to_date():
    assert document.HOOKS.read_text(encoding="utf-8") == document.hooks(), "run `make docs`"
    assert document.TABLE.search(document.README.read_text(encoding="utf-8"))
    assert document.README.read_text(encoding="utf-8") == document.readme(), "run `make docs`"


def test_the_example_in_the_readme_is_true(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code = re.findall(r"```python\n(.*?)```", document.README.read_text(encoding="utf-8"), flags=re.DOTALL)
    names = {}
    exec(code[0], names)
    shapes = re.findall(r"^(.*\.shape)  # (\[[\d, ]+\])", code[0], flags=re.MULTILINE)
    assert len(shapes) == 2
    for expression, shape in shapes:
        assert list(eval(expression, names)) == json.loads(shape)
    assert f"prompt.layout  # {names['prompt'].layout!r}\n" in code[0]
    assert len(read_store(tmp_path / "runs" / "knockout").records) == 13


def test_layers_are_collapsed_where_they_are_layers():
    site = Site("blocks.3.hook_x", "layers.3.experts.13.up", Output(1), ("batch",), "states[3] to states[4] of 34")
    shown = document.row(site)
    assert shown == document.Row(
        "blocks.{l}.hook_x", "batch", "states[{l}] to states[{l} + 1] of 34", "output 1 of `layers.{l}.experts.13.up`"
    )
    assert document.row(Site("ln_final.hook_out", "norms.3", Input("x"), ("batch", "position"))) == document.Row(
        "ln_final.hook_out", "batch, position", "", "`x` of `norms.3`"
    )


def test_a_family_lacks_what_most_others_have():
    assert document.usual({"a": {"x", "y"}, "b": {"x", "z"}, "c": {"x", "z"}}) == {"x", "z"}


def test_every_family_has_a_tiny_configuration():
    assert all(document.configs().values())


@pytest.mark.parametrize("variant", [*VARIANTS, *TEXTS], ids=str)
def test_the_document_names_every_hook_of_a_model(variant):
    config = hf_model(variant).config
    family = FAMILIES[config.model_type]
    part = [
        section
        for section in document.hooks().split("## ")[1:]
        if section.startswith("Every") or family.name in section.split("\n")[0].split(", ")
    ]
    named = re.findall(r"^\| `([^`]+)` \|", "".join(part), flags=re.MULTILINE)
    patterns = [re.sub(r"\.\d+\.", ".{l}.", site.name) for site in family.sites(config)]
    assert set(named) == set(patterns)
