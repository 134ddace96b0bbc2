"""Pairs of scenes that differ in one edit and nowhere else."""

from dataclasses import replace

import numpy as np

from sightlens.errors import StimulusError
from sightlens.stimuli.questions import counting, existence, localization, unique_targets
from sightlens.stimuli.shapes import Placed, Scene, Style, compose, draw, find_corner
from sightlens.stimuli.stimulus import Pair, Question, Stimulus


def remove(scene: Scene, target: int) -> Pair:
    """Take one object away."""
    _check(scene, target)
    rest = scene.objects[:target] + scene.objects[target + 1 :]
    return _pair(scene, replace(scene, objects=rest), change="remove", changed=(target,))


def move(scene: Scene, target: int, *, offset: tuple[int, int]) -> Pair:
    """Shift one object by (right, down) pixels, without leaving the picture or meeting another object."""
    _check(scene, target)
    item = scene.objects[target]
    moved = replace(item, left=item.left + offset[0], top=item.top + offset[1])
    others = scene.objects[:target] + scene.objects[target + 1 :]
    if offset == (0, 0):
        raise StimulusError("an offset that moves the object", "(0, 0)", "Give pixels to the right and down.")
    if not _inside(moved, scene) or any(_touch(moved, other) for other in others):
        raise StimulusError(
            f"an offset that keeps object {target} inside the picture and apart from the others",
            repr(offset),
            "Choose a smaller or another one, or use `relocate`.",
        )
    objects = (*scene.objects[:target], moved, *scene.objects[target + 1 :])
    return _pair(scene, replace(scene, objects=objects), change="move", changed=(target,))


def relocate(scene: Scene, target: int, *, seed: int = 0) -> Pair:
    """Move one object to a free place drawn at random."""
    _check(scene, target)
    item = scene.objects[target]
    rng = np.random.default_rng([scene.seed, scene.index, 3, seed])
    taken = [other.box for k, other in enumerate(scene.objects) if k != target] + [item.box]
    corner = find_corner(rng, item.side, style=scene.style, taken=taken)
    if corner is None:
        raise StimulusError(
            f"a free place of {item.side} pixels in scene {scene.seed}-{scene.index}",
            f"{len(scene.objects)} objects in the way",
            "Use fewer or smaller objects, or a larger picture.",
        )
    return move(scene, target, offset=(corner[0] - item.left, corner[1] - item.top))


def recount(scene: Scene, target: int, *, number: int) -> Pair:
    """Change how many objects look like the target: take the last ones away, or add copies at free places."""
    _check(scene, target)
    if number < 0:
        raise StimulusError("a number of 0 or more", str(number), "Ask for a positive number.")
    item = scene.objects[target]
    twins = [k for k, other in enumerate(scene.objects) if other.label == item.label]
    gone = set(twins[number:])
    kept = tuple(other for k, other in enumerate(scene.objects) if k not in gone)
    added = _copies(replace(scene, objects=kept), item, number - len(twins))
    if not gone and not added:
        raise StimulusError("a number that changes the scene", f"{number}, as it is", f"Ask for another number of {item.label!r}.")
    pair = _pair(scene, replace(scene, objects=kept + added), change="recount", changed=tuple(sorted(gone)))
    return replace(pair, questions=(counting(pair.clean, colour=item.colour, shape=item.shape),))


def pairs(number: int, *, seed: int = 0, change: str = "remove", style: Style | None = None) -> list[Pair]:
    """Draw `number` pairs whose edited object is the only one with its label; scenes without such an object are skipped."""
    edit = {"remove": remove, "move": relocate}.get(change)
    if edit is None:
        raise StimulusError("a change that is 'remove' or 'move'", repr(change), "Use `recount` scene by scene for numbers.")
    made: list[Pair] = []
    index = 0
    while len(made) < number and index < 100 * number + 100:
        scene = compose(seed, index, style=style)
        index += 1
        unique = unique_targets(draw(scene))
        if not unique:
            continue
        try:
            made.append(edit(scene, unique[0]))
        except StimulusError:
            continue
    if len(made) < number:
        raise StimulusError(f"room for {number} pairs in this style", f"{len(made)}", "Allow a larger picture or more kinds.")
    return made


def _pair(clean: Scene, corrupted: Scene, *, change: str, changed: tuple[int, ...]) -> Pair:
    before, after = draw(clean), draw(corrupted)
    after = replace(after, id=f"{after.id}-{change}")
    region = np.zeros((clean.style.height, clean.style.width), dtype=bool)
    old, new = set(clean.objects), set(corrupted.objects)
    for item, drawn in [*zip(clean.objects, before.objects, strict=True), *zip(corrupted.objects, after.objects, strict=True)]:
        if item in old ^ new:
            region |= drawn.mask
    return Pair(before, after, change, region, changed, _about(before, changed))


def _about(stimulus: Stimulus, changed: tuple[int, ...]) -> tuple[Question, ...]:
    asked: list[Question] = []
    for target in changed:
        asked.append(existence(stimulus, stimulus.objects[target].label))
        if target in unique_targets(stimulus):
            asked.append(localization(stimulus, target))
    return tuple(asked)


def _copies(scene: Scene, item: Placed, number: int) -> tuple[Placed, ...]:
    rng = np.random.default_rng([scene.seed, scene.index, 4])
    added: list[Placed] = []
    for _ in range(max(0, number)):
        taken = [other.box for other in scene.objects + tuple(added)]
        corner = find_corner(rng, item.side, style=scene.style, taken=taken)
        if corner is None:
            raise StimulusError(
                f"room for {number} more of {item.label!r} in scene {scene.seed}-{scene.index}",
                f"{len(added)} placed",
                "Use a larger picture or a lower number.",
            )
        added.append(replace(item, left=corner[0], top=corner[1]))
    return tuple(added)


def _inside(item: Placed, scene: Scene) -> bool:
    return 0 <= item.left <= scene.style.width - item.side and 0 <= item.top <= scene.style.height - item.side


def _touch(one: Placed, other: Placed) -> bool:
    (a0, b0, a1, b1), (c0, d0, c1, d1) = one.box, other.box
    return a0 < c1 and c0 < a1 and b0 < d1 and d0 < b1


def _check(scene: Scene, target: int) -> None:
    if not 0 <= target < len(scene.objects):
        raise StimulusError(f"the index of one of {len(scene.objects)} objects", str(target), "Choose an object of the scene.")
