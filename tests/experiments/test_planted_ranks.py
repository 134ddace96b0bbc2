"""On a circuit set by hand, knockout ranks the planted heads, layers and tokens first."""

from __future__ import annotations

import numpy as np
import pytest

from sightlens.experiments import AnswerLikelihood, Trial, knockout_heads, knockout_windows, token_effects
from sightlens.model import HookedVLM
from sightlens.stimuli import Question
from sightlens.zoo import planted

TEMPLATE = (
    "{% for m in messages %}USER: {% for c in m['content'] %}"
    "{% if c['type'] == 'image' %}<image>\\n{% else %}{{ c['text'] }}{% endif %}{% endfor %}{% endfor %} ASSISTANT:"
)
CIRCUIT = planted.PlantedCircuit()
AT_WORK = "object | last"  # the positions between which the circuit moves information


@pytest.fixture(scope="module")
def circuit():
    built = planted.build()
    built.processor.tokenizer.chat_template = TEMPLATE
    return HookedVLM.from_hf(built.model, built.processor)


def trials():
    made = []
    for row, column in list(np.ndindex(planted.GRID, planted.GRID))[::3]:
        shown = planted.picture(row, column)
        question = Question("classification", "where ?", planted.answer(row, column))
        made.append(Trial(f"{row}{column}", shown, question, np.asarray(shown).any(-1)))
    return made


def losses(outcome, axes):
    """Mean loss of the right answer's log-probability against the untouched run, by place."""
    means = {tuple(record.coordinates[axis] for axis in axes): np.mean(record.values["logprob"]) for record in outcome.records}
    untouched = next(value for place, value in means.items() if place[0] in ("none", -1))
    return {place: untouched - value for place, value in means.items() if place[0] not in ("none", -1)}


def roc(effects, wanted):
    """Area under the curve: the share of pairs of a planted and another place in which the planted one counts for more."""
    yes, no = ([value for place, value in effects.items() if (place in wanted) == side] for side in (True, False))
    return np.mean([a > b for a in yes for b in no])


def test_knocking_out_one_head_at_a_time_finds_the_planted_heads(circuit):
    study = knockout_heads(circuit, trials(), queries=AT_WORK, keys=AT_WORK).measured_by(AnswerLikelihood())
    found = losses(study.run(circuit, progress=False), ("keys", "layer", "head"))
    heads = {place[1:]: loss for place, loss in found.items() if place[0] == AT_WORK}
    assert len(heads) == planted.LAYERS * planted.HEADS
    assert roc(heads, CIRCUIT.heads) == 1.0
    assert min(heads[head] for head in CIRCUIT.heads) > 1.0
    controls = [loss for place, loss in found.items() if place[0] != AT_WORK]
    assert max(controls) < min(heads[head] for head in CIRCUIT.heads)  # random keys may hold the object


def test_routing_alone_reads_the_object_from_after_the_image(circuit):
    study = knockout_heads(circuit, trials()).measured_by(AnswerLikelihood())
    heads = {place[1:]: loss for place, loss in losses(study.run(circuit, progress=False), ("keys", "layer", "head")).items()
             if place[0] == "object"}  # fmt: skip
    assert roc(heads, [CIRCUIT.routing]) == 1.0
    assert max(loss for head, loss in heads.items() if head != CIRCUIT.routing) < 0.1


def test_windows_of_one_layer_find_the_planted_layers(circuit):
    study = knockout_windows(trials(), queries=AT_WORK, keys=AT_WORK, width=1).measured_by(AnswerLikelihood())
    found = losses(study.run(circuit, progress=False), ("keys", "layers"))
    layers = {place[1]: loss for place, loss in found.items() if place[0] == AT_WORK and place[1] != "all"}
    assert roc(layers, [f"{layer}–{layer}" for layer, _ in CIRCUIT.heads]) == 1.0


def test_ablating_one_token_at_a_time_finds_the_object(circuit):
    cells = np.ndindex(planted.GRID, planted.GRID)
    circuit.fit_mean([circuit.prepare(planted.picture(row, column), "where ?") for row, column in cells], source="planted pictures")
    for trial in trials():
        layout = circuit.prepare(trial.image, trial.question.text).layout
        study = token_effects(trial, positions=layout.select("image").positions)
        found = losses(study.run(circuit, progress=False), ("token",))
        assert roc(found, [(int(place),) for place in layout.object(trial.mask).positions]) == 1.0
