"""The command line: what it prints and writes, and errors without tracebacks."""

from __future__ import annotations

import sys

import pandas as pd
import pytest
from PIL import Image

from sightlens import cli
from sightlens.experiments.config import read_plan
from sightlens.stimuli import edits
from sightlens.store import read_store


def call(monkeypatch, *arguments: object) -> int:
    monkeypatch.setattr(sys, "argv", ["sightlens", *map(str, arguments)])
    with pytest.raises(SystemExit) as stopped:
        cli.main()
    return int(stopped.value.code or 0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Three pictures with masks and a configuration."""
    base = tmp_path_factory.mktemp("mine")
    entries = []
    for k, pair in enumerate(edits.pairs(3, seed=31)):
        question = next(q for q in pair.questions if q.kind == "localization")
        pair.clean.image.save(base / f"{k}.png")
        Image.fromarray(pair.clean.objects[question.target].mask).save(base / f"{k}-mask.png")
        files = f'[[trial]]\nimage = "{k}.png"\nmask = "{k}-mask.png"\n'
        entries.append(f'{files}question = "{question.text}"\nkind = "localization"\nbox = {list(question.box)}\n')
    head = 'model = "sightlens/tiny-llava"\nstore = "out"\nmean_images = "?.png"\n'
    head += '[study]\nkind = "ablate_tokens"\npaddings = [0]\nseeds = [0]\n'
    (base / "study.toml").write_text(head + "\n".join(entries))
    return base


def test_layout_prints_and_draws(monkeypatch, capsys, folder):
    code = call(monkeypatch, "layout", folder / "0.png", "--select", "image & row[0]", "--out", folder / "layout.png")
    printed = capsys.readouterr().out
    assert code == 0
    assert "image(8×8)" in printed
    assert "row[0]" in printed
    assert Image.open(folder / "layout.png").width > 300


def test_run_writes_records_and_goes_on(monkeypatch, capsys, folder):
    assert call(monkeypatch, "run", folder / "study.toml") == 0
    assert "translated" in capsys.readouterr().out
    result = read_store(folder / "out")
    assert len(result.records) == 4
    assert len(result.examples) == 3
    table = pd.read_csv(folder / "out" / "summary.csv")
    assert set(table["condition"]) == {"none", "object", "random", "translated"}
    assert call(monkeypatch, "run", folder / "study.toml") == 0
    assert len(read_store(folder / "out").records) == 4


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (('kind = "ablate_tokens"', 'kind = "ablte"'), "kind"),
        (("paddings = [0]", "padings = [0]"), "padings"),
        (('image = "0.png"', 'image = "no.png"'), "does not exist"),
        (('kind = "localization"', 'kind = "existence"'), "answer"),
        (("[study]", "[study"), "TOML"),
        (('model = "sightlens/tiny-llava"', 'model = "./nowhere"'), "checkpoint"),
        (("store", "sotre"), "sotre"),
    ],
)
def test_mistakes_in_a_file_are_one_line_and_exit_code_2(monkeypatch, capsys, folder, change, words):
    text = (folder / "study.toml").read_text()
    assert change[0] in text
    (folder / "wrong.toml").write_text(text.replace(change[0], change[1], 1))
    assert call(monkeypatch, "run", folder / "wrong.toml") == 2
    printed = capsys.readouterr().out
    assert words in printed
    assert "Traceback" not in printed


def test_other_mistakes(monkeypatch, capsys, folder):
    for arguments, words in (
        (("layout", folder / "nothing.png"), "does not exist"),
        (("layout", folder / "study.toml"), "image file"),
        (("layout", folder / "0.png", "--select", "imgae"), "imgae"),
        (("layout", folder / "0.png", "--max-tiles", 4), "max_tiles"),
        (("layout", folder / "0.png", "--model", folder), "config.json"),
        (("run", folder / "none.toml"), "none.toml"),
    ):
        assert call(monkeypatch, *arguments) == 2
        assert words in capsys.readouterr().out


@pytest.mark.parametrize("model", ["sightlens/tiny-llava", "sightlens/tiny-internvl"])
def test_check_passes_on_the_shipped_models(monkeypatch, capsys, model):
    assert call(monkeypatch, "check", model) == 0
    printed = capsys.readouterr().out
    assert "FAIL" not in printed
    assert printed.count("ok   hooks") > 150
    paths, hooks = (printed.count(f"ok   {kind}") for kind in ("paths", "hooks"))
    assert printed.splitlines()[-1] == f"All {paths + 8 + hooks} checks passed: {paths} of paths, 8 of layout, {hooks} of hooks."


def test_demo_writes_a_report(monkeypatch, capsys, tmp_path):
    assert call(monkeypatch, "demo", "--pairs", 3, "--out", tmp_path) == 0
    page = (tmp_path / "report.html").read_text()
    assert len(list(tmp_path.glob("*.png"))) == 6
    assert "http" not in page.replace("http://www.w3.org", "")
    assert page.count("<img") == 6
    assert len(page) < 1_500_000


MODEL, STUDY, BOX = 'model = "sightlens/tiny-llava"', 'kind = "ablate_tokens"', "box = [1, 2, 30, 40]"
CELLS = '[study]\nkind = "cells"\n[[cell]]\nat = {a = 1}\n'
PLAN = f"""{MODEL}
batch_size = 1
[study]
{STUDY}
[[trial]]
image = "0.png"
question = "where is it ?"
kind = "localization"
{BOX}
"""
WRONG = [
    ("batch_size = 1", 'batch_size = "x"', "batch_size"),
    ("batch_size = 1", "batch_size = true", "batch_size"),
    ("batch_size = 1", "report = 3", "report"),
    ("batch_size = 1", "store = 3", "store"),
    ("batch_size = 1", 'store = "a\\u0000b"', "folder"),
    ("batch_size = 1", 'mean_images = "/nowhere/*.png"', "/nowhere/*.png"),
    ("batch_size = 1", "mean_images = 3", "mean_images"),
    ("batch_size = 1", 'cell = "x"', "cell"),
    (MODEL, "model = 3", "model"),
    (f"[study]\n{STUDY}", 'study = "x"', "study"),
    (STUDY, 'kind = ["a"]', "kind"),
    (STUDY, f'{STUDY}\nseeds = "x"', "seeds"),
    (STUDY, f"{STUDY}\npaddings = 3", "paddings"),
    (STUDY, f'{STUDY}\nseed = "x"', "seed"),
    (STUDY, 'kind = "knockout_windows"\nwidth = "x"', "width"),
    (f"[study]\n{STUDY}", CELLS + 'do = "x"', "do"),
    (f"[study]\n{STUDY}", CELLS + 'do = ["x"]', "interventions as tables"),
    (f"[study]\n{STUDY}", CELLS + 'do = [{kind = "ablate"}]', "'at'"),
    (f"[study]\n{STUDY}", CELLS + 'do = [{kind = "ablate", at = "image", seed = "x"}]', "seed"),
    (f"[study]\n{STUDY}", CELLS + 'do = [{kind = "patch_in", site = "hook_merged_embed"}]', "the donor 'clean'"),
    (f"[study]\n{STUDY}", CELLS + "dew = []", "dew"),
    (f"[study]\n{STUDY}", CELLS.replace('cells"', 'cells"\nseed = 3'), "seed"),
    ("[[trial]]", "[trial]", "[[trial]]"),
    ('image = "0.png"', "image = 3", "image"),
    ('question = "where is it ?"', "question = 3", "question"),
    (BOX, 'box = ["a", 1, 2, 3]', "box"),
    (BOX, "box = 3", "box"),
    (BOX, "box = [9, 9, 1, 1]", "box"),
    (BOX, "box = [nan, 0, 9, 9]", "box"),
    (BOX, BOX + '\nnumber = "x"', "number"),
]


@pytest.mark.parametrize(("old", "new", "words"), WRONG, ids=[new[-40:] for _, new, _ in WRONG])
def test_bad_values_in_a_file_are_one_line(monkeypatch, capsys, folder, old, new, words):
    assert PLAN.count(old) == 1
    if "\\u0000" not in new:  # that one is for the store, which a model opens
        monkeypatch.setattr(cli, "_load", lambda name: pytest.fail("the model was loaded"))
    (folder / "bad.toml").write_text(PLAN.replace(old, new))
    assert call(monkeypatch, "run", folder / "bad.toml") == 2
    printed = capsys.readouterr().out
    assert words in printed
    assert printed.startswith("error: ")


def test_a_place_that_cannot_be_written_is_one_line(monkeypatch, capsys, folder):
    (folder / "taken").write_text("")
    assert call(monkeypatch, "layout", folder / "0.png", "--out", folder / "taken" / "x.png") == 2
    assert "error: " in capsys.readouterr().out


def test_absolute_patterns_find_pictures(folder):
    (folder / "absolute.toml").write_text(PLAN.replace("batch_size = 1", f'mean_images = "{folder}/?.png"'))
    assert [path.name for path in read_plan(folder / "absolute.toml").mean_images] == ["0.png", "1.png", "2.png"]
