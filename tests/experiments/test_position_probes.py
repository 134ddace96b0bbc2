"""Position probes over models: the right activation at the right place, and controls beside it."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from PIL import Image
from tests.conftest import hooked, picture
from tests.tiny import VARIANTS

from sightlens.errors import StudyError
from sightlens.experiments import Viewing, position_probes, untrained
from sightlens.experiments.position_probes import site_tokens
from sightlens.model import HookedVLM
from sightlens.probes import ProbeSettings, load_probes
from sightlens.stimuli import Stimulus, shapes

QUESTION = "what is the image ?"
WHOLE_VIEWS = [variant for variant in VARIANTS if variant.family in ("llava", "internvl")]
RESIDUAL, PROJECTOR, EMBEDDED = "blocks.1.hook_resid_post", "vision_projector.hook_out", "vision_encoder.embeddings.hook_out"


@torch.no_grad()
@pytest.mark.parametrize("variant", WHOLE_VIEWS, ids=str)
def test_tokens_are_those_of_the_view_in_their_places(variant):
    any_model = hooked(variant)
    prompt = any_model.prepare([picture(), picture(seed=1)], [QUESTION, "is there a red circle in the image ?"])
    _, cache = any_model.run_with_cache(prompt, names_filter=[RESIDUAL, PROJECTOR, EMBEDDED, "hook_merged_embed"])
    grid = cache[f"{RESIDUAL}@global"]
    found = site_tokens(cache, RESIDUAL, prompt, view="global")
    again = torch.zeros_like(grid)
    again[found.owners, found.rows, found.columns] = found.states
    assert torch.equal(again, grid)
    merged, projected = (site_tokens(cache, name, prompt, view="global") for name in ("hook_merged_embed", PROJECTOR))
    assert torch.equal(merged.states, projected.states)
    assert torch.equal(merged.owners, projected.owners)
    tiles = [view for layout in prompt.layouts for view in layout.views if view.kind == "tile"]
    assert len(site_tokens(cache, RESIDUAL, prompt, view="tile").rows) == sum(view.count for view in tiles)


@torch.no_grad()
@pytest.mark.parametrize("variant", WHOLE_VIEWS, ids=str)
def test_patches_lie_where_the_picture_has_them(variant):
    any_model = hooked(variant)
    plain = np.full((32, 32, 3), 128, dtype=np.uint8)
    dotted = plain.copy()
    dotted[16:24, 8:16] = 255  # the patch in row 2, column 1
    states = []
    for pixels in (plain, dotted):
        prompt = any_model.prepare(pixels, QUESTION)
        _, cache = any_model.run_with_cache(prompt, names_filter=EMBEDDED)
        states.append(site_tokens(cache, EMBEDDED, prompt, view="global"))
    changed = (states[0].states - states[1].states).abs().sum(-1)
    most = int(changed.argmax())
    assert len(changed) == 16
    assert (int(states[1].rows[most]), int(states[1].columns[most])) == (2, 1)


@pytest.mark.parametrize("variant", [v for v in VARIANTS if v.family in ("llava_next", "qwen2_5_vl")], ids=str)
@torch.no_grad()
def test_where_tokens_and_states_do_not_match_one_to_one_is_refused(variant):
    model = hooked(variant)
    prompt = model.prepare(picture(), QUESTION)
    _, cache = model.run_with_cache(prompt, names_filter=[RESIDUAL, EMBEDDED])
    assert len(site_tokens(cache, RESIDUAL, prompt, view="global").rows) == prompt.layout.select("global").count
    with pytest.raises(StudyError, match=r"each view by itself|views of one size"):
        site_tokens(cache, EMBEDDED, prompt, view="global")


@pytest.mark.parametrize("name", ["sightlens/tiny-llava", "sightlens/tiny-internvl"])
def test_probes_of_a_shipped_model_beat_their_controls(name, tmp_path):
    model = HookedVLM.from_pretrained(name)
    scenes = shapes.dataset(24, seed=31)
    settings = ProbeSettings(epochs=4, learning_rate=1e-2, test_share=0.25)
    outcome = position_probes(model, scenes, viewing=Viewing(question="how many objects ?"), settings=settings, store=tmp_path)
    table = outcome.to_pandas().set_index(["model", "site", "axis"])
    sites = list(outcome.reports["trained"])
    assert sites == list(outcome.reports["untrained"])
    assert len([site for site in sites if site.startswith("blocks")]) == model.cfg.n_layers
    assert sites.index("vision_projector.hook_out") == len(sites) - model.cfg.n_layers - 1
    assert np.isfinite(table["accuracy"]).all()
    best = outcome.best()
    assert best.axes["both"].accuracy > 5 * best.axes["both"].control_accuracy
    assert (table["control"] < table["chance"] + 0.1).all()
    rows, columns = model.processing.family.token_grid(model.hf.config).rows, model.processing.family.token_grid(model.hf.config).columns
    assert outcome.reports["trained"][sites[-1]].accuracy_map().shape == (rows, columns)
    assert list(load_probes(tmp_path / "untrained.safetensors").shapes) == sites
    assert json.loads((tmp_path / "outcome.json").read_text())["provenance"]["images"]["train"] > 12


@torch.no_grad()
def test_the_untrained_copy_has_the_shape_and_not_the_weights(model):
    prompt, copy = model.prepare(picture(), QUESTION), untrained(model)
    assert {k: v.shape for k, v in copy.hf.state_dict().items()} == {k: v.shape for k, v in model.hf.state_dict().items()}
    assert not torch.allclose(copy(prompt), model(prompt))
    assert torch.equal(copy(prompt), untrained(model)(prompt))
    assert not torch.equal(copy(prompt), untrained(model, seed=1)(prompt))


def test_what_cannot_be_probed_is_refused(model):
    images = [Stimulus(f"{k}", Image.fromarray(picture(32, 32, k))) for k in range(12)]
    fast = ProbeSettings(epochs=1, test_share=0.3)
    for bad, viewing, words in (
        (iter(images), Viewing(), "iterated again"),
        (images[:1], Viewing(), "both sides"),
        (images, Viewing(view="tile", question=QUESTION), "tile view"),
        (images, Viewing(sites=("blocks.0.attn.hook_pattern",), question=QUESTION), "positions, visual tokens or patches"),
    ):
        with pytest.raises(StudyError, match=words):
            position_probes(model, bad, viewing=viewing, settings=fast)
