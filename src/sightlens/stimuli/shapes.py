"""Scenes of coloured shapes on a textured background, drawn from a seed.

A `Scene` describes a picture completely; `draw` turns it into a `Stimulus`. The background depends on the seed and the
index alone and every object is composed independently, so two scenes that differ in one object differ in its pixels only.
"""

from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np
from jaxtyping import Bool, UInt8
from PIL import Image

from sightlens.errors import StimulusError
from sightlens.stimuli.stimulus import SceneObject, Stimulus

COLOURS = {
    "red": (220, 40, 40),
    "green": (40, 180, 60),
    "blue": (50, 80, 230),
    "yellow": (235, 215, 50),
}
SHAPES = ("circle", "square", "triangle", "cross")
SIDES = {"small": (8, 11), "medium": (12, 16), "large": (17, 24)}
TRIES = 40


@dataclass(frozen=True)
class Style:
    """How scenes are drawn.

    `width`, `height`: pixels. `count`: least and greatest number of objects (fewer are placed when the picture is full).
    `sides`: side of an object in pixels per size name, both ends included, multiplied by `scale`. `gap`: least number of
    background pixels between boxes. `repeats`: probability that one kind of object is shown several times.
    """

    width: int = 64
    height: int = 64
    count: tuple[int, int] = (0, 9)
    colours: tuple[str, ...] = tuple(COLOURS)
    shapes: tuple[str, ...] = SHAPES
    sizes: tuple[str, ...] = tuple(SIDES)
    scale: float = 1.0
    gap: int = 2
    repeats: float = 0.5

    def __post_init__(self) -> None:
        for name, known in (("colours", COLOURS), ("shapes", SHAPES), ("sizes", SIDES)):
            unknown = [word for word in getattr(self, name) if word not in known]
            if unknown or not getattr(self, name):
                raise StimulusError(f"{name} among {sorted(known)}", repr(getattr(self, name)), f"Choose at least one of the known {name}.")
        if not 0 <= self.count[0] <= self.count[1] <= 9:
            raise StimulusError("count as (least, greatest) with 0 <= least <= greatest <= 9", repr(self.count), "Give two such numbers.")
        if self.scale <= 0 or self.gap < 0 or not 0 <= self.repeats <= 1:
            raise StimulusError(
                "scale > 0, gap >= 0 and repeats within 0 and 1",
                f"scale={self.scale}, gap={self.gap}, repeats={self.repeats}",
                "Correct the one that is outside.",
            )
        least = min(self.side_range(size)[0] for size in self.sizes)
        if min(self.width, self.height) < least:
            raise StimulusError(
                f"a picture whose sides hold the smallest object, {least} pixels",
                f"{self.width}x{self.height}",
                "Enlarge the picture or lower `scale`.",
            )

    def side_range(self, size: str) -> tuple[int, int]:
        """Least and greatest side of an object of this size, in pixels."""
        low, high = SIDES[size]
        return max(1, round(low * self.scale)), max(1, round(high * self.scale))


@dataclass(frozen=True)
class Placed:
    """One object of a scene: what it is, its top left corner and side in pixels, and its brightness (1 = as listed)."""

    shape: str
    colour: str
    size: str
    left: int
    top: int
    side: int
    shade: float = 1.0

    @property
    def box(self) -> tuple[float, float, float, float]:
        """(x0, y0, x1, y1) in pixels, x1 and y1 exclusive."""
        return float(self.left), float(self.top), float(self.left + self.side), float(self.top + self.side)

    @property
    def label(self) -> str:
        """Colour and shape, as a question names it."""
        return f"{self.colour} {self.shape}"


@dataclass(frozen=True)
class Scene:
    """The full description of a picture: the seed of its background and the objects on it."""

    seed: int
    index: int
    style: Style = field(default_factory=Style)
    objects: tuple[Placed, ...] = ()


def compose(seed: int, index: int, *, style: Style | None = None) -> Scene:
    """Choose the objects of scene `index` of `seed` and where they stand; the same arguments give the same scene."""
    if seed < 0 or index < 0:
        raise StimulusError("seed and index of 0 or more", f"{seed} and {index}", "Use other numbers.")
    style = style or Style()
    rng = np.random.default_rng([seed, index, 1])
    count = int(rng.integers(style.count[0], style.count[1] + 1))
    kinds = _kinds(rng, style=style, count=count)
    sides = sorted(_sides(rng, style=style, count=count), key=lambda pair: -pair[1])
    placed: list[Placed] = []
    for (colour, shape), (size, side) in zip(kinds, sides, strict=True):
        corner = find_corner(rng, side, style=style, taken=[other.box for other in placed])
        if corner is not None:
            placed.append(Placed(shape, colour, size, *corner, side, float(rng.uniform(0.85, 1.1))))
    order = rng.permutation(len(placed))
    return Scene(seed, index, style, tuple(placed[k] for k in order))


def draw(scene: Scene) -> Stimulus:
    """Draw a scene."""
    canvas = background(scene)
    objects = []
    for item in scene.objects:
        stamp = silhouette(item.shape, item.side)
        mask = np.zeros(canvas.shape[:2], dtype=bool)
        mask[item.top : item.top + item.side, item.left : item.left + item.side] = stamp
        canvas[mask] = paint(item)
        objects.append(SceneObject(item.label, item.box, mask, item.colour, item.shape, item.size))
    return Stimulus(f"shapes-{scene.seed}-{scene.index}", Image.fromarray(canvas), tuple(objects), scene)


def dataset(number: int, *, seed: int = 0, style: Style | None = None) -> list[Stimulus]:
    """Draw the first `number` scenes of a seed."""
    if number < 0:
        raise StimulusError("a number of scenes of 0 or more", str(number), "Ask for a positive number.")
    return [draw(compose(seed, index, style=style)) for index in range(number)]


def background(scene: Scene) -> UInt8[np.ndarray, "height width 3"]:
    """The picture without objects: a dull tint, a coarse texture and fine noise."""
    rng = np.random.default_rng([scene.seed, scene.index, 2])
    width, height = scene.style.width, scene.style.height
    tint = rng.uniform(70, 170) + rng.uniform(-14, 14, size=3)
    coarse = np.repeat(np.repeat(rng.uniform(-22, 22, size=(height // 8 + 2, width // 8 + 2)), 8, 0), 8, 1)
    down, right = rng.integers(8, size=2)
    fine = rng.integers(-8, 9, size=(height, width))
    grey = coarse[down : down + height, right : right + width] + fine
    return np.clip(grey[..., None] + tint, 0, 255).astype(np.uint8)


def paint(item: Placed) -> UInt8[np.ndarray, "3"]:
    """The colour an object is filled with."""
    return np.clip(np.asarray(COLOURS[item.colour]) * item.shade, 0, 255).astype(np.uint8)


@lru_cache(maxsize=512)
def silhouette(shape: str, side: int) -> Bool[np.ndarray, "side side"]:
    """The pixels of a shape inside its box; each shape touches all four sides of it."""
    centre = np.arange(side) + 0.5 - side / 2
    across, down = centre[None, :], centre[:, None]
    if shape == "circle":
        filled = across**2 + down**2 <= (side / 2) ** 2
    elif shape == "square":
        filled = np.ones((side, side), dtype=bool)
    elif shape == "triangle":
        filled = np.abs(across) <= np.maximum((down + side / 2 + 0.5) / 2, 0.5)
    elif shape == "cross":
        filled = np.minimum(np.abs(across), np.abs(down)) <= np.zeros((side, side)) + max(side / 6, 1.0)
    else:
        raise StimulusError(f"a shape among {SHAPES}", repr(shape), "Choose one of them.")
    filled.flags.writeable = False
    return filled


def find_corner(
    rng: np.random.Generator, side: int, *, style: Style, taken: list[tuple[float, float, float, float]]
) -> tuple[int, int] | None:
    """A free top left corner for an object of `side` pixels, or None when `TRIES` random ones were all taken."""
    if side > style.width or side > style.height:
        return None
    lefts = rng.integers(0, style.width - side + 1, size=TRIES).tolist()
    tops = rng.integers(0, style.height - side + 1, size=TRIES).tolist()
    reach, gap = side + style.gap, style.gap
    for left, top in zip(lefts, tops, strict=True):
        if all(left + reach <= x0 or top + reach <= y0 or left >= x1 + gap or top >= y1 + gap for x0, y0, x1, y1 in taken):
            return left, top
    return None


def _kinds(rng: np.random.Generator, *, style: Style, count: int) -> list[tuple[str, str]]:
    """Colour and shape of each object; now and then several of one kind, with others that share a feature with it."""
    every = [(colour, shape) for colour in style.colours for shape in style.shapes]
    kinds = [every[k] for k in rng.integers(len(every), size=count)]
    if count and rng.random() < style.repeats:
        copies = int(rng.integers(1, count + 1))
        kinds[:copies] = [kinds[0]] * copies
        near = [kind for kind in every if (kind[0] == kinds[0][0]) != (kind[1] == kinds[0][1])]
        for k in range(copies, count):
            if near and rng.random() < 0.4:
                kinds[k] = near[int(rng.integers(len(near)))]
    return [kinds[k] for k in rng.permutation(count)]


def _sides(rng: np.random.Generator, *, style: Style, count: int) -> list[tuple[str, int]]:
    """Size name and side of each object; crowded scenes have fewer large objects."""
    room = {"small": 1.0, "medium": 1.0, "large": 1.0 if count <= 4 else 0.3}
    weights = np.asarray([room[size] for size in style.sizes])
    names = rng.choice(len(style.sizes), size=count, p=weights / weights.sum())
    sides = []
    for name in names:
        low, high = style.side_range(style.sizes[name])
        sides.append((style.sizes[name], int(rng.integers(low, high + 1))))
    return sides
