"""Examples taken out of a batch: the same inputs as if they had been prepared with the same padding, in every family."""

from __future__ import annotations

import pytest
import torch
from tests.conftest import hooked, picture
from tests.tiny import EACH, TEXTS, VARIANTS, Variant

SHORT, LONG = "is there a red circle ?", "how many green square in the image and where is the blue star ?"
GROUPS = [[picture(), picture(40, 40, 1)], [picture(64, 50, 2)], [], [picture(30, 90, 3)]]


@pytest.mark.parametrize("variant", [*EACH, VARIANTS[6], VARIANTS[9]], ids=str)
@pytest.mark.parametrize("chosen", [(1,), (0,), (2,), (3, 0, 3), (2, 1), (0, 1, 2, 3)], ids=str)
@torch.no_grad()
def test_selected_examples_give_their_own_logits(variant: Variant, chosen: tuple[int, ...]) -> None:
    model = hooked(variant)
    texts = [SHORT, LONG, "how many ?", SHORT]
    prompt = model.prepare(GROUPS, texts)
    found, prepared = model.processing.select(prompt, chosen), model.prepare([GROUPS[k] for k in chosen], [texts[k] for k in chosen])
    real, own = (given.tensors["attention_mask"].bool() for given in (found, prepared))
    logits = model(found)[real]
    assert torch.allclose(logits, model(prompt)[list(chosen)][real], atol=1e-5)
    assert torch.allclose(logits, model(prepared)[own], atol=1e-5)
    assert set(found.tensors) == set(prepared.tensors)
    assert found.layouts == tuple(prompt.layouts[k] for k in chosen)
    assert found.texts == prepared.texts
    assert [len(group) for group in found.images] == [len(GROUPS[k]) for k in chosen]


def test_texts_alone() -> None:
    model = hooked(TEXTS[0])
    prompt = model.prepare([None, None], [SHORT, LONG])
    found = model.processing.select(prompt, [1, 1])
    assert torch.equal(found.tensors["input_ids"], prompt.tensors["input_ids"][[1, 1]])
