"""Shuffles, containers and views: what their cells do, and what they show on the shipped models."""

from __future__ import annotations

import numpy as np
import pytest
from PIL import Image
from tests.conftest import hooked, picture
from tests.tiny import VARIANTS

from sightlens.errors import StudyError
from sightlens.experiments import (
    Trial,
    ablate_views,
    by_size,
    container_matrix,
    containerize_objects,
    object_size,
    pair_trials,
    shuffle_tokens,
    split_by_tiles,
)
from sightlens.metrics import iou
from sightlens.model import HookedVLM
from sightlens.stimuli import Question, edits

STUDIES = {
    "shuffles": lambda asked: shuffle_tokens(asked, seeds=(0, 1)),
    "containers": lambda asked: containerize_objects(asked, seeds=2),
    "views": lambda asked: ablate_views(asked, value="zero"),
}


def trials(sizes, side=20):
    made = []
    for k, (height, width) in enumerate(sizes):
        mask = np.zeros((height, width), dtype=bool)
        mask[8 : 8 + side, 10 : 10 + side] = True
        question = Question("localization", "where is the red circle ?", "", target=0, box=(10.0, 8.0, 10.0 + side, 8.0 + side))
        made.append(Trial(str(k), Image.fromarray(picture(height, width, seed=k)), question, mask))
    return tuple(made)


def shipped(name, pairs):
    boxes = [trial for trial in pair_trials(edits.pairs(pairs, seed=900_001)) if trial.question.kind == "localization"]
    return HookedVLM.from_pretrained(f"sightlens/tiny-{name}", check=False), boxes


@pytest.mark.parametrize("study", STUDIES)
@pytest.mark.parametrize("variant", [VARIANTS[0], VARIANTS[4]], ids=str)
def test_records_are_the_answers_under_each_intervention_whatever_the_batch(study, variant):
    vlm, asked = hooked(variant), trials([(48, 64), (40, 96)])
    one, many = (STUDIES[study](asked).run(vlm, batch_size=size, progress=False) for size in (1, 2))
    assert [record.notes for record in one.records] == [record.notes for record in many.records]
    for record, cell in zip(many.records, STUDIES[study](asked).cells, strict=True):
        for trial, note in zip(asked, record.notes, strict=True):
            prompt = vlm.prepare(trial.image, trial.question.text).with_objects(trial.mask)
            if "left_out" in note:
                assert "tile" in str(cell.interventions)
                assert variant is VARIANTS[0]
            else:
                assert [note["text"]] == vlm.generate(prompt, max_new_tokens=64, interventions=cell.interventions)


def test_an_object_shuffle_costs_little_and_a_full_one_much():
    vlm, asked = shipped("internvl", 20)
    found = shuffle_tokens(asked, seeds=(0, 1)).run(vlm, batch_size=20, progress=False).table("iou").set_index("condition")
    assert found.loc["image", "high"] < found.loc["view", "low"]
    assert found.loc["image", "high"] < found.loc["object", "low"]
    assert found.loc["object", "mean"] < found.loc["none", "mean"]


def test_views_and_sizes_of_a_shipped_model():
    vlm, asked = shipped("internvl", 12)
    outcome = ablate_views(asked).run(vlm, batch_size=12, progress=False)
    found = by_size(outcome, asked, metric="iou")
    assert set(found["size"]) == {"small"}
    means = found[found["tokens"] != "translated"].set_index("views")["mean"]
    assert (
        found.set_index(["tokens", "views"]).loc[("translated", "both"), "low"]
        > found.set_index(["tokens", "views"]).loc[("object", "both"), "high"]
    )
    assert means["both"] < means["global"] < means["none"]
    assert means["both"] < means["tile"] < means["none"]


def test_sizes_are_kept_apart():
    vlm, asked = hooked(VARIANTS[0]), trials([(48, 64), (200, 200)], side=24) + trials([(200, 200)], side=40)
    asked = (*asked[:2], Trial("large", asked[2].image, asked[2].question, asked[2].mask))
    assert [object_size(trial) for trial in asked] == ["small", "small", "medium"]
    found = by_size(ablate_views(asked, value="zero").run(vlm, progress=False), asked, metric="iou")
    assert found[found["views"] == "none"].set_index("size")["n"].to_dict() == {"small": 2, "medium": 1}
    with pytest.raises(StudyError, match="mask"):
        object_size(Trial("bare", asked[0].image, asked[0].question))


def test_trials_are_split_by_whether_their_picture_has_tiles():
    asked = trials([(32, 32), (48, 96)])
    tiled, single = split_by_tiles(hooked(VARIANTS[4]), asked)
    assert ([trial.id for trial in tiled], [trial.id for trial in single]) == (["1"], ["0"])
    assert split_by_tiles(hooked(VARIANTS[0]), asked) == ((), asked)


def test_containers_are_scored_against_truth_grown_by_cells():
    vlm, asked = shipped("llava", 8)
    outcome = containerize_objects(asked, seeds=2).run(vlm, batch_size=8, progress=False)
    assert [dict(record.coordinates) for record in outcome.records][:3] == [
        {"padding": p, "tokens": t, "seed": s} for p, t, s in ((0, "none", 0), (1, "object", 0), (1, "object", 1))
    ]
    record = outcome.where({"padding": 2, "tokens": "object"}).records[-1]
    for trial, note, grown in zip(asked, record.notes, record.values["iou+1"], strict=True):
        x0, y0, x1, y1 = trial.true_box  # a cell of the 8 by 8 grid on 64 pixels has 8
        truth = (max(0.0, x0 - 8), max(0.0, y0 - 8), min(64.0, x1 + 8), min(64.0, y1 + 8))
        assert grown == pytest.approx(iou(tuple(note["box"]), truth))
    matrix = container_matrix(outcome, metric="iou")
    assert (list(matrix.index), list(matrix.columns)) == ([0, 1, 2], [0, 1, 2])
    by_example = [outcome.where({"padding": 2, "tokens": "object"}).records[seed].values["iou+1"] for seed in (0, 1)]
    assert matrix.loc[2, 1] == pytest.approx(np.mean(by_example))
    assert matrix.loc[0, 0] > matrix.loc[0, 1] > matrix.loc[0, 2]


def test_the_unit_of_growth_is_an_argument_and_kept_with_the_study():
    vlm, asked = shipped("internvl", 4)
    whole, tiles = (containerize_objects(asked, paddings=(0,), unit=unit) for unit in ("global", "tile"))
    assert [study.measure.describe()["unit"] for study in (whole, tiles)] == ["global", "tile"]
    a, b = (container_matrix(study.run(vlm, progress=False), metric="iou") for study in (whole, tiles))
    assert a.loc[0, 0] == b.loc[0, 0]
    assert a.loc[0, 1] < b.loc[0, 1]  # a tile's cell is half as wide, so the true box grows less
    with pytest.raises(StudyError, match="seed"):
        containerize_objects(asked, seeds=0)
