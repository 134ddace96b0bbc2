"""Questions about a drawn scene, with answers that are true of it."""

from collections import Counter

import numpy as np

from sightlens.errors import StimulusError
from sightlens.stimuli.shapes import COLOURS, SHAPES
from sightlens.stimuli.stimulus import NegativeKind, Question, Stimulus

PLURALS = {"circle": "circles", "square": "squares", "triangle": "triangles", "cross": "crosses"}
NEGATIVES: tuple[NegativeKind, ...] = ("colour", "shape", "crossed")


def existence(stimulus: Stimulus, label: str) -> Question:
    """Ask whether an object with this label ("red circle") is there."""
    colour, shape = split_label(label)
    found = [k for k, item in enumerate(stimulus.objects) if item.label == label]
    target = found[0] if len(found) == 1 else None
    negative = None if found else negative_kind(stimulus, colour, shape)
    answer = "yes" if found else "no"
    return Question("existence", f"is there a {label} ?", answer, target=target, negative=negative)


def localization(stimulus: Stimulus, target: int) -> Question:
    """Ask where an object is; no other object of the scene may carry its label."""
    if not 0 <= target < len(stimulus.objects):
        raise StimulusError(f"the index of one of {len(stimulus.objects)} objects", str(target), "Choose an object of the scene.")
    item = stimulus.objects[target]
    twins = sum(other.label == item.label for other in stimulus.objects)
    if twins > 1:
        raise StimulusError(
            "a localization target with a label of its own",
            f"{twins} objects that are a {item.label}",
            "Choose one of `unique_targets`.",
        )
    return Question("localization", f"where is the {item.label} ?", "", target=target, box=item.box)


def classification(stimulus: Stimulus, target: int) -> Question:
    """Ask which of all labels are there, in words that the shipped models know; right when the list names the target's."""
    if not 0 <= target < len(stimulus.objects):
        raise StimulusError(f"the index of one of {len(stimulus.objects)} objects", str(target), "Choose an object of the scene.")
    labels = ", ".join(f"{colour} {shape}" for colour in COLOURS for shape in SHAPES)
    return Question("classification", f"what objects are in the image, of {labels} ?", stimulus.objects[target].label, target=target)


def counting(stimulus: Stimulus, *, colour: str | None = None, shape: str | None = None) -> Question:
    """Ask how many objects have this colour, this shape, or both; with neither, how many objects there are."""
    _known(colour, shape)
    number = sum(colour in (None, item.colour) and shape in (None, item.shape) for item in stimulus.objects)
    words = [word for word in (colour, PLURALS[shape] if shape else "objects") if word]
    return Question("counting", f"how many {' '.join(words)} ?", str(number), number=number)


def unique_targets(stimulus: Stimulus) -> list[int]:
    """Indices of the objects whose label no other object carries."""
    seen = Counter(item.label for item in stimulus.objects)
    return [k for k, item in enumerate(stimulus.objects) if seen[item.label] == 1]


def absent_labels(stimulus: Stimulus, kind: NegativeKind) -> list[str]:
    """Labels that are absent for one reason: colour (only the shape is there), shape (only the colour), crossed (both)."""
    labels = (f"{colour} {shape}" for colour in COLOURS for shape in SHAPES)
    present = {item.label for item in stimulus.objects}
    return [label for label in labels if label not in present and negative_kind(stimulus, *label.split()) == kind]


def negative_kind(stimulus: Stimulus, colour: str, shape: str) -> NegativeKind | None:
    """Why no object is of this colour and shape; None when neither feature is in the scene."""
    has_colour = any(item.colour == colour for item in stimulus.objects)
    has_shape = any(item.shape == shape for item in stimulus.objects)
    if has_colour:
        return "crossed" if has_shape else "shape"
    return "colour" if has_shape else None


def sample_questions(stimulus: Stimulus, rng: np.random.Generator) -> tuple[Question, ...]:
    """Up to ten questions: four on existence (half of them negative), three on location, three on number."""
    chosen = _existence_sample(stimulus, rng)
    unique = unique_targets(stimulus)
    picked = rng.permutation(unique)[:3] if unique else []
    chosen += [localization(stimulus, int(k)) for k in picked]
    return tuple(chosen + _counting_sample(stimulus, rng))


def split_label(label: str) -> tuple[str, str]:
    """Colour and shape of a label such as "red circle"."""
    words = label.split()
    if len(words) != 2:
        raise StimulusError("a colour and a shape, such as 'red circle'", repr(label), "Write the label as two words.")
    _known(*words)
    return words[0], words[1]


def _known(colour: str | None, shape: str | None) -> None:
    if colour is not None and colour not in COLOURS:
        raise StimulusError(f"a colour among {sorted(COLOURS)}", repr(colour), "Choose one of them.")
    if shape is not None and shape not in SHAPES:
        raise StimulusError(f"a shape among {SHAPES}", repr(shape), "Choose one of them.")


def _existence_sample(stimulus: Stimulus, rng: np.random.Generator) -> list[Question]:
    present = sorted({item.label for item in stimulus.objects})
    asked = [present[k] for k in rng.permutation(len(present))[:2]]
    reasons = ("crossed", NEGATIVES[int(rng.integers(3))])
    for reason in reasons:
        absent = absent_labels(stimulus, reason)
        if absent:
            asked.append(absent[int(rng.integers(len(absent)))])
    return [existence(stimulus, label) for label in asked]


def _counting_sample(stimulus: Stimulus, rng: np.random.Generator) -> list[Question]:
    """All objects, then two of: one kind, one colour, one shape, each about an object of the scene four times in five."""
    asked = [counting(stimulus)]
    for scope in rng.permutation(3)[:2]:
        colour, shape = list(COLOURS)[int(rng.integers(len(COLOURS)))], SHAPES[int(rng.integers(len(SHAPES)))]
        if stimulus.objects and rng.random() < 0.8:
            item = stimulus.objects[int(rng.integers(len(stimulus.objects)))]
            colour, shape = item.colour, item.shape
        asked.append(counting(stimulus, colour=None if scope == 1 else colour, shape=None if scope == 2 else shape))
    return asked
