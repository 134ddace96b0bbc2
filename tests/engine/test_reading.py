"""Reading without running more than is asked for, and many readers of one pass."""

from __future__ import annotations

import pytest
import torch
from tests.conftest import picture
from tests.engine.test_engine_equality import asked

from sightlens.engine import read_states, share_passes
from sightlens.errors import EngineError, HookError


def counting(model):
    """Count how often each decoder layer's MLP and the unembedding run, and on how many positions."""
    calls = {}
    for layer in range(3):
        calls[layer] = 0
        name = f"blocks.{layer}.hook_mlp_out"
        model.hook_dict[name].module.register_forward_hook(lambda *_, layer=layer: calls.update({layer: calls[layer] + 1}))
    return calls


@pytest.mark.parametrize(
    ("names", "ran"),
    [
        (["blocks.1.hook_resid_post", "vision_projector.hook_out"], [1, 1, 0]),
        (["hook_visual_embed"], [0, 0, 0]),
        (["blocks.0.attn.hook_z@image"], [1, 0, 0]),
        (["ln_final.hook_out"], [1, 1, 1]),
        (["blocks.*.hook_resid_pre"], [1, 1, 1]),
    ],
)
@torch.no_grad()
def test_a_pass_ends_with_the_last_layer_asked_for(model, names, ran):
    prompt = asked(model, batch=2) if "@" not in names[0] else asked(model, batch=1)
    _, whole = model.run_with_cache(prompt, names_filter=names)
    calls = counting(model)
    found = read_states(model, prompt, names)
    assert list(calls.values()) == ran
    assert set(found) == set(whole)
    assert all(torch.equal(found[name], whole[name]) for name in whole)
    before = model(prompt)
    assert torch.isfinite(before).all()
    assert list(calls.values()) == [count + 1 for count in ran]  # later passes run whole again


class Sum:
    """Adds up what it sees."""

    def __init__(self, *names):
        self.names, self.total, self.seen = names, 0.0, set()

    def read(self, prompt, cache):
        self.seen |= set(cache)
        self.total += sum(float(cache[name].sum()) for name in cache)


def test_many_readers_share_one_pass(model):
    prompts = [model.prepare(picture(seed=seed), "is there a red circle ?") for seed in range(3)]
    readers = [Sum("blocks.*.hook_resid_post"), Sum("blocks.1.hook_resid_post", "vision_projector.hook_out")]
    calls = counting(model)
    assert share_passes(model, iter(prompts), readers) == 3
    assert calls == {0: 3, 1: 3, 2: 3}
    assert readers[1].seen == {"blocks.1.hook_resid_post", "vision_projector.hook_out"}
    for reader in readers:
        caches = [model.run_with_cache(prompt, names_filter=list(reader.names))[1] for prompt in prompts]
        assert reader.total == pytest.approx(sum(float(cache[name].sum()) for cache in caches for name in cache), rel=1e-4)
    with pytest.raises(EngineError, match="at least one reader"):
        share_passes(model, prompts, [])
    with pytest.raises(HookError):
        share_passes(model, prompts, [Sum("blocks.9.hook_resid_post")])
