"""The contract of every hook name: it fires, reads what HF computes, and writing it changes the logits."""

from __future__ import annotations

import pytest
import torch
from tests.conftest import hooked, picture
from tests.tiny import DEFAULT, VARIANTS

from sightlens.errors import HookError
from sightlens.families.sites import Attention, HeadResult
from sightlens.interventions import PatchIn
from sightlens.model import HookedVLM

QUESTION = "is there a red circle ?"
MODULES = ("hook_attn_out", "hook_mlp_out", "hook_resid_mid")
NAMES = [(variant, name) for variant in DEFAULT for name in hooked(variant).hook_dict]
SHARED = {variant: hooked(variant) for variant in VARIANTS}


@pytest.fixture(scope="module")
def prompts() -> dict:
    return {variant: model.prepare(picture(), QUESTION) for variant, model in SHARED.items()}


@pytest.fixture(scope="module")
def plain(prompts) -> dict:
    with torch.no_grad():
        return {variant: SHARED[variant](prompt) for variant, prompt in prompts.items()}


@pytest.mark.parametrize(("variant", "name"), NAMES, ids=[f"{variant}-{name}" for variant, name in NAMES])
@torch.no_grad()
def test_writing_changes_the_logits_and_writing_back_does_not(variant, name, prompts, plain):
    model, prompt, plain = SHARED[variant], prompts[variant], plain[variant]
    seen = []

    def rewrite(value, hook):
        seen.append(value.shape)
        return value.clone()

    def disturb(value, hook):
        # text positions only at hook_embed: the merge overwrites the others
        noise = torch.randn(value.shape, generator=torch.Generator().manual_seed(0))
        return value + 0.5 * noise if "hook_attn_mask" not in name else value - 3 * noise.abs()

    same = model.run_with_hooks(prompt, fwd_hooks=[(name, rewrite)])
    site = model.hook_dict[name].site
    assert len(seen) == 1
    assert len(seen[0]) == len(site.dims)
    if isinstance(site.tap, Attention) and site.tap.tensor in ("attn_mask", "attn_scores", "pattern"):
        assert torch.allclose(same, plain, atol=1e-5)
    else:
        assert torch.equal(same, plain)
    changed = model.run_with_hooks(prompt, fwd_hooks=[(name, disturb)])
    assert (changed - plain).abs().max() > 1e-4
    assert not model.hook_dict[name].has_hooks()


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
@torch.no_grad()
def test_residuals_patterns_and_visual_embeddings_are_hfs_own(variant, prompts):
    model, prompt = hooked(variant, attention="eager"), prompts[variant]
    eager = hooked(variant, attention="eager").hf
    inputs, outputs = {}, {}
    towers = [name for name in model.hook_dict if name.startswith("vision_encoder.encoder_layers") and name.endswith("resid_post")]
    for name in [*towers, *(f"blocks.{layer}.hook_resid_pre" for layer in range(3))]:
        module = eager.get_submodule(model.hook_dict[name].site.module)
        module.register_forward_hook(lambda m, a, o, key=name: outputs.__setitem__(key, o))
        module.register_forward_pre_hook(
            lambda m, a, k, key=name: inputs.__setitem__(key, a[0] if a else k["hidden_states"]), with_kwargs=True
        )
    out = eager(**prompt.tensors, output_hidden_states=True, output_attentions=True)
    # looking into a packed tower's attention joins its windows, which rounds differently; tests/families/test_qwen.py looks there
    names = [name for name, point in model.hook_dict.items() if not (isinstance(point.site.tap, Attention) and point.site.order)]
    logits, cache = model.run_with_cache(prompt, names_filter=names)
    assert torch.allclose(logits, out.logits, atol=1e-5)
    for layer in range(model.cfg.n_layers):
        assert torch.allclose(cache[f"blocks.{layer}.hook_resid_pre"], inputs[f"blocks.{layer}.hook_resid_pre"], atol=1e-5)
        assert torch.allclose(cache[f"blocks.{layer}.attn.hook_pattern"], out.attentions[layer], atol=1e-6)
        if layer:
            assert torch.equal(cache[f"blocks.{layer}.hook_resid_pre"], cache[f"blocks.{layer - 1}.hook_resid_post"])
        if not model.processing.family.reinjections(eager.config):
            assert torch.allclose(cache[f"blocks.{layer}.hook_resid_pre"], out.hidden_states[layer], atol=1e-5)
    assert torch.allclose(cache["ln_final.hook_out"], out.hidden_states[-1], atol=1e-5)
    given = {name: prompt.tensors[name] for name in ("pixel_values", "image_sizes", "image_grid_thw") if name in prompt.tensors}
    features = eager.model.get_image_features(**given).pooler_output
    placeholders = prompt.tensors["input_ids"] == model.processing.family.image_token_id(eager.config)
    visual = torch.cat(list(features)).flatten(0, -2)
    assert torch.allclose(cache["hook_merged_embed"][placeholders], visual, atol=1e-5)
    if prompt.layout.structure.features is None:
        assert torch.allclose(cache["hook_visual_embed"].reshape(visual.shape), visual, atol=1e-5)
    assert towers
    for name in towers:
        order = model.hook_dict[name].site.order
        expected = outputs[name] if order is None else outputs[name][order.indices(prompt.tensors["image_grid_thw"])]
        assert torch.allclose(cache[name], expected, atol=1e-5)


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
@torch.no_grad()
def test_projections_are_what_the_modules_return(variant, prompts):
    model, prompt = SHARED[variant], prompts[variant]
    reference = hooked(variant).hf
    layers = reference.get_submodule(model.hook_dict["blocks.0.hook_resid_pre"].site.module.removesuffix(".0"))
    got: dict[str, torch.Tensor] = {}
    for layer, block in enumerate(layers):
        for letter in "qkv":
            block.self_attn.get_submodule(f"{letter}_proj").register_forward_hook(
                lambda m, a, o, key=f"blocks.{layer}.attn.hook_{letter}": got.__setitem__(key, o)
            )
        block.self_attn.o_proj.register_forward_pre_hook(lambda m, a, key=f"blocks.{layer}.attn.hook_z": got.__setitem__(key, a[0]))
        at = {name: reference.get_submodule(model.hook_dict[f"blocks.{layer}.{name}"].site.module) for name in MODULES}
        block.mlp.down_proj.register_forward_pre_hook(lambda m, a, key=f"blocks.{layer}.mlp.hook_post": got.__setitem__(key, a[0]))
        at["hook_attn_out"].register_forward_hook(
            lambda m, a, o, key=f"blocks.{layer}.hook_attn_out": got.__setitem__(key, o[0] if isinstance(o, tuple) else o)
        )
        at["hook_mlp_out"].register_forward_hook(lambda m, a, o, key=f"blocks.{layer}.hook_mlp_out": got.__setitem__(key, o))
        at["hook_resid_mid"].register_forward_pre_hook(lambda m, a, key=f"blocks.{layer}.hook_resid_mid": got.__setitem__(key, a[0]))
    reference(**prompt.tensors)
    _, cache = model.run_with_cache(prompt, names_filter=list(got))
    assert len(got) == 8 * model.cfg.n_layers
    for name, value in got.items():
        assert torch.equal(cache[name].reshape(value.shape), value), name


@torch.no_grad()
def test_head_results_sum_to_the_attention_output(any_model):
    prompt = any_model.prepare(picture(), QUESTION)
    names = [name for name in any_model.hook_dict if name.endswith(("attn.hook_result", "hook_attn_out"))]
    _, cache = any_model.run_with_cache(prompt, names_filter=names)
    results = [name for name in cache if isinstance(any_model.hook_dict[name].site.tap, HeadResult)]
    assert len(results) >= any_model.cfg.n_layers + 1
    for name in results:
        bias = any_model.hook_dict[name].module.bias
        out = any_model.hook_dict[name.replace("attn.hook_result", "hook_attn_out")].site
        scale = 1 if getattr(out.tap, "scale", None) is None else any_model.hf.get_parameter(out.tap.scale)
        total = (cache[name].sum(dim=-2) + (0 if bias is None else bias)) * scale
        assert torch.allclose(total, cache[out.name], atol=1e-5), name


@torch.no_grad()
def test_residual_stream_adds_up(any_model):
    prompt = any_model.prepare(picture(), QUESTION)
    _, cache = any_model.run_with_cache(prompt)
    for block in [*(f"blocks.{k}" for k in range(3)), "vision_encoder.encoder_layers.0"]:
        mid = cache[f"{block}.hook_resid_pre"] + cache[f"{block}.hook_attn_out"]
        assert torch.allclose(mid, cache[f"{block}.hook_resid_mid"], atol=1e-5)
        after = mid + cache[f"{block}.hook_mlp_out"]
        again = f"hook_deepstack_embed.{block.partition('.')[2]}"
        if again in cache:
            after[torch.as_tensor(prompt.layout.structure.visual.copy())[None]] += cache[again]
        assert torch.allclose(after, cache[f"{block}.hook_resid_post"], atol=1e-5)


@pytest.mark.parametrize("site", ["blocks.1.hook_resid_mid", "blocks.1.attn.hook_z", "hook_merged_embed", "hook_visual_embed"])
@torch.no_grad()
def test_a_selector_shows_and_changes_only_its_positions(model, site):
    prompt = model.prepare(picture(), QUESTION)
    where = "global & row[1]"
    _, plain = model.run_with_cache(prompt, names_filter=site)
    shapes = []

    def zero(value, hook):
        shapes.append(value.shape)
        value.zero_()

    with model.hooks(fwd_hooks=[(f"{site}@{where}", zero)]):
        _, cache = model.run_with_cache(prompt, names_filter=site)
    rows, columns = prompt.layout.select(where).grid_shape
    assert shapes[0][:3] == (1, rows, columns)
    assert cache[f"{site}@{where}"].abs().max() == 0
    assert torch.equal(cache[f"{site}@image & ~({where})"], plain[f"{site}@image & ~({where})"])
    assert torch.equal(plain[f"{site}@global"][:, 1], plain[f"{site}@{where}"][:, 0])


@torch.no_grad()
def test_attention_addresses_take_queries_and_keys(model):
    prompt = model.prepare(picture(), QUESTION)
    site = "blocks.1.attn.hook_pattern"
    _, cache = model.run_with_cache(prompt, names_filter=site)
    image = prompt.layout.select("image").positions
    last = prompt.layout.length - 1
    part = cache[f"{site}@last -> image"]
    assert torch.equal(part.flatten(2).sort().values, cache[site][:, :, last, image].sort().values)

    def halve(value, hook):
        return value / 2

    with model.hooks(fwd_hooks=[(f"{site}@last -> global", halve)]):
        _, halved = model.run_with_cache(prompt, names_filter=site)
    assert torch.equal(halved[f"{site}@last -> global"], cache[f"{site}@last -> global"] / 2)
    assert torch.equal(halved[f"{site}@~last"], cache[f"{site}@~last"])


def test_hooks_are_removed_after_an_exception_and_the_model_is_hfs_again(model):
    prompt = model.prepare(picture(), QUESTION)
    plain = model(prompt)

    def fail(value, hook):
        raise RuntimeError("mine")

    for name in ("blocks.1.attn.hook_pattern", "blocks.0.hook_resid_post", "hook_merged_embed@image"):
        with pytest.raises(RuntimeError, match="mine"):
            model.run_with_hooks(prompt, fwd_hooks=[(name, fail)])
    assert not any(point.has_hooks() for point in model.hook_dict.values())
    assert model.hf.model.language_model.config._attn_implementation == "sdpa"
    assert torch.equal(model(prompt), plain)


def test_only_the_layer_that_is_read_leaves_the_fused_path(model, monkeypatch):
    prompt = model.prepare(picture(), QUESTION)
    calls = []
    import sightlens.model.attention as attention

    fused = attention.sdpa_attention_forward
    monkeypatch.setattr(attention, "sdpa_attention_forward", lambda *a, **k: calls.append(a[0]) or fused(*a, **k))
    model.run_with_cache(prompt, names_filter="blocks.1.attn.hook_pattern")
    layers = model.hf.model.language_model.layers
    text = [call for call in calls if call in [layer.self_attn for layer in layers]]
    assert text == [layers[0].self_attn, layers[2].self_attn]


@torch.no_grad()
def test_several_hooked_models_on_one_hf_model_follow_it_once(model):
    decoder = model.hf.model.language_model
    before = len(decoder._forward_pre_hooks)
    twin = HookedVLM(model.hf, model.processing)
    assert len(decoder._forward_pre_hooks) == before
    assert hooked(DEFAULT[0]).sites.window is not model.sites.window
    prompt = model.prepare(picture(), QUESTION)
    inner: list[str] = []

    def read_with_the_twin(value, hook):
        if not inner:
            other = twin.prepare(picture(96, 32), f"{QUESTION} {QUESTION}")
            inner.append(str(other.layout))
            twin.run_with_cache(other, names_filter="blocks.0.hook_resid_post@last")

    def zero(value, hook):
        return torch.zeros_like(value)

    with model.hooks(fwd_hooks=[("vision_encoder.hook_in", read_with_the_twin)]):
        nested = model.run_with_hooks(prompt, fwd_hooks=[("hook_merged_embed@last", zero)])
    assert inner
    assert torch.equal(nested, model.run_with_hooks(prompt, fwd_hooks=[("hook_merged_embed@last", zero)]))


def test_gradients_pass_through_hooks(model):
    prompt = model.prepare(picture(), QUESTION)
    grads = {}
    hooks = [
        (name, lambda g, hook: grads.__setitem__(hook.name, g[0] if isinstance(g, tuple) else g))
        for name in ("hook_visual_embed", "blocks.1.attn.hook_z")
    ]
    with model.hooks(bwd_hooks=hooks):
        model(prompt)[0, -1].max().backward()
    assert set(grads) == {"hook_visual_embed", "blocks.1.attn.hook_z"}
    assert all(grad.abs().max() > 0 for grad in grads.values())


def test_wrong_names_and_returns_are_refused(model):
    prompt = model.prepare(picture(), QUESTION)
    with pytest.raises(HookError, match=r"blocks\.1\.hook_resid_post"):
        model.run_with_cache(prompt, names_filter="blocks.1.hook_residpost")
    with pytest.raises(HookError, match="shape"):
        model.run_with_hooks(prompt, fwd_hooks=[("blocks.1.hook_resid_post", lambda v, hook: v[:, :1])])
    with pytest.raises(HookError, match="selector"):
        model.run_with_cache(prompt, names_filter="vision_encoder.hook_in@image")
    with pytest.raises(HookError, match=r"blocks\.9"):
        model.run_with_cache(prompt, names_filter="blocks.9.hook_resid_post")


@torch.no_grad()
def test_hooks_take_patterns_filters_and_donors(model):
    prompt, other = model.prepare(picture(), QUESTION), model.prepare(picture(seed=1), QUESTION)
    site = "blocks.1.hook_resid_post"
    _, donor = model.run_with_cache(other, names_filter=site)
    for chosen in ("blocks.*.hook_resid_post", lambda name: name.startswith("blocks") and name.endswith("hook_resid_post")):
        seen = {}
        patch = {"interventions": [PatchIn(site)], "donors": {"clean": donor}}
        logits = model.run_with_hooks(prompt, fwd_hooks=[(chosen, lambda v, hook, seen=seen: seen.__setitem__(hook.name, v))], **patch)
        assert set(seen) == {f"blocks.{layer}.hook_resid_post" for layer in range(3)}
        assert torch.equal(seen[site], donor[site])  # hooks see what interventions made
        assert torch.equal(logits, model(prompt, **patch))
    with pytest.raises(HookError, match="a filter that some hook name passes"):
        model.run_with_hooks(prompt, fwd_hooks=[(lambda name: False, lambda v, hook: None)])
    model.add_hook("blocks.*.hook_mlp_out", lambda v, hook: v * 0)
    assert sum(point.has_hooks() for point in model.hook_dict.values()) == 3
    model.reset_hooks()


@torch.no_grad()
def test_caches_take_short_keys(model):
    _, cache = model.run_with_cache(model.prepare(picture(), QUESTION))
    for key, name in (
        (("resid_post", 2), "blocks.2.hook_resid_post"),
        (("resid_post", -1), "blocks.2.hook_resid_post"),
        (("pattern", 1), "blocks.1.attn.hook_pattern"),
        (("pattern", 1, "attn"), "blocks.1.attn.hook_pattern"),
        (("post", 0), "blocks.0.mlp.hook_post"),
        (("embed",), "hook_embed"),
    ):
        assert cache[key] is cache[name]
        assert key in cache
    assert ("resid_post", 2) not in cache.only(["hook_embed"])
    for wrong in (("normalized", 0, "ln1"), ("resid_post", 3), ("resid_post", -4), (3, "resid_post"), (), ("k", 0, "attn", "x")):
        with pytest.raises(HookError):
            cache[wrong]


def test_hooks_are_added_all_or_none(model):
    prompt = model.prepare(picture(), QUESTION)
    plain, twin = model(prompt), HookedVLM(model.hf, model.processing)
    twin.add_hook("blocks.1.attn.hook_pattern", lambda value, hook: None)
    for listen in (model.add_hook, lambda name, function: model.run_with_hooks(prompt, fwd_hooks=[(name, function)])):
        with pytest.raises(HookError, match="one HookedVLM at a time"):
            listen("blocks.*.attn.hook_pattern", lambda value, hook: value * 0)
        assert not any(point.has_hooks() for point in model.hook_dict.values())
    twin.reset_hooks()
    assert torch.equal(model(prompt), plain)


@pytest.mark.usefixtures("unchecked")
def test_names_of_other_types_are_refused(model):
    prompt = model.prepare(picture(), QUESTION)
    for name in (3, [3], {"a": 1}):
        with pytest.raises(HookError, match="hook names, patterns"):
            model.run_with_hooks(prompt, fwd_hooks=[(name, lambda value, hook: None)])
