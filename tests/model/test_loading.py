"""Loading: the same logits as HF, every fault named, nothing run and nothing fetched."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import socket
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from huggingface_hub.errors import LocalEntryNotFoundError
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tests.conftest import hooked, picture
from tests.tiny import EACH, LLAVA_TEMPLATE, TEMPLATES, TEXTS, VARIANTS, Variant, hf_model, image_processor, tokenizer
from torch import nn
from transformer_lens.model_bridge.sources._bridge_builder import build_bridge_from_module

from sightlens.errors import CheckpointError, FamilyError, SightLensError
from sightlens.families import ImageOptions
from sightlens.model import HookedVLM, hook_contract, loading

LLAVA, INTERNVL = VARIANTS[0], VARIANTS[4]


def save(folder: Path, variant: Variant = LLAVA, *, dtype: torch.dtype = torch.float32, shard: str = "5GB") -> nn.Module:
    """Write a tiny model as HF does, and return it."""
    hf = hf_model(variant).to(dtype)
    hf.save_pretrained(folder, max_shard_size=shard)
    tokenizer(TEMPLATES.get(variant.family, LLAVA_TEMPLATE), variant.family).save_pretrained(folder)
    image_processor(variant).save_pretrained(folder)
    return hf


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A good LLaVA folder; copy it before changing it."""
    folder = tmp_path_factory.mktemp("saved")
    save(folder)
    return folder


@pytest.fixture
def copied(saved: Path, tmp_path: Path) -> Path:
    """A folder to break."""
    return Path(shutil.copytree(saved, tmp_path / "copy"))


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make every socket, every subprocess and every import of a hub's code fail the test."""

    def refuse(*args: object, **named: object) -> None:
        pytest.fail(f"reached out: {args}")

    monkeypatch.setattr(socket, "socket", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setattr(os, "system", refuse)
    monkeypatch.setattr("subprocess.Popen", refuse)


def edit(folder: Path, file: str = "config.json", **changes: object) -> None:
    """Change fields of a JSON file; None removes one."""
    data = json.loads((folder / file).read_text())
    data.update(changes)
    (folder / file).write_text(json.dumps({name: value for name, value in data.items() if value is not None}))


def rewrite(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    """Change the weights of a folder with one file."""
    state = load_file(folder / "model.safetensors")
    change(state)
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})


def fault(folder: Path | str, kind: type[SightLensError] = CheckpointError) -> str:
    """Load, and return the message of the refusal."""
    with pytest.raises(kind) as caught:
        HookedVLM.from_pretrained(folder)
    assert all((caught.value.expected, caught.value.got, caught.value.do))
    return str(caught.value)


def logits_of(model: HookedVLM) -> torch.Tensor:
    """The logits of a fixed picture and question."""
    return model(model.prepare(picture(), "what colour is the circle ?")).detach()


def hf_logits(hf: nn.Module, model: HookedVLM) -> torch.Tensor:
    """HF's own for the same."""
    return hf(**model.prepare(picture(), "what colour is the circle ?").tensors, use_cache=False).logits.detach()


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_folder_gives_the_logits_of_hf_and_reaches_for_nothing(variant: Variant, tmp_path: Path, offline: None) -> None:
    hf = save(tmp_path, variant)
    model = HookedVLM.from_pretrained(tmp_path)
    assert torch.equal(logits_of(model), hf_logits(hf, model))
    assert type(model.processing.image_processor).__name__.endswith("Pil")
    assert not model.hf.training


def test_shards_with_an_index(tmp_path: Path) -> None:
    hf = save(tmp_path, INTERNVL, shard="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    model = HookedVLM.from_pretrained(str(tmp_path))
    assert torch.equal(logits_of(model), hf_logits(hf, model))
    gone = sorted(tmp_path.glob("*.safetensors"))[1]
    gone.unlink()
    assert gone.name in fault(tmp_path)


@pytest.mark.parametrize(
    "key",
    ["language_model.model.layers.1.mlp.up_proj.weight", "vision_tower", "lm_head", "multi_modal_projector.linear_2.bias", "embed_tokens"],
)
def test_missing_key_is_named(copied: Path, key: str) -> None:
    dropped: list[str] = []

    def drop(state: dict[str, torch.Tensor]) -> None:
        dropped.append(next(name for name in sorted(state) if key in name))
        del state[dropped[0]]

    rewrite(copied, drop)
    message = fault(copied)
    assert "1 missing" in message
    assert dropped[0].removeprefix("language_model.").removeprefix("model.").removeprefix("vision_tower.vision_model.") in message


def test_unexpected_key_and_wrong_shape_are_named(copied: Path, saved: Path, tmp_path: Path) -> None:
    rewrite(copied, lambda state: state.update({"language_model.model.layers.9.mlp.up_proj.weight": torch.zeros(2)}))
    assert "1 unexpected: " in fault(copied)
    assert "layers.9.mlp.up_proj.weight" in fault(copied)
    other = Path(shutil.copytree(saved, tmp_path / "shape"))
    rewrite(other, lambda state: state.update({"language_model.lm_head.weight": torch.zeros(7, 32)}))
    assert "1 mismatched: " in fault(other)
    assert "lm_head.weight" in fault(other)


def test_untied_model_without_an_unembedding_is_refused_and_a_tied_one_is_not(tmp_path: Path) -> None:
    save(tmp_path, INTERNVL)
    assert not any("lm_head" in key for key in load_file(tmp_path / "model.safetensors"))
    HookedVLM.from_pretrained(tmp_path)
    edit(tmp_path, tie_word_embeddings=None)
    assert "lm_head.weight" in fault(tmp_path)


def test_untied_weights_stay_apart_whatever_the_configuration_says(copied: Path) -> None:
    edit(copied, tie_word_embeddings=True)
    model, hf = HookedVLM.from_pretrained(copied), hf_model(LLAVA)
    assert torch.equal(logits_of(model), hf_logits(hf, model))


def _truncate(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def _empty_index(folder: Path) -> None:
    (folder / "model.safetensors.index.json").write_text("{}")


BREAKS: dict[str, tuple[Callable[[Path], object], str]] = {
    "truncated weights": (_truncate, "model.safetensors"),
    "garbage weights": (lambda f: (f / "model.safetensors").write_bytes(b"x" * 64), "model.safetensors"),
    "no weights": (lambda f: (f / "model.safetensors").unlink(), "safetensors weights"),
    "no config": (lambda f: (f / "config.json").unlink(), "config.json"),
    "bad config": (lambda f: (f / "config.json").write_text("{'model_type': "), "valid JSON in config.json"),
    "config is a list": (lambda f: (f / "config.json").write_text("[1]"), "a JSON object in config.json"),
    "config of a wrong type": (lambda f: edit(f, vision_feature_select_strategy=3), "config.json"),
    "config with a wrong part": (lambda f: edit(f, text_config="llama"), "config.json"),
    "quantized": (lambda f: edit(f, quantization_config={"quant_method": "gptq"}), "quantized"),
    "adapter": (lambda f: (f / "adapter_config.json").write_text("{}"), "adapter"),
    "index without a map": (_empty_index, "weight_map"),
    "bad index": (lambda f: (f / "model.safetensors.index.json").write_text("]"), "model.safetensors.index.json"),
    "no tokenizer": (lambda f: [path.unlink() for path in f.glob("tokenizer*")], "tokenizer"),
    "bad tokenizer": (lambda f: (f / "tokenizer.json").write_text("{}"), "tokenizer"),
    "no image processor": (lambda f: (f / "preprocessor_config.json").unlink(), "image processor"),
    "bad image processor": (lambda f: (f / "preprocessor_config.json").write_text("{"), "image processor"),
    "unknown image processor": (lambda f: edit(f, "preprocessor_config.json", image_processor_type="Nope"), "image processor"),
    "bad own file": (lambda f: (f / loading.OWN_FILE).write_text('{"box_format": {"nope": 1}}'), loading.OWN_FILE),
    "bad mean": (lambda f: (f / loading.MEAN_FILE).write_bytes(b"x" * 9), loading.MEAN_FILE),
    "another image token": (lambda f: edit(f, image_token_index=9), "9"),
}


@pytest.mark.parametrize("what", BREAKS)
def test_damage_is_named(copied: Path, what: str) -> None:
    damage, word = BREAKS[what]
    damage(copied)
    assert word in fault(copied)


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"model_type": "qwen2_vl"}, "qwen2_vl"),
        ({"model_type": None}, "None"),
        ({"vision_feature_layer": [-2, -1]}, "vision_feature_layer"),
    ],
)
def test_unknown_families_and_configurations(copied: Path, changes: dict[str, object], word: str) -> None:
    edit(copied, **changes)
    assert word in fault(copied, FamilyError)


def test_bin_loads_and_a_pickle_does_not_run(copied: Path, tmp_path: Path) -> None:
    state = load_file(copied / "model.safetensors")
    (copied / "model.safetensors").unlink()
    torch.save(state, copied / "pytorch_model.bin")
    model = HookedVLM.from_pretrained(copied)
    assert torch.equal(logits_of(model), hf_logits(hf_model(LLAVA), model))

    trace = tmp_path / "ran"

    class Evil:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return os.system, (f"touch {trace}",)

    for write in (
        lambda: torch.save({**state, "x": Evil()}, copied / "pytorch_model.bin"),
        lambda: (copied / "pytorch_model.bin").write_bytes(pickle.dumps(Evil())),
    ):
        write()
        assert "Check the checkpoint's files" in fault(copied)
        assert not trace.exists()
    (copied / "pytorch_model.bin").write_bytes(b"")
    fault(copied)


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [(torch.float32, torch.float32), ("bfloat16", torch.bfloat16), (torch.bfloat16, torch.bfloat16), ("auto", torch.float32)],
)
def test_dtype_and_placement(saved: Path, dtype: torch.dtype | str, expected: torch.dtype) -> None:
    for place in ({}, {"device": "cpu"}, {"device_map": {"": "cpu"}}):
        model = HookedVLM.from_pretrained(saved, dtype=dtype, **place)
        assert {parameter.dtype for parameter in model.hf.parameters()} == {expected}
        assert model.device == torch.device("cpu")
    assert logits_of(model).isfinite().all()


def test_half_on_a_cpu_becomes_single(tmp_path: Path) -> None:
    hf = save(tmp_path, dtype=torch.float16)
    model = HookedVLM.from_pretrained(tmp_path)
    assert {parameter.dtype for parameter in model.hf.parameters()} == {torch.float32}
    reference = hf_model(LLAVA)  # its buffers were never half, as in a checkpoint
    reference.load_state_dict({name: weight.float() for name, weight in hf.state_dict().items()})
    assert torch.equal(logits_of(model), hf_logits(reference, model))
    assert HookedVLM.from_pretrained(tmp_path, dtype=torch.float16).hf.dtype == torch.float16


def test_hub_id_that_cannot_be_fetched(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object, **named: object) -> None:
        raise LocalEntryNotFoundError("no connection")

    monkeypatch.setattr(loading, "snapshot_download", refuse)
    message = fault("someone/some-model")
    assert "someone/some-model" in message
    assert "sightlens/tiny-llava" in message
    for name in ("./nowhere", "/nowhere/at/all"):
        assert "a checkpoint folder" in fault(name)
    monkeypatch.undo()
    assert "could not be fetched" in fault("not a valid id !")


def test_hub_id_is_fetched_without_code_and_bin_only_when_it_must(saved: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked: list[list[str]] = []

    def fetch(name: str, *, revision: str | None, allow_patterns: list[str]) -> str:
        asked.append(allow_patterns)
        return str(saved if name == "a/safe" else tmp_path)

    monkeypatch.setattr(loading, "snapshot_download", fetch)
    assert loading.find_folder("a/safe", revision="main") == saved
    assert len(asked) == 1
    assert HookedVLM.from_pretrained("a/safe", revision="v2", check=False).name == "a/safe@v2"
    for folder in (saved, "sightlens/tiny-llava"):
        with pytest.raises(CheckpointError, match="revision='v2'"):
            HookedVLM.from_pretrained(folder, revision="v2")
    loading.find_folder("a/bin")
    assert asked[-1] == ["pytorch_model*.bin"]
    assert not any(pattern.endswith((".py", "*")) for patterns in asked for pattern in patterns)


def test_older_template_file(copied: Path) -> None:
    (copied / "chat_template.jinja").unlink()
    (copied / "chat_template.json").write_text(json.dumps({"chat_template": LLAVA_TEMPLATE}))
    model = HookedVLM.from_pretrained(copied)
    assert model.prepare(picture(), "what ?").texts == hooked(LLAVA).prepare(picture(), "what ?").texts


@pytest.mark.parametrize(
    ("variant", "named", "made"),
    [
        (LLAVA, "CLIPImageProcessor", "CLIPImageProcessorPil"),
        (LLAVA, "CLIPImageProcessorFast", "CLIPImageProcessorPil"),
        (LLAVA, "LlavaImageProcessor", "LlavaImageProcessorPil"),
        (LLAVA, "LlavaImageProcessorFast", "LlavaImageProcessorPil"),
        (VARIANTS[1], "SiglipImageProcessor", "SiglipImageProcessorPil"),
        (INTERNVL, "GotOcr2ImageProcessor", "GotOcr2ImageProcessorPil"),
        (INTERNVL, "GotOcr2ImageProcessorFast", "GotOcr2ImageProcessorPil"),
    ],
)
def test_image_processors_load_without_torchvision(variant: Variant, named: str, made: str, tmp_path: Path, offline: None) -> None:
    save(tmp_path, variant)
    edit(tmp_path, "preprocessor_config.json", image_processor_type=named)
    model = HookedVLM.from_pretrained(tmp_path)
    assert type(model.processing.image_processor).__name__ == made
    wanted, found = (m.prepare(picture(), "what ?").tensors for m in (hooked(variant), model))
    assert all(torch.equal(wanted[name], found[name]) for name in wanted)


def test_folder_whose_code_would_run_elsewhere(copied: Path, tmp_path: Path) -> None:
    trace = tmp_path / "ran"
    (copied / "evil.py").write_text(f"open({str(trace)!r}, 'w')\nclass Evil: pass\n")
    maps = {"AutoConfig": "evil.Evil", "AutoModel": "evil.Evil", "AutoTokenizer": ["evil.Evil", None], "AutoImageProcessor": "evil.Evil"}
    for file in ("config.json", "tokenizer_config.json", "preprocessor_config.json"):
        edit(copied, file, auto_map=maps)
    HookedVLM.from_pretrained(copied)
    assert not trace.exists()


def test_the_same_hf_model_twice(model: HookedVLM) -> None:
    twin = HookedVLM.from_hf(model.hf, SimpleNamespace(tokenizer=model.tokenizer, image_processor=model.processing.image_processor))
    plain = logits_of(model)
    assert torch.equal(plain, logits_of(twin))
    prompt = model.prepare(picture(), "what colour is the circle ?")
    for one in (model, twin, model):
        moved = one.run_with_hooks(prompt, fwd_hooks=[("blocks.1.attn.hook_pattern", lambda value, hook: value * 0)])
        assert not torch.equal(plain, moved)
        assert torch.equal(plain, logits_of(model))
        assert torch.equal(plain, logits_of(twin))


@pytest.mark.parametrize("variant", [variant for variant in (*EACH, *TEXTS) if variant.family != "internvl"], ids=str)  # it has no bridge
def test_from_bridge_of_every_family_that_has_one(variant: Variant) -> None:
    if variant.family.startswith("qwen"):
        pytest.importorskip("torchvision", reason="the bridge asks for it")
    hf, tokens = hf_model(variant), tokenizer(TEMPLATES.get(variant.family, LLAVA_TEMPLATE), variant.family)
    images = None if variant in TEXTS else picture()
    reference = hooked(variant)
    prompt = reference.prepare(images, "what colour is the circle ?")
    bridge = build_bridge_from_module(hf, type(hf).__name__, hf_config=hf.config)
    processor = tokens if variant in TEXTS else SimpleNamespace(tokenizer=tokens, image_processor=image_processor(variant))
    model = HookedVLM.from_bridge(bridge, processor)
    assert {name for name, _ in model.hf.named_modules()} == {name for name, _ in reference.hf.named_modules()}
    assert model.attention == "sdpa"
    assert torch.equal(model(prompt), reference(prompt))
    options = {"eos_token_id": None, "suppress_tokens": [0 if variant in TEXTS else hf.config.image_token_id]}
    assert model.generate(prompt, max_new_tokens=4, options=options) == reference.generate(prompt, max_new_tokens=4, options=options)
    assert all(check.passed for check in hook_contract(model, prompt))


def test_metadata_of_a_mean_and_its_donor(copied: Path) -> None:
    save_file(
        {"mean": torch.ones(32)},
        copied / loading.MEAN_FILE,
        metadata={"site": "hook_merged_embed", "source": "8 pictures", "tokens": "128"},
    )
    model = HookedVLM.from_pretrained(copied)
    assert model.donors["mean"].tokens == 128
    with safe_open(copied / loading.MEAN_FILE, framework="pt") as file:
        assert file.metadata()["source"] == model.donors["mean"].source


def test_options_survive_a_saved_processor(copied: Path) -> None:
    model = HookedVLM.from_pretrained(copied)
    padded = model.prepare(picture(), "what ?", options=ImageOptions(image_mode="pad"))
    assert padded.layout.views[0].box == (0.0, -8.0, 64.0, 56.0)
