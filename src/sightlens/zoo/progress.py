"""Watching and resuming a training run."""

from collections import defaultdict

import numpy as np
import torch

from sightlens.zoo.batches import Batcher
from sightlens.zoo.export import export
from sightlens.zoo.losses import describe
from sightlens.zoo.network import read, see
from sightlens.zoo.recipe import HELD_OUT_SEED
from sightlens.zoo.trainer import Trainer

STATE = "training-state.pt"
PEEK_SCENES = 48


def line(trainer: Trainer, loss: float) -> str:
    """One line of the log: step, seconds, loss, and teacher-forced accuracy on a few held-out scenes."""
    scores = " ".join(f"{name} {value:.3f}" for name, value in sorted(peek(trainer).items()))
    return f"step {trainer.step} done {trainer.done:.3f} seconds {trainer.seconds:.0f} loss {loss:.3f} | {scores}"


@torch.no_grad()
def peek(trainer: Trainer) -> dict[str, float]:
    """Teacher-forced scores on held-out scenes of every layout: fraction right by kind, and mean IoU of boxes."""
    batcher = Batcher(trainer.plan.recipe, seed=HELD_OUT_SEED + 1)
    right: dict[str, list[float]] = defaultdict(list)
    for number, layout in enumerate(trainer.plan.recipe.layouts):
        size = max(8, round(PEEK_SCENES * layout.share))
        scenes = [batcher.scene(1000 * number + k, layout) for k in range(size)]
        batch = batcher.pack(scenes)
        accuracy = trainer.helpers[0].accuracy(  # pyright: ignore[reportCallIssue]  # a HelperHead
            see(trainer.network, batch), describe(batch)
        )
        right[f"label{layout.views}"].append(accuracy)
        guess = torch.zeros_like(batch.ids)
        asked = batch.weight > 0
        guess[asked] = read(trainer.network, batch, see(trainer.network, batch)).logits.argmax(-1)
        for row, (_, questions) in enumerate(scenes):
            for block, question in enumerate(questions, start=1):
                here = (batch.blocks[row] == block) & asked[row]
                said, truth = guess[row][here][:-1], batch.target[row][here][:-1]
                if question.kind == "localization":
                    right[f"iou{layout.views}"].append(overlap(said.numpy(), truth.numpy()))
                else:
                    right[f"{question.kind[:5]}-{question.negative or question.answer[:1]}"].append(float((said == truth).all()))
    return {name: float(np.mean(values)) for name, values in right.items()}


def overlap(one: np.ndarray, other: np.ndarray) -> float:
    """Intersection over union of two boxes (x0, y0, x1, y1)."""
    low, high = np.maximum(one[:2], other[:2]), np.minimum(one[2:], other[2:])
    shared = float(np.prod(np.clip(high - low, 0, None)))
    areas = sum(float(np.prod(np.clip(box[2:] - box[:2], 0, None))) for box in (one, other))
    return shared / (areas - shared) if areas > shared else 0.0


def save(trainer: Trainer) -> None:
    """Write the state of the run, replacing the last one in one move, and the checkpoint as it is now."""
    trainer.plan.out.mkdir(parents=True, exist_ok=True)
    state = {
        "network": trainer.network.state_dict(),
        "helpers": trainer.helpers.state_dict(),
        "optimizers": [optimizer.state_dict() for optimizer in trainer.optimizers],
        "spent": [trainer.step, trainer.scenes, trainer.seconds],
    }
    fresh = trainer.plan.out / f"{STATE}.new"
    torch.save(state, fresh)
    fresh.replace(trainer.plan.out / STATE)
    export(trainer.network, trainer.plan.recipe, trainer.plan.out)


def restore(trainer: Trainer) -> None:
    """Continue from the state file in the output folder."""
    state = torch.load(trainer.plan.out / STATE, weights_only=True)
    trainer.network.load_state_dict(state["network"])
    trainer.helpers.load_state_dict(state["helpers"])
    for optimizer, saved in zip(trainer.optimizers, state["optimizers"], strict=True):
        optimizer.load_state_dict(saved)
    trainer.step, trainer.scenes, trainer.seconds = state["spent"]
