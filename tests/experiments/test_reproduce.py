"""The localization paper's experiments, from the command line."""

from __future__ import annotations

import sys

import pytest

from sightlens import cli
from sightlens.store import read_store


def call(monkeypatch, *arguments: object) -> int:
    monkeypatch.setattr(sys, "argv", ["sightlens", *map(str, arguments)])
    with pytest.raises(SystemExit) as stopped:
        cli.main()
    return int(stopped.value.code or 0)


def test_all_tables_are_printed_in_order_and_again_from_the_store(monkeypatch, capsys, tmp_path):
    arguments = ("reproduce", "p5", "--trials", 2, "--store", tmp_path)
    assert call(monkeypatch, *arguments) == 0
    first = capsys.readouterr().out
    names = ("ablate_tokens", "containerize", "shuffle", "knockout_windows", "mediation", "ablate_heads")
    places = [first.index(f"{name}: {kind}") for name in names for kind in ("measured", "published")]
    assert places == sorted(places)
    assert "near_zero" in first
    assert "llava-13b" in first
    sizes = {name: len(read_store(tmp_path / name).records) for name in names}
    assert sizes["containerize"] == 21
    parts = sorted(path for path in tmp_path.rglob("*") if path.is_file())
    assert call(monkeypatch, *arguments) == 0
    assert capsys.readouterr().out == first
    assert sorted(path for path in tmp_path.rglob("*") if path.is_file()) == parts


def test_an_unknown_paper_is_one_line(monkeypatch, capsys):
    assert call(monkeypatch, "reproduce", "p9") == 2
    assert "p5" in capsys.readouterr().out
