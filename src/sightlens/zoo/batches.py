"""Training batches: scenes drawn on the fly, with all questions about a picture packed behind one copy of it."""

from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from sightlens.stimuli.questions import PLURALS, sample_questions
from sightlens.stimuli.shapes import COLOURS, SHAPES, Style, compose, draw
from sightlens.stimuli.stimulus import Question, Stimulus
from sightlens.zoo.pixels import Views, Window, normalize, padded, tiled
from sightlens.zoo.recipe import Layout, Recipe, tokenizer_for
from sightlens.zoo.vocabulary import coordinate

LABELS = {f"{colour} {shape}": k for k, (colour, shape) in enumerate((c, s) for c in COLOURS for s in SHAPES)}
WEIGHTS = {"existence": 1.5, "localization": 0.6, "counting": 3.0}
END_WEIGHT = 0.1


@dataclass(frozen=True, eq=False)
class Asked:
    """What each question is about, question by question through the batch.

    `row` and `place` say where its noun stands; `colour` and `shape` index the known ones, one past the last for any;
    `number` counts the objects meant; `box` is, where `number` is 1, that object's box as fractions of the answer frame.
    """

    row: Int[Tensor, "questions"]
    place: Int[Tensor, "questions"]
    colour: Int[Tensor, "questions"]
    shape: Int[Tensor, "questions"]
    number: Int[Tensor, "questions"]
    box: Float[Tensor, "questions 4"]


@dataclass(frozen=True, eq=False)
class Batch:
    """One step's input. Block 0 is the shared prompt with the image, block k question k, -1 padding.

    `target` is the next token to predict where `weight` is positive. The helper targets describe what the pixels under each
    visual token show: the object that covers most of it
    (`label`; the number of labels where none does and `owned` is false), its box as fractions of the view (`box`) and of the
    answer frame (`frame_box`), and whose centre is there (`centre`).
    """

    pixels: Float[Tensor, "all_views 3 height width"]
    ids: Int[Tensor, "batch seq"]
    positions: Int[Tensor, "batch seq"]
    blocks: Int[Tensor, "batch seq"]
    target: Int[Tensor, "batch seq"]
    weight: Float[Tensor, "batch seq"]
    label: Int[Tensor, "batch visual"]
    centre: Float[Tensor, "batch visual labels"]
    box: Float[Tensor, "batch visual 4"]
    frame_box: Float[Tensor, "batch visual 4"]
    owned: Bool[Tensor, "batch visual"]
    asked: Asked


class Batcher:
    """Makes batches for one recipe; scene `index` of a seed is the same whenever it is drawn."""

    def __init__(self, recipe: Recipe, *, seed: int) -> None:
        self.recipe, self.seed = recipe, seed
        self.tokenizer = tokenizer_for(recipe)
        self._known: dict[str, list[int]] = {}

    def batch(self, first: int, size: int) -> Batch:
        """The `size` scenes from index `first` on; all have the same number of views."""
        rng = np.random.default_rng([self.seed, first, 5])
        layouts = self.recipe.layouts
        layout = layouts[int(rng.choice(len(layouts), p=[entry.share for entry in layouts]))]
        return self.pack([self.scene(index, layout) for index in range(first, first + size)])

    def scene(self, index: int, layout: Layout) -> tuple[Stimulus, tuple[Question, ...]]:
        """Scene `index` in one of the layout's styles, with its questions."""
        rng = np.random.default_rng([self.seed, index, 6])
        style: Style = layout.styles[int(rng.integers(len(layout.styles)))]
        stimulus = draw(compose(self.seed, index, style=style))
        return stimulus, sample_questions(stimulus, rng)

    def views(self, stimulus: Stimulus) -> Views:
        """The stimulus as the family's image processor cuts it."""
        side = self.recipe.sizes.view
        return padded(stimulus.image, side) if self.recipe.name == "llava" else tiled(stimulus.image, side, most=4)

    def pack(self, scenes: list[tuple[Stimulus, tuple[Question, ...]]]) -> Batch:
        """Questions of each scene side by side behind its image."""
        views = [self.views(stimulus) for stimulus, _ in scenes]
        rows = [self._row(questions, view) for (_, questions), view in zip(scenes, views, strict=True)]
        length = max(len(row[0]) for row in rows)
        pads = (self.tokenizer.pad_token_id, 0, -1, 0, 0.0)
        columns = [torch.tensor([row[k] + [pad] * (length - len(row[k])) for row in rows]) for k, pad in enumerate(pads)]
        helpers = [_helpers(stimulus, view, self.recipe.sizes.grid) for (stimulus, _), view in zip(scenes, views, strict=True)]
        stacked = [torch.from_numpy(np.stack([entry[k] for entry in helpers])) for k in range(5)]
        asked = _asked(scenes, views, columns[2])
        pixels = normalize(np.concatenate([view.pixels for view in views]))
        return Batch(pixels, *columns, *stacked, asked)  # pyright: ignore[reportCallIssue]  # five columns, five stacked

    def prefix(self, views: int) -> list[int]:
        """Ids of everything before the question."""
        tokens = views * self.recipe.sizes.grid**2
        if self.recipe.name == "llava":
            return self.encode("<bos> USER : " + "<image> " * tokens)
        return self.encode("<|im_start|> user <img> " + "<IMG_CONTEXT> " * tokens + "</img>")

    def suffix(self) -> list[int]:
        """Ids between question and answer."""
        return self.encode("ASSISTANT :" if self.recipe.name == "llava" else "<|im_end|> <|im_start|> assistant")

    def answer(self, question: Question, views: Views) -> list[int]:
        """Ids of the answer without the end token."""
        text = " ".join(box_tokens(question.box, views.frame)) if question.box else question.answer
        return self.encode(text)

    def encode(self, text: str) -> list[int]:
        """Ids of words separated by blanks."""
        if text not in self._known:
            ids = self.tokenizer.convert_tokens_to_ids(text.split())
            self._known[text] = ids  # pyright: ignore[reportArgumentType]  # a list for a list
        return self._known[text]

    def _row(self, questions: tuple[Question, ...], views: Views) -> tuple[list, list, list, list, list]:
        ids = list(self.prefix(len(views.windows)))
        start = len(ids)
        positions, blocks = list(range(start)), [0] * start
        target, weight = [0] * start, [0.0] * start
        for block, question in enumerate(questions, start=1):
            asked = self.encode(question.text) + self.suffix()
            answer = self.answer(question, views)
            whole = asked + answer
            ids += whole
            positions += range(start, start + len(whole))
            blocks += [block] * len(whole)
            target += [0] * (len(asked) - 1) + answer + [self.tokenizer.eos_token_id]
            weight += [0.0] * (len(asked) - 1) + [WEIGHTS[question.kind]] * len(answer) + [END_WEIGHT]
        return ids, positions, blocks, target, weight


def box_tokens(box: tuple[float, float, float, float], frame: Window) -> list[str]:
    """Four coordinate tokens, x0 y0 x1 y1, of a box in pixels measured in `frame`."""
    return [coordinate(value) for value in relative_box(box, frame)]


def relative_box(box: tuple[float, float, float, float], window: Window) -> tuple[float, float, float, float]:
    """A box in pixels as fractions of a window."""
    left, top, right, bottom = window
    wide, high = right - left, bottom - top
    return (box[0] - left) / wide, (box[1] - top) / high, (box[2] - left) / wide, (box[3] - top) / high


def attention_mask(blocks: Int[Tensor, "batch seq"]) -> Bool[Tensor, "batch 1 seq seq"]:
    """True where a query may look: causal, and only at the shared prompt or its own question."""
    length = blocks.shape[1]
    causal = torch.ones(length, length, dtype=torch.bool).tril()
    same = blocks[:, :, None] == blocks[:, None, :]
    shared = (blocks == 0)[:, None, :]
    return ((same | shared) & causal)[:, None]


def _asked(scenes: list[tuple[Stimulus, tuple[Question, ...]]], views: list[Views], blocks: Int[Tensor, "batch seq"]) -> Asked:
    """Read the questions of a packed batch; the noun is the last word before the question mark."""
    found: list[tuple] = []
    for row, ((stimulus, questions), view) in enumerate(zip(scenes, views, strict=True)):
        for block, question in enumerate(questions, start=1):
            words = question.text.split()
            place = int((blocks[row] == block).nonzero()[0, 0]) + len(words) - 2
            colour = next((k for k, name in enumerate(COLOURS) if name in words), len(COLOURS))
            shape = next((k for k, name in enumerate(SHAPES) if words[-2] in (name, PLURALS[name])), len(SHAPES))
            meant = [
                item
                for item in stimulus.objects
                if (colour == len(COLOURS) or item.colour in words) and (shape == len(SHAPES) or item.shape == SHAPES[shape])
            ]
            box = relative_box(meant[0].box, view.frame) if len(meant) == 1 else (0.0,) * 4
            found.append((row, place, colour, shape, len(meant), box))
    return Asked(*(torch.tensor([entry[k] for entry in found]) for k in range(6)))


def _helpers(stimulus: Stimulus, views: Views, grid: int) -> tuple[np.ndarray, ...]:
    """What each visual token shows: label, centre, box, frame_box, owned; views one after the other."""
    cells = len(views.windows) * grid * grid
    called = np.full(cells, len(LABELS))
    centre = np.zeros((cells, len(LABELS)), np.float32)
    box, frame_box = np.zeros((cells, 4), np.float32), np.zeros((cells, 4), np.float32)
    most = np.full(cells, 0.08, np.float32)
    owned = np.zeros(cells, bool)
    for item in stimulus.objects:
        label = LABELS[item.label]
        whole = relative_box(item.box, views.frame)
        for number, window in enumerate(views.windows):
            local = np.asarray(relative_box(item.box, window))
            here = slice(number * grid * grid, (number + 1) * grid * grid)
            cover = np.outer(_overlap(local[1], local[3], grid), _overlap(local[0], local[2], grid)).ravel()
            best = cover > most[here]
            most[here][best] = cover[best]
            owned[here] |= best
            called[here][best] = label
            box[here][best] = np.clip(local, 0, 1)
            frame_box[here][best] = whole
            middle = (local[:2] + local[2:]) / 2
            if (middle >= 0).all() and (middle < 1).all():
                column, row = (middle * grid).astype(int)
                centre[number * grid * grid + row * grid + column, label] = 1
    return called, centre, box, frame_box, owned


def _overlap(low: float, high: float, grid: int) -> np.ndarray:
    """How much of each of `grid` equal parts of [0, 1] lies between two numbers, as a fraction of the part."""
    edges = np.arange(grid) / grid
    return np.clip(np.minimum(high, edges + 1 / grid) - np.maximum(low, edges), 0, None) * grid
