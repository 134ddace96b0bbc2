"""Pairs differ inside their region and nowhere else, and do what they say."""

import numpy as np
import pytest

from sightlens.errors import StimulusError
from sightlens.stimuli import edits, questions, shapes
from sightlens.stimuli.shapes import Style, compose, draw


def changed_pixels(pair) -> np.ndarray:
    return (np.asarray(pair.clean.image) != np.asarray(pair.corrupted.image)).any(-1)


@pytest.mark.parametrize("change", ["remove", "move"])
@pytest.mark.parametrize("style", [Style(), Style(80, 48, count=(1, 4))], ids=["square", "wide"])
def test_pictures_are_equal_outside_the_edit(change: str, style: Style) -> None:
    for pair in edits.pairs(25, seed=7, change=change, style=style):
        differs = changed_pixels(pair)
        assert differs.any()
        assert not (differs & ~pair.region).any()
        touched = pair.clean.objects[pair.changed[0]]
        assert (differs & touched.mask).sum() > 0.9 * touched.mask.sum()


def test_move_goes_right_and_down() -> None:
    scene = shapes.Scene(2, 2, Style(), (shapes.Placed("square", "red", "small", 10, 20, 8),))
    pair = edits.move(scene, 0, offset=(7, -3))
    assert pair.corrupted.objects[0].box == (17, 17, 25, 25)


def test_remove_takes_one_object() -> None:
    for pair in edits.pairs(25, seed=8):
        gone = pair.clean.objects[pair.changed[0]]
        assert [i.box for i in pair.corrupted.objects] == [i.box for i in pair.clean.objects if i is not gone]
        assert {q.kind for q in pair.questions} == {"existence", "localization"}
        assert questions.existence(pair.corrupted, gone.label).answer == "no"
        assert (pair.region == gone.mask).all()


def test_move_keeps_everything_but_the_place() -> None:
    for pair in edits.pairs(25, seed=9, change="move"):
        target = pair.changed[0]
        for k, (before, after) in enumerate(zip(pair.clean.objects, pair.corrupted.objects, strict=True)):
            assert before.label == after.label
            assert (before.box == after.box) == (k != target)
            assert before.mask.sum() == after.mask.sum()


@pytest.mark.parametrize("number", [0, 1, 2, 4])
def test_recount_gives_the_number(number: int) -> None:
    done = 0
    for index in range(150):
        scene = compose(10, index, style=Style(128, 128, count=(1, 4)))
        label = scene.objects[0].label
        if sum(item.label == label for item in scene.objects) == number:
            continue
        pair = edits.recount(scene, 0, number=number)
        assert sum(item.label == label for item in pair.corrupted.objects) == number
        others = [item.box for item in pair.clean.objects if item.label != label]
        assert [item.box for item in pair.corrupted.objects if item.label != label] == others
        assert not (changed_pixels(pair) & ~pair.region).any()
        assert pair.questions[0].number != number
        done += 1
    assert done > 20


def test_pairs_are_deterministic() -> None:
    one, other = edits.pairs(5, seed=3, change="move"), edits.pairs(5, seed=3, change="move")
    assert all((np.asarray(a.corrupted.image) == np.asarray(b.corrupted.image)).all() for a, b in zip(one, other, strict=True))


def test_bad_edits_are_refused() -> None:
    scene = next(s for s in (compose(1, k) for k in range(50)) if len(s.objects) >= 2)
    first, second = scene.objects[:2]
    meeting = (second.left - first.left, second.top - first.top)
    same = sum(item.label == first.label for item in scene.objects)
    for call in (
        lambda: edits.remove(scene, len(scene.objects)),
        lambda: edits.move(scene, 0, offset=(0, 0)),
        lambda: edits.move(scene, 0, offset=(1000, 0)),
        lambda: edits.move(scene, 0, offset=meeting),
        lambda: edits.recount(scene, 0, number=-1),
        lambda: edits.recount(scene, 0, number=same),
        lambda: edits.recount(scene, 0, number=60),
        lambda: edits.pairs(2, change="paint"),
        lambda: edits.pairs(2, style=Style(count=(0, 0))),
    ):
        with pytest.raises(StimulusError, match="expected"):
            call()
    full = shapes.Scene(0, 0, Style(24, 24), (shapes.Placed("square", "red", "large", 0, 0, 24),))
    with pytest.raises(StimulusError, match="free place"):
        edits.relocate(full, 0)
    assert draw(scene).objects
