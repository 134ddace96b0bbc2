"""Position probes over models: the right activation at the right place, and controls beside it."""

from __future__ import annotations

import importlib
import json
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from PIL import Image
from tests.conftest import hooked, picture
from tests.tiny import VARIANTS

from sightlens.errors import StoreError, StudyError
from sightlens.experiments import Viewing, position_probes, untrained
from sightlens.experiments.position_probes import SITES
from sightlens.experiments.site_tokens import site_tokens
from sightlens.model import HookedVLM
from sightlens.probes import ProbeSettings, load_probes
from sightlens.stimuli import Stimulus, shapes

module = importlib.import_module("sightlens.experiments.position_probes")  # the function of that name hides it
QUESTION = "what is the image ?"
LAYERS, MERGED = "vision_encoder.encoder_layers.", "hook_merged_embed"
RESIDUAL, PROJECTOR, EMBEDDED = "blocks.1.hook_resid_post", "vision_projector.hook_out", "vision_encoder.embeddings.hook_out"


@torch.no_grad()
def test_tokens_are_those_of_the_view_in_their_places(any_model):
    prompt = any_model.prepare([picture(), picture(32, 96, seed=1)], [QUESTION, "is there a red circle in the image ?"])
    _, cache = any_model.run_with_cache(prompt, names_filter=[RESIDUAL, PROJECTOR, "hook_merged_embed"])
    for view in ("global", "tile"):
        found = site_tokens(cache, RESIDUAL, prompt, view=view)
        expected = [
            (example, row, column, cache[RESIDUAL][example, place])
            for example, layout in enumerate(prompt.layouts)
            for k, one in enumerate(layout.views)
            if one.kind == view
            for (row, column), place in np.ndenumerate(layout.positions(k))
        ]
        key = {(example, row, column, float(state[0])) for example, row, column, state in expected}
        places = zip(found.owners.tolist(), found.rows.tolist(), found.columns.tolist(), found.states[:, 0].tolist(), strict=True)
        assert len(found.rows) == len(expected)
        assert set(places) == key
    merged, projected = (site_tokens(cache, name, prompt, view="global") for name in ("hook_merged_embed", PROJECTOR))
    scale = merged.states.norm() / projected.states.norm()
    assert torch.allclose(merged.states, scale * projected.states, rtol=1e-5)
    assert torch.equal(merged.owners, projected.owners)


@torch.no_grad()
def test_patches_lie_where_the_picture_has_them(each_model):
    """Change the pixels of one patch: the patch with that place, in the picture that was changed, moves most."""
    pictures = [np.full(size, 128, dtype=np.uint8) for size in ((32, 32, 3), (32, 64, 3))]
    states = []
    for value in (128, 255):
        pictures[1][16:24, 16:32] = value
        prompt = each_model.prepare(pictures, [QUESTION] * 2)
        _, cache = each_model.run_with_cache(prompt, names_filter=EMBEDDED)
        states.append(site_tokens(cache, EMBEDDED, prompt, view="global"))
    whole = next(view for view in prompt.layouts[1].views if view.kind == "global")
    x0, y0, x1, y1 = whole.box
    rows, columns = whole.grid[0] * whole.merge, whole.grid[1] * whole.merge
    changed = (states[0].states - states[1].states).abs().sum(-1)
    most = changed > 0.9 * changed.max()
    tokens = states[1].keep(most)
    height, width = (y1 - y0) / rows, (x1 - x0) / columns
    down, across = y0 + (np.arange(rows) + 0.5) * height, x0 + (np.arange(columns) + 0.5) * width
    middles = {(row, column) for row, column in np.ndindex(rows, columns) if 16 <= down[row] < 24 and 16 <= across[column] < 32}
    assert 0 < int(most.sum()) < len(most) / 2
    assert set(tokens.owners.tolist()) == {1}
    assert set(zip(tokens.rows.tolist(), tokens.columns.tolist(), strict=True)) <= middles


@torch.no_grad()
@pytest.mark.parametrize("view", ["global", "tile"])
def test_a_patch_feeds_the_token_at_its_place(each_model, view):
    """Change one patch behind the tower: the visual token in whose cell it lies moves, and every layer counts places alike."""
    prompt = each_model.prepare([picture(32, 32), picture(20, 64, seed=1)], [QUESTION] * 2)  # the second loses rows of padding
    if all(one.kind != view for layout in prompt.layouts for one in layout.views):
        pytest.skip("this family does not cut pictures")
    ends = [name for name in each_model.hook_dict if name.startswith(LAYERS) and name.endswith("hook_resid_post")]
    blocks = [name.removesuffix("hook_resid_post") for name in ends]
    names = [f"{block}hook_resid_{end}" for block in blocks for end in ("pre", "post")]
    _, cache = each_model.run_with_cache(prompt, names_filter=[*names, MERGED])
    for before, after in pairwise(blocks):
        a, b = (site_tokens(cache, name, prompt, view=view).states for name in (f"{before}hook_resid_post", f"{after}hook_resid_pre"))
        assert torch.equal(a, b)
    last = f"{blocks[-1]}hook_resid_post"
    patches, tokens = (site_tokens(cache, name, prompt, view=view) for name in (last, MERGED))
    merge = prompt.layouts[0].views[0].merge
    carried = carried_places(prompt, view)
    for index in np.random.default_rng(0).permutation(len(patches.rows))[:6]:
        target = patches.states[index]

        def disturb(value, hook, target=target):
            value = value.clone(memory_format=torch.contiguous_format)
            flat = value.view(-1, value.shape[-1])
            flat[(flat == target).all(-1)] += flat.norm() * torch.linspace(-1, 1, flat.shape[-1])
            return value

        with each_model.hooks(fwd_hooks=[(last, disturb)]):
            _, moved = each_model.run_with_cache(prompt, names_filter=MERGED)
        there = (site_tokens(moved, MERGED, prompt, view=view).states != tokens.states).any(-1).nonzero().flatten().tolist()
        owner = int(patches.owners[index])
        mine = patches.owners == owner
        size = int(patches.rows[mine].max() + 1) * int(patches.columns[mine].max() + 1)
        crop = (int(index) - int(mine.nonzero()[0])) // size
        place = (owner, crop, int(patches.rows[index]) // merge, int(patches.columns[index]) // merge)
        assert [carried[k] for k in there] == ([place] if place in carried else [])


def carried_places(prompt, view):
    """The example, the crop of the tower, and the row and column in it, that each visual token of a view stands for."""
    places = []
    for example, layout in enumerate(prompt.layouts):
        features, whole = layout.structure.features, layout.views[0].count
        kinds = [k for k, one in enumerate(layout.views) if one.kind == view]
        for k, row in enumerate(layout.visual_tokens()):
            if row["view"] in kinds and features is None:
                places.append((example, kinds.index(row["view"]), int(row["row"]), int(row["column"])))
            elif row["view"] in kinds:
                crop, cell = divmod(features.of[k], whole)
                places.append((example, crop - (view == "tile"), *divmod(cell, layout.views[0].grid[1])))
    return places


@torch.no_grad()
def test_where_a_token_blends_several_activations_is_refused():
    model = hooked(next(variant for variant in VARIANTS if variant.family == "llava_onevision"))
    prompt = model.prepare(picture(96, 96), QUESTION)
    assert -1 in prompt.layout.structure.features.of
    _, cache = model.run_with_cache(prompt, names_filter=[RESIDUAL, EMBEDDED, PROJECTOR])
    assert len(site_tokens(cache, RESIDUAL, prompt, view="tile").rows) == prompt.layout.select("tile[*]").count
    assert len(site_tokens(cache, EMBEDDED, prompt, view="tile").rows) == 9 * 16
    assert len(site_tokens(cache, PROJECTOR, prompt, view="global").rows) == 16
    with pytest.raises(StudyError, match="blend"):
        site_tokens(cache, PROJECTOR, prompt, view="tile")


@pytest.mark.parametrize("view", ["global", "tile"])
def test_probes_run_on_every_family_with_pictures_of_many_sizes(each_model, view):
    pictures = [picture(*size, seed=k) for k, size in enumerate([(32, 32), (64, 96), (48, 64), (32, 96), (64, 64), (96, 32)] * 2)]
    images = [Stimulus(f"{k}", Image.fromarray(pixels)) for k, pixels in enumerate(pictures)]
    viewing = Viewing(view=view, question=QUESTION, batch_size=3)
    settings = ProbeSettings(epochs=1, test_share=0.4)
    layouts = [each_model.prepare(pixels, QUESTION).layout for pixels in pictures]
    sizes = [one.grid for layout in layouts for one in layout.views if one.kind == view]
    if not sizes:
        with pytest.raises(StudyError, match="view"):
            position_probes(each_model, images, viewing=viewing, settings=settings)
        return
    if each_model.processing.family.name == "llava-onevision" and view == "tile":
        viewing = replace(viewing, sites=(SITES[0], SITES[2]))
    outcome = position_probes(each_model, images, viewing=viewing, settings=settings)
    last = outcome.reports["trained"]["blocks.2.hook_resid_post"]
    assert last.accuracy_map().shape == (max(rows for rows, _ in sizes), max(columns for _, columns in sizes))
    assert all(np.isfinite(report.axes["both"].accuracy) for report in outcome.reports["trained"].values())


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
    again = position_probes(model, scenes, viewing=Viewing(question="how many objects ?"), settings=settings, store=tmp_path)
    assert again.to_json() == outcome.to_json()
    for changed in (replace(settings, epochs=5), replace(settings, seed=1)):
        with pytest.raises(StoreError, match=r"settings|seed"):
            position_probes(model, scenes, viewing=Viewing(question="how many objects ?"), settings=changed, store=tmp_path)


def test_stopped_probes_go_on_with_the_model_that_is_missing(model, tmp_path, monkeypatch):
    images = [Stimulus(f"{k}", Image.fromarray(picture(32, 32, k))) for k in range(12)]
    viewing, settings = Viewing(question=QUESTION), ProbeSettings(epochs=1, test_share=0.3)
    whole, seen, fit = position_probes(model, images, viewing=viewing, settings=settings), [], module._fit

    def counted(subject, *rest):
        if len(seen) == 1 and not again:
            raise KeyboardInterrupt
        seen.append(subject.name)
        return fit(subject, *rest)

    again = False
    monkeypatch.setattr(module, "_fit", counted)
    with pytest.raises(KeyboardInterrupt):
        position_probes(model, images, viewing=viewing, settings=settings, store=tmp_path)
    again = True
    outcome = position_probes(model, images, viewing=viewing, settings=settings, store=tmp_path)
    assert seen == [model.name, f"{model.name} (untrained)"]
    assert outcome.to_json() == whole.to_json()
    with pytest.raises(StoreError, match="images"):
        position_probes(model, images[1:], viewing=viewing, settings=settings, store=tmp_path)
    with torch.no_grad():
        model.hf.lm_head.weight[0, 0] += 1
    with pytest.raises(StoreError, match="content_hash"):
        position_probes(model, images, viewing=viewing, settings=settings, store=tmp_path)


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
