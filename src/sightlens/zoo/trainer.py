"""One training run: its plan, its state, and a single step of it."""

from dataclasses import dataclass
from pathlib import Path

from torch import Tensor, nn

from sightlens.zoo.batches import Batcher
from sightlens.zoo.losses import HelperHead, QuestionHead, answer_loss, describe, describe_overview, target_table
from sightlens.zoo.network import make_network, read, see
from sightlens.zoo.optim import make_optimizers
from sightlens.zoo.recipe import TRAINING_SEED, Recipe, Schedule


@dataclass(frozen=True)
class Plan:
    """One training run. `steps`, where given, ends it instead of `minutes`."""

    recipe: Recipe
    out: Path
    minutes: float
    seed: int = TRAINING_SEED
    steps: int | None = None


class Trainer:
    """The state of a run: network, helper heads, optimizers, steps, scenes and seconds spent."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.network = make_network(plan.recipe, seed=plan.seed)
        width = plan.recipe.sizes.width
        self.helpers = nn.ModuleList([HelperHead(width), HelperHead(width), QuestionHead(width)])
        schedule = plan.recipe.schedule
        self.optimizers = make_optimizers(self.network, self.helpers, muon=schedule.muon, adam=schedule.adam)
        self.peaks = (schedule.muon, schedule.adam)
        self.batcher = Batcher(plan.recipe, seed=plan.seed)
        self.step, self.scenes, self.seconds = 0, 0, 0.0

    @property
    def done(self) -> float:
        """Fraction of the run that has passed, 0 to 1."""
        if self.plan.steps is not None:
            return min(1.0, self.step / self.plan.steps)
        return min(1.0, self.seconds / (60 * self.plan.minutes))

    def advance(self) -> float:
        """One step on the next scenes."""
        schedule, done = self.plan.recipe.schedule, self.done
        batch = self.batcher.batch(self.scenes, schedule.batch)
        blur = between(*schedule.blur, done / schedule.sharp)
        helper = between(*schedule.helper, done)
        visual = see(self.network, batch)
        loss = helper * self.helpers[0](visual, describe(batch), blur=blur)
        if done >= schedule.tower_only:
            reading = read(self.network, batch, visual)
            asked = batch.weight > 0
            table = target_table(self.batcher.tokenizer, blur)
            loss = loss + answer_loss(reading.logits, batch.target[asked], batch.weight[asked], table)
            overview = describe_overview(batch, self.plan.recipe.sizes.grid**2)
            loss = loss + 0.5 * helper * self.helpers[1](reading.overview, overview, blur=blur)
            loss = loss + helper * self.helpers[2](reading.nouns, batch.asked, blur=blur)
        self.descend(loss, rate(schedule, done))
        return float(loss.detach())

    def descend(self, loss: Tensor, factor: float) -> None:
        """One step of both optimizers at `factor` of their peak rates."""
        loss.backward()
        nn.utils.clip_grad_norm_(self.network.parameters(), 1.0)
        for optimizer, peak in zip(self.optimizers, self.peaks, strict=True):
            for group in optimizer.param_groups:
                group["lr"] = peak * factor
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        self.step += 1
        self.scenes += self.plan.recipe.schedule.batch


def rate(schedule: Schedule, done: float) -> float:
    """Learning rate as a fraction of its peak: a short rise, a flat part, a linear fall to zero."""
    rise = min(1.0, done / schedule.warmup + 0.05)
    fall = min(1.0, (1.0 - done) / (1 - schedule.cooldown))
    return rise * max(fall, 0.01)


def between(start: float, end: float, fraction: float) -> float:
    """Geometric path from start to end."""
    return start * (end / start) ** min(max(fraction, 0.0), 1.0)
