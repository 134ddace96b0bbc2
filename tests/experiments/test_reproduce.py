"""The localization paper's experiments, from the command line."""

from __future__ import annotations

import sys

import pytest

from sightlens import cli
from sightlens.store import read_store

SECTIONS = ["baseline", "token_share", "ablate_tokens", "containerize", "shuffle", "ablate_views", "position_probes"]
SECTIONS += ["knockout_windows", "mediation", "head_overlap", "ablate_heads"]


def call(monkeypatch, *arguments: object) -> int:
    monkeypatch.setattr(sys, "argv", ["sightlens", *map(str, arguments)])
    with pytest.raises(SystemExit) as stopped:
        cli.main()
    return int(stopped.value.code or 0)


def test_all_tables_are_printed_in_order_and_again_from_the_store(monkeypatch, capsys, tmp_path):
    arguments = ("reproduce", "p5", "--trials", 2, "--store", tmp_path)
    assert call(monkeypatch, *arguments) == 0
    first = capsys.readouterr().out
    places = [first.index(f"\n{name}: {kind}") for name in SECTIONS for kind in ("measured", "published")]
    assert places == sorted(places)
    for words in ("near_zero", "llava-13b", "integrated_gradients", "cannot do the list task", "cuts none of the pictures", "24 heads"):
        assert words in first
    assert len(read_store(tmp_path / "containerize").records) == 1 + 2 * 2 * 10
    parts = sorted(path for path in tmp_path.rglob("*") if path.is_file())
    assert call(monkeypatch, *arguments) == 0
    assert capsys.readouterr().out == first
    assert sorted(path for path in tmp_path.rglob("*") if path.is_file()) == parts


def test_an_unknown_paper_is_one_line(monkeypatch, capsys):
    assert call(monkeypatch, "reproduce", "p9") == 2
    assert "p5" in capsys.readouterr().out
