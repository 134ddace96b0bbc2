"""What the engine spends, what it refuses, and what it leaves behind."""

from __future__ import annotations

import gc
import re
import weakref
from contextlib import suppress

import pytest
import torch
from accelerate.hooks import AlignDevicesHook, add_hook_to_module
from tests.conftest import hooked, picture
from tests.engine.test_engine_equality import CELLS, asked, scene, worst
from tests.tiny import DEFAULT, EACH, VARIANTS
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from sightlens.engine import Engine, Keep
from sightlens.engine import plan as plan_module
from sightlens.engine.engine import read_size
from sightlens.engine.explanation import in_bytes
from sightlens.errors import EngineError, HookError, InterventionError, PromptError, SelectorError
from sightlens.interventions import Ablate, AblateHeads, Knockout, PatchIn
from sightlens.model import HookedVLM


def hook_counts(model):
    return [(len(module._forward_hooks), len(module._forward_pre_hooks)) for module in model.hf.modules()]


SWEEP = [[Knockout("post_image", "image", layers=(layer,), heads=(head,))] for layer in range(3) for head in range(4)]


class Peak(TorchDispatchMode):
    """The most bytes of tensors alive at once among those made while it is on."""

    def __init__(self):
        super().__init__()
        self.alive, self.given, self.now, self.most = weakref.WeakKeyDictionary(), weakref.WeakSet(), 0, 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        for tensor in tree_leaves((args, kwargs)):
            if isinstance(tensor, torch.Tensor) and tensor.untyped_storage() not in self.alive:
                self.given.add(tensor.untyped_storage())  # a weight or an input, of which views may be made
        result = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                if storage not in self.alive and storage not in self.given:
                    self.alive[storage] = storage.nbytes()
                    self.now += storage.nbytes()
                    weakref.finalize(storage, self._free, storage.nbytes())
        self.most = max(self.most, self.now)
        return result

    def _free(self, size):
        self.now -= size


KINDS = {
    "knockouts": [[Knockout("post_image", "image", layers=(layer,))] for layer in range(3)],
    "heads": [[AblateHeads(((layer, 1),))] for layer in range(3)],
    "whole rows": [[Ablate("image & row[0]", "zero", site="vision_projector.hook_out")], [Ablate("question", "zero", site="hook_embed")]],
    "tokens": [[Ablate("image & row[1]", "noise")], [], [Ablate("last", "zero", site="blocks.2.hook_resid_post")]],
}


def group(model):
    """Two examples of different sizes, the second with two pictures."""
    images = [[picture(64, 50, 2)], [picture(), picture(40, 40, 1)]]
    return model.prepare(images, ["is there a red circle ?", "how many green square in the image ?"])


@pytest.mark.parametrize("new_tokens", [0, 5])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("variant", [*EACH, VARIANTS[1]], ids=str)
def test_planned_operations_are_those_that_run(variant, kind, new_tokens):
    model = hooked(variant, attention="eager")  # the counter knows matrix products, not fused attention on a CPU
    prompt, cells = group(model), KINDS[kind]
    plan, options = Engine(model).plan(prompt, cells), {"eos_token_id": None}
    planned = plan.explain(new_tokens=new_tokens)
    with FlopCounterMode(display=False) as counter:
        plan.generate(max_new_tokens=new_tokens, options=options) if new_tokens else plan.logits()
    assert planned.flops == pytest.approx(counter.get_total_flops(), rel=0.03)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        for cell in cells:
            if new_tokens:
                model.generate(prompt, interventions=cell, max_new_tokens=new_tokens, options=options)
            else:
                model(prompt, interventions=cell)
    assert planned.loop_flops == pytest.approx(counter.get_total_flops(), rel=0.03)


@pytest.mark.parametrize("variant", DEFAULT, ids=str)
def test_operations_of_a_plan_of_all_sorts(variant):
    model = hooked(variant, attention="eager")
    prompt, donors = scene(model)
    plan = Engine(model).plan(prompt, list(CELLS.values()), donors=donors, examples=[[1], *[[0, 1]] * (len(CELLS) - 1)], reads="all")
    with FlopCounterMode(display=False) as counter:
        plan.logits()
    assert plan.explain().flops == pytest.approx(counter.get_total_flops(), rel=0.03)


def test_a_sweep_costs_what_it_changes(model):
    prompt = asked(model, batch=1)
    last = Engine(model).plan(prompt, [[PatchIn("blocks.2.hook_resid_post", at="last")]] * 50)
    assert last.explain().flops < 1.1 * Engine(model).plan(prompt, [[]]).explain().flops
    assert last.explain().ratio > 30


@torch.no_grad()
def test_the_tower_runs_once_and_unread_logits_are_not_made(each_model):
    model, prompt = each_model, group(each_model)
    calls, positions = [], []
    tower = model.hook_dict["vision_encoder.hook_in"].module
    tower.register_forward_pre_hook(lambda module, args, kwargs: calls.append(1), with_kwargs=True)
    plan = Engine(model).plan(prompt, [*SWEEP, *KINDS["heads"], *KINDS["tokens"]])
    handle = model.hf.lm_head.register_forward_pre_hook(lambda module, args: positions.append(args[0].shape[1]))
    plan.logits()
    plan.generate(max_new_tokens=2)
    once = len(calls)
    assert set(positions) == {1}
    calls.clear()
    model(prompt)
    assert once == len(calls)  # as often as one forward pass calls it
    calls.clear()
    handle.remove()
    Engine(model).plan(prompt, KINDS["whole rows"] * 3).logits()
    assert calls  # cells that act before the merge see pictures again


class Rows:
    """Notes how many rows each pass of a decoder has."""

    def __init__(self, model, monkeypatch):
        self.counts, forward = [], model.sites.decoder.forward

        def noting(*args, **kwargs):
            self.counts.append(len(kwargs["inputs_embeds"] if kwargs.get("inputs_embeds") is not None else kwargs["input_ids"]))
            return forward(*args, **kwargs)

        monkeypatch.setattr(model.sites.decoder, "forward", noting, raising=False)


@pytest.mark.parametrize("new_tokens", [0, 4])
@torch.no_grad()
def test_a_small_budget_means_small_batches_of_the_same_numbers(model, new_tokens, monkeypatch):
    prompt, donors = scene(model, batch=1)
    cells, rows = [*SWEEP * 2, *list(CELLS.values())[-5:]], Rows(model, monkeypatch)

    def run(memory):
        rows.counts.clear()
        plan = Engine(model, memory=memory).plan(prompt, cells, donors=donors)
        found = plan.generate(max_new_tokens=new_tokens) if new_tokens else plan.logits()
        explained = plan.explain(new_tokens=new_tokens)
        assert max(rows.counts) == explained.rows_at_once
        return found, explained, len(rows.counts)

    wide, explained, few = run("4GB")
    narrow, small, many = run(explained.needed_bytes)
    assert explained.rows_at_once > small.rows_at_once
    assert many > few
    assert small.peak_bytes <= small.memory
    if new_tokens:
        assert wide == narrow
    else:
        assert all(torch.allclose(one, other, atol=1e-5) for one, other in zip(wide, narrow, strict=True))


@torch.no_grad()
def test_rows_that_run_whole_run_together_and_only_where_asked(model, monkeypatch):
    prompt, rows = asked(model, batch=2), Rows(model, monkeypatch)
    cells = [[Ablate(f"image & row[{row}]", "zero", site="hook_visual_embed")] for row in (0, 1)] * 3
    plan = Engine(model).plan(prompt, cells, examples=[[0], [1], [0, 1], [1], [0], [1]])
    found, texts = plan.logits(), plan.generate(max_new_tokens=2)
    assert rows.counts[:2] == [7, 7]  # one batch of logits, one prefill; nothing else ran
    assert plan.explain().rows_at_once == 7
    for cell, chosen, logits, words in zip(cells, [[0], [1], [0, 1], [1], [0], [1]], found, texts, strict=True):
        expected = model(prompt, interventions=cell)[chosen, -1:]
        assert float((logits - expected).abs().max()) < 1e-5
        assert words == [model.generate(prompt, interventions=cell, max_new_tokens=2)[k] for k in chosen]


def test_the_budget_decides_how_many_rows_run_at_once(model):
    prompt = asked(model, batch=1)
    sizes = [Engine(model, memory=memory).plan(prompt, SWEEP * 40).explain() for memory in ("1MB", "2MB", "4GB")]
    assert sizes[0].rows_at_once < sizes[1].rows_at_once < sizes[2].rows_at_once
    assert all(size.peak_bytes <= size.memory for size in sizes)
    with pytest.raises(EngineError, match="for the clean run and one row"):
        Engine(model, memory="10KB").plan(prompt, SWEEP).logits()


def peak(run):
    gc.collect()
    with Peak() as seen:
        for _ in run():
            pass
    return seen.most


@pytest.mark.parametrize("new_tokens", [0, 4])
def test_a_batch_of_rows_needs_at_most_the_planned_memory(model, new_tokens):
    prompt, cells = asked(model, batch=1), SWEEP * 20
    plan = Engine(model, memory="4MB").plan(prompt, cells)
    planned = plan.explain(new_tokens=new_tokens)
    assert 1 < planned.rows_at_once < len(cells)
    plan.prefix  # noqa: B018 - kept already
    most = peak(lambda: plan.stream_texts(max_new_tokens=new_tokens) if new_tokens else plan.stream_logits())
    assert planned.batch_bytes / 8 < most <= planned.batch_bytes


@pytest.mark.parametrize("how", ["last", "all", "generate", "gradients"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("variant", EACH, ids=str)
def test_peak_memory_is_at_most_the_planned_one(variant, kind, how):
    model = hooked(variant)
    vector = torch.zeros(32, requires_grad=True)
    cells = [[*cell, Ablate("last", "v", site="blocks.1.hook_resid_post")] for cell in KINDS[kind]] * 8
    plan = Engine(model, memory="12MB").plan(group(model), cells, donors={"v": vector}, reads="all" if how == "all" else "last")
    planned = plan.explain(new_tokens=4 * (how == "generate"), gradients=how == "gradients")
    assert planned.fits
    runs = {"generate": lambda: plan.stream_texts(max_new_tokens=4, options={"eos_token_id": None})}
    most = peak(runs.get(how, lambda: plan.stream_logits(gradients=how == "gradients")))
    assert planned.peak_bytes / 12 < most <= planned.peak_bytes + planned.result_bytes
    assert planned.peak_bytes <= planned.memory


@pytest.mark.parametrize("gradients", [False, True])
def test_results_that_are_held_are_counted(model, gradients):
    vector = torch.zeros(32, requires_grad=True)
    cells = [[Ablate("image", "v", site="blocks.0.hook_resid_pre")]] * 40
    plan = Engine(model, memory="4MB").plan(asked(model, batch=1), cells, donors={"v": vector}, reads="all")
    planned = plan.explain(gradients=gradients)
    gc.collect()
    with Peak() as seen:
        found = plan.logits(gradients=gradients)
        assert seen.now > sum(logits.nbytes for logits in found)
    assert seen.most <= planned.peak_bytes + planned.result_bytes
    assert seen.most > planned.peak_bytes or not gradients
    assert sum(logits.nbytes for logits in found) == plan.explain().result_bytes


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
def test_what_is_kept_is_counted_as_it_is_kept(each_model):
    prompt, cells = group(each_model), [*SWEEP, [Ablate("last", "zero", site="blocks.1.attn.hook_z")]]
    sizes = []
    for keep in (Keep(), Keep(dtype=torch.bfloat16)):
        plan = Engine(each_model, keep=keep).plan(prompt, cells)
        held = plan.prefix.nbytes + sum(leaf.nbytes for leaf in tree_leaves(plan.prefix.arguments) if isinstance(leaf, torch.Tensor))
        assert held <= plan.explain().kept_bytes < 1.5 * held
        sizes.append(plan.explain().kept_bytes)
    assert sizes[1] < 0.75 * sizes[0]


@torch.no_grad()
def test_what_is_kept_elsewhere_takes_nothing_of_the_budget(model):
    prompt = asked(model, batch=2)
    here, there = (Engine(model, keep=Keep(device=device)).plan(prompt, SWEEP) for device in ("cpu", "meta"))
    assert {t.device.type for pair in there.prefix.keys_values for t in pair} == {"meta"}
    assert {t.device.type for t in there.prefix.states.values()} == {"meta"}
    assert there.prefix.logits.device.type == "cpu"
    left = there.prefix.logits.nbytes + 2 * 5 * 8 * prompt.layouts[0].length  # logits and positions stay here
    assert there.explain().kept_bytes == left < here.explain().kept_bytes / 10
    gc.collect()
    with Peak() as seen:
        Engine(model, keep=Keep(device="meta")).plan(prompt, SWEEP).prefix  # noqa: B018
    assert seen.most <= there.explain().clean_bytes + here.prefix.nbytes  # the meta device counts here, too
    tight = there.explain().needed_bytes
    assert Engine(model, memory=tight, keep=Keep(device="meta")).plan(prompt, SWEEP).explain().fits
    assert not Engine(model, memory=tight).plan(prompt, SWEEP).explain().fits


@pytest.mark.parametrize("cell", [Knockout("last", "image", layers=(1,)), Ablate("image", "zero", site="hook_visual_embed")], ids=str)
def test_out_of_memory_is_always_said(model, cell, monkeypatch):
    prompt, forward, most = asked(model, batch=2), model.sites.decoder.forward, 1

    def tight(*args, **kwargs):
        if len(kwargs["inputs_embeds"]) > most:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return forward(*args, **kwargs)

    clean = isinstance(cell, Knockout)
    expected = Engine(model).plan(prompt, [[cell]]).logits()[0]
    monkeypatch.setattr(model.sites.decoder, "forward", tight, raising=False)
    plan = Engine(model).plan(prompt, [[cell]])
    if clean:
        with pytest.raises(EngineError, match=r"memory for the clean run; got CUDA out of memory. Take fewer examples"):
            plan.logits()
        return
    assert torch.allclose(plan.logits()[0], expected, atol=1e-5)  # halved
    most = 0
    for run in (plan.logits, plan.generate):
        with pytest.raises(EngineError, match="memory for one row"):
            run()


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
    with other.hooks(fwd_hooks=[("blocks.0.hook_mlp_out", lambda value, hook: value)]), pytest.raises(EngineError, match=r"layers\.0\.mlp"):
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
        ([[]], {"reads": "question"}),
        ([[]], {"reads": "object & ~object"}),
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
    plan = Engine(model).plan(prompt, cells)
    assert str(plan.explain()).splitlines()[:3] == [
        "3 cells × 1 example of 26 positions",
        "  3 rows, 1 pass, up to 1 at once; 1 row without a pass",
        "  1 row of the whole prompt: hook_visual_embed acts before image features are placed, so the vision tower or the merge runs again",
    ]
    assert re.search(r"[\d.e+]+ operations; a loop of full passes .*×\)", str(plan.explain()))
    assert re.search(r"[\d.]+KB kept \+ [\d.]+KB rows, at most [\d.]+KB of 4.0GB; results 708B", str(plan.explain()))
    assert "does not fit" not in str(plan.explain())
    assert in_bytes(999) == "999B"
    assert read_size(in_bytes(12_301)) >= 12_301


def test_a_plan_that_will_be_refused_says_so(model):
    plans = [Engine(model, memory="10KB").plan(asked(model, batch=1), cells) for cells in (SWEEP, SWEEP[:1], [KINDS["whole rows"][0]])]
    for plan in plans:
        for new_tokens, run in ((0, plan.logits), (4, lambda plan=plan: plan.generate(max_new_tokens=4))):
            explained = plan.explain(new_tokens=new_tokens)
            needed = in_bytes(explained.needed_bytes)
            assert not explained.fits
            assert f"does not fit: memory={needed} would hold" in str(explained)
            with pytest.raises(EngineError, match=f"memory={needed} or more, for the clean run and one row"):
                run()
        enough = Engine(model, memory=plan.explain().needed_bytes).plan(
            plan.prompt, [list(job.row.interventions) for job in plan.schedule.jobs]
        )
        assert enough.explain().fits
        assert enough.explain().rows_at_once >= 1
        enough.logits()
