"""Train a shipped model from scratch: `python -m sightlens.zoo.train llava --minutes 90 --out folder`."""

import argparse
import time
from pathlib import Path

import torch

from sightlens.zoo import progress
from sightlens.zoo.export import export
from sightlens.zoo.recipe import RECIPES, TRAINING_SEED
from sightlens.zoo.trainer import Plan, Trainer

REPORT_SECONDS, SAVE_SECONDS = 120, 240


def train(plan: Plan, *, resume: bool = False) -> Trainer:
    """Train until the plan's time is over, reporting and saving on the way, and export; returns the finished run."""
    torch.set_num_threads(1)
    trainer = Trainer(plan)
    if resume:
        progress.restore(trainer)
    reported = saved = time.monotonic()
    while trainer.done < 1.0:
        begun = time.monotonic()
        loss = trainer.advance()
        now = time.monotonic()
        trainer.seconds += now - begun
        if now - reported > REPORT_SECONDS:
            reported = now
            print(progress.line(trainer, loss), flush=True)
        if now - saved > SAVE_SECONDS:
            saved = now
            progress.save(trainer)
    export(trainer.network, plan.recipe, plan.out)
    return trainer


def main(arguments: list[str] | None = None) -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", choices=sorted(RECIPES))
    parser.add_argument("--out", type=Path, default=None)
    parser.add_argument("--minutes", type=float, default=90.0)
    parser.add_argument("--seed", type=int, default=TRAINING_SEED)
    parser.add_argument("--steps", type=int, default=None)
    parser.add_argument("--resume", action="store_true")
    given = parser.parse_args(arguments)
    out = given.out or Path(f"runs/tiny-{given.model}")
    plan = Plan(RECIPES[given.model], out, given.minutes, given.seed, given.steps)
    train(plan, resume=given.resume)


if __name__ == "__main__":
    main()
