"""Position probes on activations of which the answer is known."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from jaxtyping import TypeCheckError

from sightlens.errors import ProbeError
from sightlens.probes import PositionProbes, ProbeBatch, ProbeSettings, ProbeShape, SiteTokens, held_out, load_probes
from sightlens.probes.tokens import shuffle_labels

ROWS, COLUMNS = 3, 4
SHAPES = {"told": ProbeShape(10, ROWS, COLUMNS), "noise": ProbeShape(6, ROWS, COLUMNS), "half": ProbeShape(10, ROWS, COLUMNS)}
FAST = ProbeSettings(epochs=1, learning_rate=0.03, test_share=0.3)


def batch(start: int, images: int = 8) -> ProbeBatch:
    """``told`` states row and column, ``noise`` nothing, ``half`` the row only in the left half and no column."""
    ids = tuple(f"image {k}" for k in range(start, start + images))
    rng = np.random.default_rng(start)
    row, column = np.indices((ROWS, COLUMNS))
    told = np.concatenate([np.eye(ROWS)[row], np.eye(COLUMNS)[column], np.zeros((ROWS, COLUMNS, 3))], -1)
    half = told * (column < COLUMNS // 2)[..., None] * (np.arange(10) < ROWS)
    noise = rng.normal(0, 1, (images, ROWS, COLUMNS, 6))
    values = {"told": 5 + told + rng.normal(0, 0.05, (images, ROWS, COLUMNS, 10)), "noise": noise}
    values["half"] = half + rng.normal(0, 0.05, (images, ROWS, COLUMNS, 10))
    return ProbeBatch(ids, {site: SiteTokens.of_grids(torch.tensor(value, dtype=torch.float32)) for site, value in values.items()})


@pytest.fixture(scope="module")
def trained() -> PositionProbes:
    probes = PositionProbes(SHAPES, FAST)
    for _ in range(6):
        for start in range(0, 400, 8):
            probes.learn(batch(start))
    for start in range(0, 400, 8):
        probes.judge(batch(start))
    return probes


def test_probes_find_what_is_there_and_nothing_else(trained):
    reports = trained.reports()
    told, noise = reports["told"].axes, reports["noise"].axes
    assert [told[axis].accuracy for axis in ("row", "column", "both")] == [1, 1, 1]
    for axis, chance in (("row", 1 / 3), ("column", 1 / 4), ("both", 1 / 12)):
        assert noise[axis].chance == told[axis].chance == pytest.approx(chance)
        assert noise[axis].accuracy == pytest.approx(chance, abs=0.08)
        for scores in (told, noise):
            assert scores[axis].control_accuracy == pytest.approx(chance, abs=0.08)


def test_the_map_shows_where(trained):
    report = trained.reports()["half"]
    rows = report.accuracy_map("row")
    assert rows.shape == (ROWS, COLUMNS)
    assert rows[:, : COLUMNS // 2].min() > 0.95
    assert rows[:, COLUMNS // 2 :].mean() == pytest.approx(1 / 3, abs=0.1)
    assert report.axes["row"].accuracy == pytest.approx(rows.mean())
    tested = sum(held_out(f"image {k}", FAST) for k in range(400))
    assert (report.axes["row"].tokens == tested).all()
    assert np.isnan(PositionProbes(SHAPES, FAST).reports()["told"].accuracy_map()).all()
    data = json.loads(json.dumps(report.to_dict()))
    assert data["axes"]["row"]["map"] == rows.tolist()


def test_one_optimizer_step_equals_probes_trained_apart():
    together = PositionProbes(SHAPES, FAST)
    apart = {site: PositionProbes({site: shape}, FAST) for site, shape in SHAPES.items()}
    for start in (0, 8, 16):
        together.learn(batch(start))
        for site, probes in apart.items():
            probes.learn(ProbeBatch(batch(start).images, {site: batch(start).sites[site]}))
    for start in (0, 8):
        together.judge(batch(start))
        for site, probes in apart.items():
            probes.judge(ProbeBatch(batch(start).images, {site: batch(start).sites[site]}))
    for site, probes in apart.items():
        one, other = together.reports()[site].axes["both"], probes.reports()[site].axes["both"]
        assert (one.correct == other.correct).all()
        assert (one.control == other.control).all()


def test_the_split_goes_by_image_and_training_never_sees_the_test():
    sides = [held_out(f"image {k}", FAST) for k in range(2000)]
    assert np.mean(sides) == pytest.approx(0.3, abs=0.05)
    assert sides != [held_out(f"image {k}", ProbeSettings(test_share=0.3, seed=1)) for k in range(2000)]
    only_test = tuple(f"image {k}" for k in range(2000) if sides[k])[:8]
    probes = PositionProbes(SHAPES, FAST)
    assert np.isnan(probes.learn(ProbeBatch(only_test, batch(0).sites)))
    only_train = tuple(f"image {k}" for k in range(2000) if not sides[k])[:8]
    probes.judge(ProbeBatch(only_train, batch(0).sites))
    assert probes.reports()["told"].axes["row"].tokens.sum() == 0
    assert probes.learn(ProbeBatch(only_train, batch(0).sites)) == pytest.approx(2 * np.log(3) + 2 * np.log(4), rel=1e-5)


def test_shuffled_labels_stay_the_same_for_an_image_wherever_it_is():
    labels = torch.arange(ROWS * COLUMNS)
    two, owners = torch.cat([labels, labels]), torch.tensor([0] * 12 + [1] * 12)
    both = shuffle_labels(two, owners, ("a", "b"), seed=0)
    assert both[:12].tolist() != labels.tolist()
    assert sorted(both[:12].tolist()) == labels.tolist()
    assert both[:12].tolist() != both[12:].tolist()
    assert shuffle_labels(labels, owners[12:] - 1, ("b",), seed=0).tolist() == both[12:].tolist()
    assert shuffle_labels(labels, owners[:12], ("a",), seed=1).tolist() != both[:12].tolist()


def test_probes_come_back_from_disk(trained, tmp_path):
    trained.save(tmp_path / "probes.safetensors")
    again = load_probes(tmp_path / "probes.safetensors")
    assert (again.shapes, again.settings) == (trained.shapes, trained.settings)
    fresh = PositionProbes(SHAPES, FAST)
    for probes in (again, fresh):
        probes.judge(batch(0))
    assert again.reports()["told"].axes["both"].accuracy == 1
    assert fresh.reports()["told"].axes["both"].accuracy < 0.5
    (tmp_path / "other.safetensors").write_bytes(b"no probes")
    for name in ("other.safetensors", "none.safetensors"):
        with pytest.raises(ProbeError, match=name):
            load_probes(tmp_path / name)


def test_what_does_not_fit_is_refused():
    probes = PositionProbes(SHAPES, FAST)
    wide = {**batch(0).sites, "told": SiteTokens.of_grids(torch.zeros(8, ROWS, COLUMNS + 1, 10))}
    thin = {**batch(0).sites, "told": SiteTokens.of_grids(torch.zeros(8, ROWS, COLUMNS, 9))}
    for sites, words in (({"told": batch(0).sites["told"]}, "noise"), (wide, "tokens within"), (thin, "tokens within")):
        with pytest.raises(ProbeError, match=words):
            probes.learn(ProbeBatch(batch(0).images, sites))
    for bad in ({"epochs": 0}, {"learning_rate": 0.0}, {"test_share": 1.0}, {"weight_decay": -1.0}):
        with pytest.raises((ProbeError, TypeCheckError)):
            ProbeSettings(**bad)
    with pytest.raises(ProbeError, match="at least one site"):
        PositionProbes({})
