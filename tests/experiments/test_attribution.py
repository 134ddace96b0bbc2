"""Attribution patching against true effects, a numerical derivative and the planted circuit."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from tests.conftest import hooked
from tests.engine.test_engine_equality import asked, scene
from tests.tiny import EACH

from sightlens.engine import Engine
from sightlens.errors import InterventionError, StudyError
from sightlens.experiments.attribution import attribute
from sightlens.interventions import Ablate, AblateHeads, Knockout, PatchIn


def difference(logits):
    return logits[:, -1, 12] - logits[:, -1, 20]


@torch.no_grad()
def test_it_is_exact_where_the_metric_is_linear(model):
    prompt, _ = scene(model)
    names = ["ln_final.hook_out"]
    donors = {"clean": model.run_with_cache(asked(model, batch=2, seed=7), names_filter=names)[1]}
    cells = [PatchIn("ln_final.hook_out", at="last"), Ablate("last", "zero", site="ln_final.hook_out")]
    estimates = attribute(Engine(model), prompt, cells, difference, donors=donors).effects
    clean, *found = Engine(model).plan(prompt, [[], *([cell] for cell in cells)], donors=donors).logits()
    true = np.stack([(difference(logits) - difference(clean)).numpy() for logits in found])
    assert np.abs(true).max() > 0.1
    assert np.allclose(estimates, true, atol=1e-5)


@pytest.mark.parametrize(
    "cell",
    [
        PatchIn("blocks.1.attn.hook_z", heads=(2,), mode="interpolate", alpha=1e-3),
        PatchIn("blocks.0.hook_resid_mid", at="image", mode="interpolate", alpha=1e-3),
        PatchIn("blocks.1.attn.hook_k", at="image", heads=(1,), mode="interpolate", alpha=1e-3),
        PatchIn("hook_merged_embed", at="object", mode="interpolate", alpha=1e-3),
    ],
    ids=str,
)
@torch.no_grad()
def test_small_changes_have_the_estimated_effect(model, cell):
    compare_with_difference(model, cell)


@torch.no_grad()
def test_small_changes_count_where_features_come_in_again():
    cell = PatchIn("hook_merged_embed", at="object", mode="interpolate", alpha=1e-3)
    variant = next(variant for variant in EACH if variant.family == "qwen3_vl")
    model = hooked(variant)
    model.hf.requires_grad_(False)
    followed = compare_with_difference(model, cell)
    alone = compare_with_difference(hooked(variant), replace(cell, reinjected=False))
    assert np.abs(followed - alone).max() > 1e-5


def compare_with_difference(model, cell):
    """Hold an estimate against the difference of two passes in float64, and return it."""
    prompt, _ = scene(model)
    names = [cell.site, *model.hook_dict[cell.site].site.companions]
    donors = {"clean": model.run_with_cache(asked(model, batch=2, seed=7), names_filter=names)[1]}
    estimate = attribute(Engine(model), prompt, [cell], difference, donors=donors).effects[0]
    model.hf.double()
    wide = {name: tensor.double() if tensor.is_floating_point() else tensor for name, tensor in prompt.tensors.items()}
    prompt = replace(prompt, tensors=wide)
    donors = {"clean": donors["clean"].to(dtype=torch.float64)}
    true = difference(model(prompt, interventions=[cell], donors=donors)) - difference(model(prompt))
    assert estimate == pytest.approx(true.numpy(), rel=0.05, abs=1e-6)
    assert np.abs(estimate).max() > 1e-5
    return estimate


def test_a_screen_ranks_and_says_how_well(model):
    prompt, donors = scene(model)
    cells = [
        PatchIn(f"blocks.{layer}.attn.hook_z", heads=(head,), mode="interpolate", alpha=0.05) for layer in range(3) for head in range(4)
    ]
    found = attribute(Engine(model), prompt, cells, difference, donors=donors)
    assert found.effects.shape == (12, 2)
    whole = found.check(count=12)
    assert len(whole.measured) == 12
    assert whole.rank_correlation > 0.9
    ranking = found.effects.mean(1).argsort()
    assert {int(ranking[0]), int(ranking[-1])} <= set(found.check(count=4).measured)
    with pytest.raises(StudyError, match="two or more"):
        attribute(Engine(model), prompt, cells[:1], difference, donors=donors).check()


def test_a_metric_gives_one_number_per_example(model):
    prompt, _ = scene(model)
    for metric in (lambda logits: logits[:, -1, 3].mean(), lambda logits: logits[:, -1], lambda logits: logits[:, -1, 3:4]):
        with pytest.raises(StudyError, match="one number per example"):
            attribute(Engine(model), prompt, [AblateHeads(((0, 1),))], metric, donors={})


def test_what_has_no_derivative_is_refused(model):
    prompt, _ = scene(model)
    for cell in (Knockout("last", "image"), Ablate("image", "zero", site="hook_visual_embed")):
        with pytest.raises(InterventionError, match="writes values at hook_merged_embed or later"):
            attribute(Engine(model), prompt, [cell], difference, donors={})
    assert attribute(Engine(model), prompt, [AblateHeads(((0, 1),))], difference, donors={}).effects.shape == (1, 2)
