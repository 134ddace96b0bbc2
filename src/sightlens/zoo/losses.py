"""What training minimises: the answer loss, and helper heads on visual tokens that are thrown away afterwards."""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedTokenizerBase

from sightlens.stimuli.shapes import COLOURS, SHAPES
from sightlens.zoo.batches import LABELS, Asked, Batch
from sightlens.zoo.vocabulary import COORDINATES

MARKS = torch.linspace(0, 1, COORDINATES)


@dataclass(frozen=True, eq=False)
class Described:
    """What a helper head should say of some visual tokens; the fields are those of `Batch`."""

    label: Tensor
    centre: Tensor
    box: Tensor
    owned: Tensor


class HelperHead(nn.Module):
    """Reads from a visual token which labels it shows, whose centre it is, and where the edges of its object are."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(width)
        self.labels = nn.Linear(width, len(LABELS) + 1)
        self.centres = nn.Linear(width, len(LABELS))
        self.edges = nn.Linear(width, 4 * COORDINATES)

    def forward(self, tokens: Float[Tensor, "batch visual width"], truth: Described, *, blur: float) -> Float[Tensor, ""]:
        """The summed loss of the three readings."""
        tokens = self.norm(tokens)
        called = F.cross_entropy(self.labels(tokens).flatten(0, 1), truth.label.flatten(), reduction="none")
        shows = truth.owned.flatten().float()
        named = (called * shows).sum() / shows.sum() + (called * (1 - shows)).sum() / (1 - shows).sum()
        centred = F.binary_cross_entropy_with_logits(self.centres(tokens), truth.centre)
        edges = self.edges(tokens[truth.owned]).unflatten(-1, (4, COORDINATES)).log_softmax(-1)
        placed = -(around(truth.box[truth.owned], blur) * edges).sum(-1).mean()
        return named + 30 * centred + 0.3 * placed

    def accuracy(self, tokens: Float[Tensor, "batch visual width"], truth: Described) -> float:
        """Fraction of the tokens on an object whose label is read correctly."""
        right = self.labels(self.norm(tokens)).argmax(-1) == truth.label
        return float(right[truth.owned].float().mean())


class QuestionHead(nn.Module):
    """Reads from the noun of a question what is asked, how many objects are meant, and where the only one is."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(width)
        self.colour = nn.Linear(width, len(COLOURS) + 1)
        self.shape = nn.Linear(width, len(SHAPES) + 1)
        self.number = nn.Linear(width, 10)
        self.edges = nn.Linear(width, 4 * COORDINATES)

    def forward(self, nouns: Float[Tensor, "questions width"], truth: Asked, *, blur: float) -> Float[Tensor, ""]:
        """The summed loss of the four readings."""
        nouns = self.norm(nouns)
        words = F.cross_entropy(self.colour(nouns), truth.colour) + F.cross_entropy(self.shape(nouns), truth.shape)
        single = truth.number == 1
        edges = self.edges(nouns[single]).unflatten(-1, (4, COORDINATES)).log_softmax(-1)
        placed = -(around(truth.box[single], blur) * edges).sum(-1).mean()
        return 0.3 * words + 2 * F.cross_entropy(self.number(nouns), truth.number) + 0.3 * placed


def around(values: Float[Tensor, "..."], blur: float) -> Float[Tensor, "... marks"]:
    """A bell over the coordinate marks, centred on each value; `blur` is its standard deviation in marks."""
    distance = (values[..., None] - MARKS) * (COORDINATES - 1) / blur
    return (-0.5 * distance**2).softmax(-1)


def target_table(tokenizer: PreTrainedTokenizerBase, blur: float) -> Float[Tensor, "vocabulary vocabulary"]:
    """Row t is the distribution to predict where token t is true: itself, or a bell over coordinates when it is one."""
    table = torch.eye(len(tokenizer))
    marks = torch.tensor(tokenizer.convert_tokens_to_ids([f"<loc{k:02d}>" for k in range(COORDINATES)]))
    table[marks[:, None], marks[None, :]] = around(MARKS, blur)
    return table


def answer_loss(
    logits: Float[Tensor, "supervised vocabulary"],
    target: Int[Tensor, "supervised"],
    weight: Float[Tensor, "supervised"],
    table: Float[Tensor, "vocabulary vocabulary"],
) -> Float[Tensor, ""]:
    """Weighted cross-entropy against the blurred targets."""
    each = -(table[target] * logits.log_softmax(-1)).sum(-1)
    return (weight * each).sum() / weight.sum()


def describe(batch: Batch) -> Described:
    """Truth about every visual token, boxes measured in its own view."""
    return Described(batch.label, batch.centre, batch.box, batch.owned)


def describe_overview(batch: Batch, tokens: int) -> Described:
    """Truth about the last `tokens` visual tokens (the view of the whole picture), boxes measured in the answer frame."""
    return Described(batch.label[:, -tokens:], batch.centre[:, -tokens:], batch.frame_box[:, -tokens:], batch.owned[:, -tokens:])
