"""Layouts proved on the model, the self-check, and that both notice what is wrong."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from tests.conftest import picture

from sightlens.errors import CheckpointError, LayoutError
from sightlens.families import ImageOptions
from sightlens.families.internvl import InternVL
from sightlens.model import hook_contract, verify_layout


@pytest.mark.parametrize("size", [(48, 64), (64, 64), (100, 30), (33, 200), (16, 16)], ids=str)
def test_layouts_hold_on_the_model(any_model, size):
    checks = verify_layout(any_model, any_model.prepare([picture(*size), picture(40, 40, 1)], "is there a circle ?"), tokens=6)
    assert len(checks) == 6
    assert all(check.passed for check in checks)


@pytest.mark.parametrize("mode", ["pad", "crop"])
def test_both_image_modes_hold(mode):
    from tests.conftest import hooked
    from tests.tiny import VARIANTS

    model = hooked(VARIANTS[0])
    prompt = model.prepare(picture(40, 90), "is there a circle ?", options=ImageOptions(image_mode=mode))
    assert len(verify_layout(model, prompt, tokens=16)) >= 6
    boxes = prompt.layout.visual_tokens()["box"]
    assert (boxes[:, 1].min() < 0) == (mode == "pad")


def test_a_wrong_tile_order_is_found(monkeypatch):
    from tests.conftest import hooked
    from tests.tiny import VARIANTS

    model = hooked(VARIANTS[4])
    original = InternVL.view_image

    def swapped(self, *args, **kwargs):
        viewed = original(self, *args, **kwargs)
        first, second, *rest = viewed.views
        return replace(
            viewed, views=(replace(first, box=second.box, tile=second.tile), replace(second, box=first.box, tile=first.tile), *rest)
        )

    monkeypatch.setattr(InternVL, "view_image", swapped)
    with pytest.raises(LayoutError, match="patches of the token"):
        verify_layout(model, model.prepare(picture(48, 64), "is there a circle ?"), tokens=16)


def test_self_check_passes_and_notices_a_broken_path(model, monkeypatch):
    assert [check.passed for check in model.self_check()] == [True] * 3
    import sightlens.model.attention as attention

    original = attention.additive_mask
    monkeypatch.setattr(attention, "additive_mask", lambda *a, **k: original(*a, **k) * 0)
    with pytest.raises(CheckpointError, match="stepwise"):
        model.self_check()


def test_every_hook_keeps_its_promise(any_model):
    checks = list(hook_contract(any_model, any_model.prepare(np.asarray(picture()), "is there a circle ?")))
    assert [check for check in checks if not check.passed] == []
    assert len(checks) == len(any_model.hook_dict)
