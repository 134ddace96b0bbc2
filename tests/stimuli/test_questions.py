"""Every answer is checked against a recount made here from the objects."""

import numpy as np
import pytest

from sightlens.errors import StimulusError
from sightlens.stimuli import questions, shapes

SCENES = shapes.dataset(120, seed=21)
SINGULAR = {plural: shape for shape, plural in questions.PLURALS.items()}


def asked() -> list:
    return [(s, q) for k, s in enumerate(SCENES) for q in questions.sample_questions(s, np.random.default_rng(k))]


def test_all_kinds_are_sampled() -> None:
    kinds = {(q.kind, q.negative) for _, q in asked()}
    assert kinds >= {("existence", k) for k in (None, "colour", "shape", "crossed")} | {("localization", None), ("counting", None)}


def test_existence_answers_are_true() -> None:
    for stimulus, question in asked():
        if question.kind != "existence":
            continue
        colour, shape = question.text.removeprefix("is there a ").removesuffix(" ?").split()
        colours, forms = {item.colour for item in stimulus.objects}, {item.shape for item in stimulus.objects}
        there = any(item.colour == colour and item.shape == shape for item in stimulus.objects)
        assert question.answer == ("yes" if there else "no")
        reason = {(False, True): "colour", (True, False): "shape", (True, True): "crossed"}.get((colour in colours, shape in forms))
        assert question.negative == (None if there else reason)


def test_counts_are_true() -> None:
    for stimulus, question in asked():
        if question.kind != "counting":
            continue
        words = question.text.removeprefix("how many ").removesuffix(" ?").split()
        matching = list(stimulus.objects)
        for word in words:
            if word in shapes.COLOURS:
                matching = [item for item in matching if item.colour == word]
            elif word in SINGULAR:
                matching = [item for item in matching if item.shape == SINGULAR[word]]
        assert question.answer == str(len(matching)) == str(question.number)


def test_localization_asks_for_the_only_one() -> None:
    for stimulus, question in asked():
        if question.kind != "localization":
            continue
        colour, shape = question.text.removeprefix("where is the ").removesuffix(" ?").split()
        named = [item for item in stimulus.objects if (item.colour, item.shape) == (colour, shape)]
        assert [item.box for item in named] == [question.box]
        assert stimulus.objects[question.target] is named[0]


def test_absent_labels_are_absent_for_the_reason() -> None:
    for stimulus in SCENES:
        for kind in questions.NEGATIVES:
            for label in questions.absent_labels(stimulus, kind):
                assert questions.existence(stimulus, label).negative == kind
                assert questions.existence(stimulus, label).answer == "no"


def test_bad_questions_are_refused() -> None:
    twins = next(s for s in SCENES if len(questions.unique_targets(s)) < len(s.objects))
    repeated = next(k for k in range(len(twins.objects)) if k not in questions.unique_targets(twins))
    for call in (
        lambda: questions.localization(twins, repeated),
        lambda: questions.localization(twins, len(twins.objects)),
        lambda: questions.existence(twins, "pink circle"),
        lambda: questions.existence(twins, "circle"),
        lambda: questions.counting(twins, shape="star"),
    ):
        with pytest.raises(StimulusError, match="expected"):
            call()
