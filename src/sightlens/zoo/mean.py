"""Measure the dataset mean that ablations use, and ship it beside the weights: `python -m sightlens.zoo.mean`."""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

from sightlens.interventions import Mean
from sightlens.interventions.means import save_mean
from sightlens.model import HookedVLM
from sightlens.model.loading import MEAN_FILE
from sightlens.stimuli import shapes
from sightlens.zoo.recipe import RECIPES

TRAINING_SEED = 1
BATCH = 32


def measure_mean(model: HookedVLM, *, scenes: int) -> Mean:
    """Average the visual embeddings of drawn scenes from the training seed."""
    pictures = [shapes.draw(shapes.compose(TRAINING_SEED, index)).image for index in range(scenes)]
    batches = (pictures[k : k + BATCH] for k in range(0, scenes, BATCH))
    prompts = [model.prepare(batch, ["how many objects ?"] * len(batch)) for batch in batches]
    return model.fit_mean(prompts, source=f"{scenes} drawn scenes, seed {TRAINING_SEED}")


def write_mean(mean: Mean, folder: Path) -> None:
    """Write a mean where `HookedVLM.from_pretrained` finds it."""
    save_mean(mean, folder / MEAN_FILE)


def main() -> None:
    """Measure and write the means of the shipped models."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--scenes", type=int, default=512)
    torch.set_num_threads(1)
    for name in RECIPES:
        folder = Path(__file__).parent / f"tiny-{name}"
        write_mean(measure_mean(HookedVLM.from_pretrained(folder), scenes=parser.parse_args().scenes), folder)


if __name__ == "__main__":
    main()
