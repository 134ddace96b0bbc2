"""What the engine spends, what it refuses, and what it leaves behind."""

from __future__ import annotations

import gc
import weakref
from contextlib import suppress

import pytest
import torch
from accelerate.hooks import AlignDevicesHook, add_hook_to_module
from tests.conftest import hooked, picture
from tests.engine.test_engine_equality import CELLS, asked, scene, worst
from tests.tiny import DEFAULT
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from sightlens.engine import Engine, Keep
from sightlens.engine import plan as plan_module
from sightlens.engine.engine import read_size
from sightlens.errors import EngineError, HookError, InterventionError, PromptError, SelectorError
from sightlens.interventions import Ablate, Knockout, PatchIn
from sightlens.model import HookedVLM


def hook_counts(model):
    return [(len(module._forward_hooks), len(module._forward_pre_hooks)) for module in model.hf.modules()]


SWEEP = [[Knockout("post_image", "image", layers=(layer,), heads=(head,))] for layer in range(3) for head in range(4)]


class Peak(TorchDispatchMode):
    """The most bytes of tensors alive at once among those made while it is on."""

    def __init__(self):
        super().__init__()
        self.alive, self.now, self.most = weakref.WeakKeyDictionary(), 0, 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                if storage not in self.alive:
                    self.alive[storage] = storage.nbytes()
                    self.now += storage.nbytes()
                    weakref.finalize(storage, self._free, storage.nbytes())
        self.most = max(self.most, self.now)
        return result

    def _free(self, size):
        self.now -= size


@pytest.mark.parametrize("variant", DEFAULT, ids=str)
def test_planned_operations_are_those_that_run(variant):
    model = hooked(variant, attention="eager")  # the counter knows matrix products, not fused attention on a CPU
    prompt, donors = scene(model)
    plan = Engine(model).plan(prompt, list(CELLS.values()), donors=donors)
    with FlopCounterMode(display=False) as counter:
        plan.logits()
    assert plan.explain().flops == pytest.approx(counter.get_total_flops(), rel=0.03)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        for cell in CELLS.values():
            model(prompt, interventions=cell, donors=donors)
    assert plan.explain().loop_flops == pytest.approx(counter.get_total_flops(), rel=0.03)


def test_a_sweep_costs_what_it_changes(model):
    prompt = asked(model, batch=1)
    last = Engine(model).plan(prompt, [[PatchIn("blocks.2.hook_resid_post", at="last")]] * 50)
    assert last.explain().flops < 1.1 * Engine(model).plan(prompt, [[]]).explain().flops
    assert last.explain().ratio > 30


@torch.no_grad()
def test_the_tower_runs_once_and_unread_logits_are_not_made(model):
    prompt = asked(model, batch=2)
    calls, positions = [], []
    tower = model.hook_dict["vision_encoder.hook_in"].module
    tower.register_forward_pre_hook(lambda module, args, kwargs: calls.append(1), with_kwargs=True)
    model.hf.lm_head.register_forward_pre_hook(lambda module, args: positions.append(args[0].shape[1]))
    plan = Engine(model).plan(prompt, SWEEP)
    plan.logits()
    plan.generate(max_new_tokens=2)
    assert len(calls) == 1
    assert set(positions) == {1}


@pytest.mark.parametrize("rows", [1, 3])
@torch.no_grad()
def test_a_small_budget_means_small_batches_of_the_same_numbers(model, rows, monkeypatch):
    prompt, donors = scene(model)
    cells = list(CELLS.values())
    wide = Engine(model).plan(prompt, cells, donors=donors)
    assert wide.explain().rows_at_once > 3
    monkeypatch.setattr(plan_module.Plan, "_rows_at_once", lambda *args: rows)
    narrow = Engine(model).plan(prompt, cells, donors=donors)
    for one, other in zip(wide.logits(), narrow.logits(), strict=True):
        assert torch.allclose(one, other, atol=1e-5)
    assert wide.generate(max_new_tokens=4) == narrow.generate(max_new_tokens=4)


def test_the_budget_decides_how_many_rows_run_at_once(model):
    prompt = asked(model, batch=1)
    sizes = [Engine(model, memory=memory).plan(prompt, SWEEP * 40).explain() for memory in ("1MB", "2MB", "4GB")]
    assert sizes[0].rows_at_once < sizes[1].rows_at_once < sizes[2].rows_at_once
    assert all(size.peak_bytes <= size.memory for size in sizes)
    with pytest.raises(EngineError, match="for the clean run and one row"):
        Engine(model, memory="10KB").plan(prompt, SWEEP).logits()


@pytest.mark.parametrize("new_tokens", [0, 4])
def test_peak_memory_is_at_most_the_planned_one(model, new_tokens):
    prompt, cells = asked(model, batch=1), SWEEP * 20
    plan = Engine(model, memory="3MB").plan(prompt, cells)
    planned = plan.explain(new_tokens=new_tokens)
    assert 1 < planned.rows_at_once < len(cells)
    plan.prefix  # noqa: B018 - the clean pass itself needs more for a moment
    gc.collect()
    with Peak() as peak:
        for _ in plan.stream_texts(max_new_tokens=new_tokens) if new_tokens else plan.stream_logits():
            pass
    assert planned.batch_bytes / 6 < peak.most <= planned.batch_bytes


def test_out_of_memory_halves_the_rows_and_goes_on(model, monkeypatch):
    prompt = asked(model, batch=1)
    plan = Engine(model).plan(prompt, SWEEP)
    expected, tried, original = plan.logits(), [], plan_module.Plan._logits

    def tight(self, one, jobs):
        tried.append(len(jobs))
        if len(jobs) > limit:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return original(self, one, jobs)

    monkeypatch.setattr(plan_module.Plan, "_logits", tight)
    limit = 1
    assert all(torch.allclose(one, other, atol=1e-5) for one, other in zip(plan.logits(), expected, strict=True))
    assert tried[:4] == [4, 2, 1, 1]
    limit = 0
    with pytest.raises(EngineError, match="memory for one row"):
        plan.logits()
    monkeypatch.setattr(plan_module.Plan, "_logits", lambda *args: (_ for _ in ()).throw(RuntimeError("something else")))
    with pytest.raises(RuntimeError, match="something else"):
        plan.logits()


@torch.no_grad()
def test_a_smaller_dtype_keeps_less_and_changes_little(model):
    prompt = asked(model, batch=2)
    plans = [Engine(model, keep=keep).plan(prompt, SWEEP) for keep in (Keep(), Keep(dtype=torch.bfloat16, device="cpu"))]
    whole, half = (plan.prefix.nbytes - plan.prefix.logits.nbytes for plan in plans)
    assert half == whole / 2
    differences = [worst(prompt, one, other) for one, other in zip(*(plan.logits() for plan in plans), strict=True)]
    assert 0 < max(differences) < 0.3


@torch.no_grad()
def test_everything_is_put_back_after_an_exception(model):
    prompt, donors = scene(model)
    expected, before = model(prompt), hook_counts(model)

    def burst(hidden_states):
        raise KeyboardInterrupt

    for cell in CELLS.values():
        plan = Engine(model).plan(prompt, [cell], donors=donors)
        plan.prefix  # noqa: B018
        model.sites.decoder.norm.forward = burst
        with suppress(KeyboardInterrupt):
            plan.logits()
            assert cell == []  # needs no pass
        del model.sites.decoder.norm.forward
        assert torch.equal(model(prompt), expected)
    assert hook_counts(model) == before
    assert not any("forward" in vars(module) for module in model.hf.modules())


def test_hooks_of_ones_own_are_refused(model):
    prompt = asked(model, batch=1)
    plan = Engine(model).plan(prompt, SWEEP)
    with model.hooks(fwd_hooks=[("blocks.0.hook_resid_post@last", lambda value, hook: value * 2)]):
        for run in (plan.logits, plan.generate):
            with pytest.raises(EngineError, match=r"hooks of one's own.*blocks.0.hook_resid_post"):
                run()
    assert len(plan.logits()) == len(SWEEP)


@pytest.mark.parametrize("pre", [False, True])
@pytest.mark.parametrize("where", ["model.language_model.layers.0", "model.language_model.layers.1.mlp.down_proj", "model", ""])
def test_torch_hooks_on_the_language_model_are_refused(model, where, pre):
    plan = Engine(model).plan(asked(model, batch=1), SWEEP)
    module = model.hf.get_submodule(where)
    handle = module.register_forward_pre_hook(lambda *_: None) if pre else module.register_forward_hook(lambda *_: None)
    for run in (plan.logits, plan.generate):
        with pytest.raises(EngineError, match=f"torch forward hooks.* on {where or type(model.hf).__name__}. "):
            run()
    handle.remove()
    assert len(plan.logits()) == len(SWEEP)
    other = HookedVLM(model.hf, model.processing)
    with other.hooks(fwd_hooks=[("blocks.0.hook_mlp_out", lambda value, hook: value)]), pytest.raises(EngineError, match="layers.0.mlp"):
        plan.logits()


def test_what_wraps_modules_or_only_watches_may_stay(model):
    prompt, donors = scene(model)
    expected = Engine(model).plan(prompt, list(CELLS.values()), donors=donors).logits()
    model.hf.model(**prompt.tensors, output_hidden_states=True)  # HF's recorders stay on the layers
    for module in model.sites.decoder.modules():
        add_hook_to_module(module, AlignDevicesHook(io_same_device=True))
    seen = []
    model.hook_dict["vision_projector.hook_out"].module.register_forward_hook(lambda *_: seen.append(1))
    found = Engine(model).plan(prompt, list(CELLS.values()), donors=donors).logits()
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
    assert seen


def test_what_cannot_be_planned_is_refused(model):
    prompt, engine = asked(model, batch=2), Engine(model)
    for cells, options in (
        ([], {}),
        ([[]], {"examples": [[2]]}),
        ([[]], {"examples": []}),
        ([[], []], {"examples": [[0, 0], [1]]}),
        ([[], []], {"examples": [[], [1]]}),
        ([[]], {"reads": "first"}),
        ([[]], {"reads": "answer"}),
    ):
        with pytest.raises(EngineError):
            engine.plan(prompt, cells, **options)
    for cell, error in (
        (Knockout("last", "image", layers=(3,)), InterventionError),
        (PatchIn("blocks.7.hook_z"), HookError),
        (Ablate("object[4]", "zero"), SelectorError),
    ):
        with pytest.raises(error):
            engine.plan(prompt, [[cell]])
    with pytest.raises(InterventionError, match="touched none"):
        engine.plan(prompt, [[Ablate("answer", "zero")]]).logits()
    with pytest.raises(InterventionError, match="touched none"):
        engine.plan(prompt, [[Ablate("object & ~object", "zero")]]).generate(max_new_tokens=2)
    with pytest.raises(EngineError, match="greedy"):
        engine.plan(prompt, [[]]).generate(options={"do_sample": True})
    for options in ({"num_beams": 2}, {"foo": 1}, {"max_length": 9}, {"max_new_tokens": 0}):
        with pytest.raises(PromptError):
            engine.plan(prompt, [[]]).generate(options=options)
    with pytest.raises(EngineError, match="floating-point"):
        Keep(dtype=torch.int8)
    for size in ("4", "GB", "-1GB", "4 parsecs", 0, -3):
        with pytest.raises(EngineError, match="such as 4GB"):
            read_size(size)


def test_a_plan_says_what_it_does():
    model = hooked(DEFAULT[0])
    prompt = model.prepare(picture(), "is there a red circle ?")
    cells = [[], [Ablate("image", "zero", site="hook_visual_embed")], [Ablate("image", "zero")]]
    text = str(Engine(model).plan(prompt, cells).explain())
    assert "3 cells × 1 examples of 26 positions" in text
    assert "1 rows run whole: hook_visual_embed acts before image features are placed" in text
    assert "operations" in text
    assert "memory beside the model" in text
