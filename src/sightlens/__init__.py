"""SightLens: TransformerLens for vision-language models.

>>> import sightlens as sl
>>> model = sl.HookedVLM.from_pretrained("sightlens/tiny-llava")
>>> scene = sl.stimuli.shapes.draw(sl.stimuli.shapes.compose(1, 2))
>>> prompt = model.prepare(scene.image, "where is the red circle ?")
>>> prompt.layout
<bos> text[2] image(8×8) text[8]
"""

from __future__ import annotations

from jaxtyping import install_import_hook

# These packages are checked against their annotations always; the others check what users give them by hand, for speed, and
# the tests check everything.
with install_import_hook(
    ["sightlens.metrics", "sightlens.stimuli", "sightlens.interventions", "sightlens.experiments", "sightlens.engine", "sightlens.probes"],
    "beartype.beartype",
):
    from sightlens import engine, errors, experiments, interventions, layout, metrics, probes, render, stimuli
    from sightlens.engine import Engine
    from sightlens.experiments import Study, Trial
    from sightlens.families import FAMILIES, ImageOptions, ItemList, Prompt
    from sightlens.interventions import Ablate, AblateHeads, Containerize, Intervention, Knockout, Mean, PatchIn, Shuffle
    from sightlens.layout import Layout, TokenSet
    from sightlens.model import Cache, HookedVLM, hook_contract, verify_layout
    from sightlens.store import Provenance, Record, Result, read_store

__all__ = [
    "FAMILIES",
    "Ablate",
    "AblateHeads",
    "Cache",
    "Containerize",
    "Engine",
    "HookedVLM",
    "ImageOptions",
    "Intervention",
    "ItemList",
    "Knockout",
    "Layout",
    "Mean",
    "PatchIn",
    "Prompt",
    "Provenance",
    "Record",
    "Result",
    "Shuffle",
    "Study",
    "TokenSet",
    "Trial",
    "engine",
    "errors",
    "experiments",
    "hook_contract",
    "interventions",
    "layout",
    "metrics",
    "probes",
    "read_store",
    "render",
    "stimuli",
    "verify_layout",
]
