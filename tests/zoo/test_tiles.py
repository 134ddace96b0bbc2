"""The shipped InternVL reads from its tiles: small objects are clearly worse without them (and large ones no less)."""

from __future__ import annotations

from sightlens.experiments import Cell, Study, pair_trials
from sightlens.interventions import Ablate
from sightlens.model import HookedVLM
from sightlens.stimuli import edits

HELD_OUT = 900_001


def test_small_objects_need_the_tiles():
    model = HookedVLM.from_pretrained("sightlens/tiny-internvl", check=False)
    pairs = edits.pairs(60, seed=HELD_OUT)
    sizes = {trial.id: pair.clean.objects[trial.question.target].size for pair in pairs for trial in pair_trials([pair])}
    trials = [trial for trial in pair_trials(pairs) if trial.question.kind == "localization"]
    cells = (Cell({"tiles": "kept"}), Cell({"tiles": "ablated"}, (Ablate("tile[*]", "mean"),)))
    result = Study("tiles", cells, tuple(trials)).run(model, progress=False, batch_size=32)
    mean = {}
    for record in result.records:
        for size in ("small", "large"):
            values = [v for name, v in zip(record.examples, record.values["iou"], strict=True) if sizes[name] == size]
            assert len(values) >= 8
            mean[record.coordinates["tiles"], size] = sum(values) / len(values)
    assert mean["kept", "small"] > 0.75
    assert mean["ablated", "small"] < mean["kept", "small"] - 0.3
    assert mean["kept", "large"] > 0.85
