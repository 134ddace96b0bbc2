"""Write the model card of a shipped checkpoint from a fresh evaluation: `python -m sightlens.zoo.card llava --run "..."`."""

import argparse
from pathlib import Path

import torch

from sightlens.model import HookedVLM
from sightlens.stimuli.shapes import COLOURS, SHAPES, SIDES
from sightlens.zoo.evaluate import FOLDERS, Bars, ask, score
from sightlens.zoo.recipe import HELD_OUT_SEED, RECIPES, TRAINING_SEED, Recipe

TITLES = {"llava": "LlavaForConditionalGeneration (CLIP tower, Llama)", "internvl": "InternVLForConditionalGeneration (InternViT, Qwen3)"}


TEXT = """---
license: mit
library_name: transformers
pipeline_tag: image-text-to-text
tags: [interpretability, synthetic, sightlens]
---

# sightlens/tiny-{name}

A genuine {title} checkpoint of {size:.1f} MB, trained from scratch on drawn scenes for interpretability work on a laptop. It is a
test subject: it knows no pictures but these.

## What it answers

| question | answer |
| --- | --- |
| `is there a red circle ?` | `yes` or `no` |
| `where is the red circle ?` (the only one) | four tokens `<locAA>`: x0 y0 x1 y1 in 64ths of the {frame} |
| `how many objects ?`, `how many red objects ?`, `how many circles ?`, `how many red circles ?` | one digit |

## Data

`sightlens.stimuli.shapes`: 0 to 9 objects ({colours}; {shapes}) with sides of {sides} in pictures of about 64 px on a textured
background; up to ten questions per scene, absent objects asked for in three ways (colour absent, shape absent, both present but
on different objects). Training seed {training}, scenes drawn as training goes; held-out seed {held_out}.

## Recipe

Tower: {sizes.tower_layers} layers of width {sizes.tower_width}, {sizes.view}-px views, {sizes.patch}-px patches. Language model:
{sizes.layers} layers of {sizes.heads} heads, width {sizes.width}. {sizes.grid} x {sizes.grid} visual tokens a view.
`python -m sightlens.zoo.train {name}`: float32, one CPU thread, Muon for matrices and AdamW for the rest; the first part of the
time trains the tower alone. The heads of the first three tower layers start out looking at fixed neighbours of a patch.

While training, helper heads also read the label, the centre and the box of the object under each visual token (from the projector,
and from layer 2 in the view of the whole picture), and what is asked, how many are meant and where (from layer 3 at the noun of the
question). They are thrown away, but the layers where such information is readable are partly a choice of this recipe.

{run}

## Held-out scores

`python -m sightlens.zoo.evaluate --model {name} --scenes {scenes} --seed {held_out}` (greedy generation with these files):

| score | value |
| --- | --- |
{table}

`loc` is the mean of the fractions of boxes with an intersection over union above 0.5, 0.7 and 0.9; `_small`, `_medium` and `_large`
are sizes of the object asked for, `_viewsN` scenes encoded as N views, `counting_N` scenes with N such objects. {verdict}
"""


def card(recipe: Recipe, scores: dict[str, float], *, scenes: int, run: str) -> str:
    """The text of the card."""
    missed = Bars().missed(scores)
    return TEXT.format(
        name=recipe.name,
        title=TITLES[recipe.name],
        size=sum(path.stat().st_size for path in FOLDERS[recipe.name].iterdir()) / 2**20,
        frame="padded square" if recipe.name == "llava" else "picture",
        colours=", ".join(COLOURS),
        shapes=", ".join(SHAPES),
        sides=", ".join(f"{low} to {high} px ({size})" for size, (low, high) in SIDES.items()),
        training=TRAINING_SEED,
        held_out=HELD_OUT_SEED,
        sizes=recipe.sizes,
        run=run,
        scenes=scenes,
        table="\n".join(f"| {name} | {value:.3f} |" for name, value in scores.items()),
        verdict="Below the bar the project set itself: " + "; ".join(missed) + "." if missed else "All bars of `evaluate.Bars` are met.",
    )


def main(arguments: list[str] | None = None) -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", choices=sorted(RECIPES))
    parser.add_argument("--scenes", type=int, default=400)
    parser.add_argument("--run", default="", help="a sentence about the training run: minutes, steps, machine")
    given = parser.parse_args(arguments)
    torch.set_num_threads(1)
    folder: Path = FOLDERS[given.model]
    scores = score(ask(HookedVLM.from_pretrained(folder), given.scenes))
    (folder / "README.md").write_text(card(RECIPES[given.model], scores, scenes=given.scenes, run=given.run))


if __name__ == "__main__":
    main()
