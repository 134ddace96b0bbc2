"""Original LLaVA and InternVLChatModel folders give the logits of the HF model they were made from."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from tests.conftest import picture
from tests.tiny import INTERNVL_TEMPLATE, SPECIAL, VARIANTS, WORDS, Variant, hf_model, tokenizer
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor, nn
from transformers import PreTrainedTokenizerFast
from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil

from sightlens.errors import CheckpointError, FamilyError, SightLensError
from sightlens.families.convert import FORMATS, convert_keys, extend_vocabulary, find_original
from sightlens.families.convert_format import TEXT_FIELDS
from sightlens.model import HookedVLM

INTERNVL = [variant for variant in VARIANTS if variant.family == "internvl"]
QUESTION = "what colour is the circle ?"


def internvl_state(hf: nn.Module) -> dict[str, Tensor]:
    """The original names, written the other way round by hand."""
    state, made = dict(hf.state_dict()), {}
    tower = "model.vision_tower."
    made["vision_model.embeddings.class_embedding"] = state.pop(tower + "embeddings.cls_token")
    made["vision_model.embeddings.position_embedding"] = state.pop(tower + "embeddings.position_embeddings")
    for part in ("weight", "bias"):
        made[f"vision_model.embeddings.patch_embedding.{part}"] = state.pop(tower + f"embeddings.patch_embeddings.projection.{part}")
        for number, name in (("0", "layer_norm"), ("1", "linear_1"), ("3", "linear_2")):
            made[f"mlp1.{number}.{part}"] = state.pop(f"model.multi_modal_projector.{name}.{part}")
    names = {"projection_layer": "attn.proj", "layernorm_before": "norm1", "layernorm_after": "norm2", "lambda_1": "ls1", "lambda_2": "ls2"}
    names |= {"fc1": "mlp.fc1", "fc2": "mlp.fc2", "q_norm": "attn.q_norm", "k_norm": "attn.k_norm"}
    for layer in range(hf.config.vision_config.num_hidden_layers):
        here, there = f"{tower}encoder.layer.{layer}.", f"vision_model.encoder.layers.{layer}."
        for part in ("weight", "bias"):
            fused = [state.pop(f"{here}attention.{letter}_proj.{part}", None) for letter in "qkv"]
            if fused[0] is not None:
                made[f"{there}attn.qkv.{part}"] = torch.cat(fused)
        for key in [key for key in state if key.startswith(here)]:
            rest = key.removeprefix(here).removeprefix("attention.").removeprefix("mlp.").split(".")
            made[there + ".".join([names[rest[0]], *rest[1:]])] = state.pop(key)
    made["language_model.lm_head.weight"] = state.pop("lm_head.weight")
    for key in list(state):
        made["language_model.model." + key.removeprefix("model.language_model.")] = state.pop(key)
    assert not state
    return {key: tensor.clone() for key, tensor in made.items()}


def internvl_config(hf: nn.Module, decoder: str) -> dict[str, object]:
    """An original ``config.json``, with the fields that the published ones have."""
    vision, text = hf.config.vision_config, hf.config.text_config.to_dict()
    llm = {name: text[name] for name in TEXT_FIELDS if name in text}
    classes = {"qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM", "llama": "LlamaForCausalLM"}
    return {
        "architectures": ["InternVLChatModel"],
        "auto_map": {
            "AutoConfig": "configuration_internvl_chat.InternVLChatConfig",
            "AutoModel": "modeling_internvl_chat.InternVLChatModel",
        },
        "model_type": "internvl_chat",
        "downsample_ratio": 0.5,
        "dynamic_image_size": True,
        "force_image_size": 32,
        "llm_config": {
            **llm,
            "architectures": [classes[decoder]],
            "model_type": decoder,
            "_name_or_path": "",
            "use_cache": False,
            "num_beams": 1,
        },
        "max_dynamic_patch": 6,
        "min_dynamic_patch": 1,
        "pad2square": False,
        "ps_version": "v2",
        "select_layer": -1,
        "template": "internvl2_5",
        "use_backbone_lora": 0,
        "use_llm_lora": 0,
        "use_thumbnail": True,
        "vision_config": {
            "architectures": ["InternVisionModel"],
            "attention_dropout": 0.0,
            "drop_path_rate": 0.0,
            "hidden_act": "gelu",
            "hidden_size": vision.hidden_size,
            "image_size": 32,
            "initializer_factor": 1.0,
            "intermediate_size": vision.intermediate_size,
            "layer_norm_eps": vision.layer_norm_eps,
            "model_type": "intern_vit_6b",
            "norm_type": vision.norm_type,
            "num_attention_heads": vision.num_attention_heads,
            "num_channels": 3,
            "num_hidden_layers": vision.num_hidden_layers,
            "patch_size": 8,
            "qk_normalization": vision.use_qk_norm,
            "qkv_bias": vision.attention_bias,
            "use_flash_attn": True,
        },
    }


def save_internvl(folder: Path, variant: Variant, **config: object) -> nn.Module:
    """Write an original folder, with a separate unembedding, and return the HF model."""
    hf = hf_model(variant)
    hf.lm_head.weight = nn.Parameter(torch.randn(hf.lm_head.weight.shape, generator=torch.Generator().manual_seed(5)))
    folder.mkdir(exist_ok=True)
    save_file(internvl_state(hf), folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps({**internvl_config(hf, variant.text), **config}))
    tokenizer(INTERNVL_TEMPLATE).save_pretrained(folder)
    return hf


def same_logits(model: HookedVLM, hf: nn.Module) -> bool:
    """Whether a loaded model equals HF's up to the order of sums."""
    prompt = model.prepare(picture(40, 90), QUESTION)
    width = hf.config.text_config.vocab_size
    return torch.allclose(model(prompt)[..., :width], hf(**prompt.tensors, use_cache=False).logits[..., :width], atol=1e-5)


@pytest.mark.parametrize("variant", INTERNVL, ids=str)
def test_internvl_chat(variant: Variant, tmp_path: Path) -> None:
    hf = save_internvl(tmp_path, variant)
    model = HookedVLM.from_pretrained(tmp_path)
    assert same_logits(model, hf)
    assert {name: weight.shape for name, weight in model.hf.state_dict().items()} == {
        name: weight.shape for name, weight in hf.state_dict().items()
    }
    prompt = model.prepare(picture(40, 90), QUESTION)
    processor = GotOcr2ImageProcessorPil(
        size={"height": 32, "width": 32},
        crop_to_patches=True,
        max_patches=6,
        image_mean=[0.485, 0.456, 0.406],
        image_std=[0.229, 0.224, 0.225],
    )
    assert torch.equal(
        prompt.tensors["pixel_values"], processor(images=[Image.fromarray(picture(40, 90))], return_tensors="pt")["pixel_values"]
    )
    assert prompt.texts == (f"<|im_start|>user\n<IMG_CONTEXT>\n{QUESTION}<|im_end|>\n<|im_start|>assistant\n",)


def test_older_names_of_the_rotary_base_are_kept(tmp_path: Path) -> None:
    language = internvl_config(hf_model(INTERNVL[0]), INTERNVL[0].text)["llm_config"]
    language.pop("rope_parameters")
    save_internvl(tmp_path, INTERNVL[0], llm_config={**language, "rope_theta": 777.0, "rope_scaling": None})
    assert HookedVLM.from_pretrained(tmp_path).hf.config.text_config.rope_parameters["rope_theta"] == 777.0


def test_internvl_chat_untiled(tmp_path: Path) -> None:
    save_internvl(tmp_path, INTERNVL[0], dynamic_image_size=False)
    assert [view.kind for view in HookedVLM.from_pretrained(tmp_path).prepare(picture(40, 90), QUESTION).layout.views] == ["global"]


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"ps_version": "v1"}, "ps_version"),
        ({"select_layer": -2}, "select_layer"),
        ({"use_thumbnail": False}, "use_thumbnail"),
        ({"pad2square": True}, "pad2square"),
        ({"force_image_size": 64}, "force_image_size"),
        ({"downsample_ratio": 0.25}, "downsample_ratio"),
        ({"llm_config": {"architectures": ["InternLM2ForCausalLM"]}}, "InternLM2ForCausalLM"),
        ({"llm_config": {}}, "None"),
        ({"llm_config": {"architectures": ["Qwen2ForCausalLM"]}}, "hidden_size"),
        ({"vision_config": {}}, "norm_type"),
    ],
)
def test_internvl_fields_that_change_the_model(changes: dict[str, object], word: str, tmp_path: Path) -> None:
    save_internvl(tmp_path, INTERNVL[0], **changes)
    with pytest.raises(SightLensError, match=word):
        HookedVLM.from_pretrained(tmp_path)


def test_internvl_keys_are_exact_both_ways(tmp_path: Path) -> None:
    save_internvl(tmp_path, INTERNVL[1])
    good = load_file(tmp_path / "model.safetensors")
    lost = "vision_model.encoder.layers.1.attn.qkv.weight"
    for state, word in (
        ({key: tensor for key, tensor in good.items() if key != lost}, r"3 missing: .*layer\.1\.attention\.k_proj\.weight"),
        ({key: tensor for key, tensor in good.items() if key != "language_model.lm_head.weight"}, "lm_head"),
        ({**good, "mlp1.2.weight": torch.zeros(2)}, r"1 unexpected: mlp1\.2\.weight"),
        ({**good, "mlp1.1.weight": torch.zeros(2, 2)}, r"1 mismatched: .*linear_1\.weight"),
        ({**good, lost: torch.zeros(7, 24)}, "3 equal parts"),
    ):
        save_file(state, tmp_path / "model.safetensors", metadata={"format": "pt"})
        with pytest.raises(CheckpointError, match=word):
            HookedVLM.from_pretrained(tmp_path)


def plain_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer that knows no image token, as LLaVA's own."""
    words = ["<pad>", "<s>", "</s>", "<unk>", *WORDS, "USER:", "ASSISTANT:"]
    core = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=core, pad_token="<pad>", bos_token="<s>", eos_token="</s>", unk_token="<unk>")


def save_llava(folder: Path, *, tower: str, **config: object) -> nn.Module:
    """Write an original folder: ``tower`` is where its tower stands, ``apart``, ``inside``, or ``nowhere``."""
    hf, state = hf_model(VARIANTS[0]), {}
    tokens = plain_tokenizer()
    folder.mkdir(exist_ok=True)
    tokens.save_pretrained(folder)
    vision: dict[str, Tensor] = {}
    for key, tensor in hf.state_dict().items():
        if key.startswith("model.vision_tower."):
            vision["vision_model." + key.removeprefix("model.vision_tower.")] = tensor
        elif key.startswith("model.language_model."):
            state["model." + key.removeprefix("model.language_model.")] = tensor
        else:
            state[
                key.replace("model.multi_modal_projector.linear_1", "model.mm_projector.0").replace(
                    "model.multi_modal_projector.linear_2", "model.mm_projector.2"
                )
            ] = tensor
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        state[name] = state[name][: len(tokens)]
    state["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(4)
    vision["vision_model.embeddings.position_ids"] = torch.arange(17)
    sizes = hf.config.vision_config.to_dict()
    if tower == "apart":
        (folder / "vision_tower").mkdir()
        vision |= {
            "text_model.final_layer_norm.weight": torch.ones(3),
            "logit_scale": torch.tensor(1.0),
            "visual_projection.weight": torch.ones(2, 2),
        }
        save_file({key: tensor.clone() for key, tensor in vision.items()}, folder / "vision_tower/model.safetensors")
        (folder / "vision_tower/config.json").write_text(json.dumps({"model_type": "clip", "vision_config": sizes}))
    if tower == "inside":
        state |= {"model.vision_tower.vision_tower." + key: tensor for key, tensor in vision.items()}
        (folder / "vision_tower").mkdir()
        (folder / "vision_tower/config.json").write_text(json.dumps(sizes))
    torch.save({key: tensor.clone() for key, tensor in state.items()}, folder / "pytorch_model.bin")
    text = hf.config.text_config.to_dict()
    flat = {name: text[name] for name in TEXT_FIELDS if name in text} | {"vocab_size": len(tokens)}
    about = {
        "architectures": ["LlavaLlamaForCausalLM"],
        "model_type": "llava",
        "mm_vision_tower": "openai/clip-vit-large-patch14-336",
        "mm_vision_select_layer": -2,
    }
    about |= {
        "mm_projector_type": "mlp2x_gelu",
        "mm_use_im_start_end": False,
        "image_aspect_ratio": "pad",
        "mm_vision_select_feature": "patch",
    }
    (folder / "config.json").write_text(json.dumps({**flat, **about, **config}))
    return hf


@pytest.mark.parametrize("tower", ["apart", "inside"])
@pytest.mark.parametrize("model_type", ["llava", "llava_llama"])
def test_llava_llama(tower: str, model_type: str, tmp_path: Path) -> None:
    hf = save_llava(tmp_path, tower=tower, model_type=model_type)
    model = HookedVLM.from_pretrained(tmp_path)
    words = len(plain_tokenizer())
    assert model.hf.config.image_token_id == words == model.hf.config.text_config.vocab_size - 1
    prompt = model.prepare(picture(40, 90), QUESTION)
    wanted = dict(prompt.tensors)
    wanted["input_ids"] = wanted["input_ids"].masked_fill(wanted["input_ids"] == words, SPECIAL.index("<image>"))
    logits = model(prompt)
    assert torch.allclose(logits[..., :words], hf(**wanted, use_cache=False).logits[..., :words], atol=1e-5)
    assert torch.allclose(logits[..., words], logits[..., :words].mean(dim=-1), atol=1e-5)
    assert (logits.argmax(dim=-1) != words).all()
    assert prompt.layout.views[0].box == (0.0, -25.0, 90.0, 65.0)
    assert "artificial intelligence assistant" in prompt.texts[0]
    assert prompt.texts[0].endswith(f" USER: <image>\n{QUESTION} ASSISTANT:")


def test_llava_llama_crops_without_pad(tmp_path: Path) -> None:
    save_llava(tmp_path, tower="apart", image_aspect_ratio=None)
    box = HookedVLM.from_pretrained(tmp_path).prepare(picture(40, 90), QUESTION).layout.views[0].box
    assert np.allclose(box, (25, 0, 65, 40), atol=1.5)


def test_missing_tower_says_which_files_to_put_where(tmp_path: Path) -> None:
    save_llava(tmp_path, tower="nowhere")
    with pytest.raises(CheckpointError) as caught:
        HookedVLM.from_pretrained(tmp_path)
    for part in ("openai/clip-vit-large-patch14-336", str(tmp_path / "vision_tower"), "config.json", "model.safetensors"):
        assert part in str(caught.value)


def test_tower_of_another_folder(tmp_path: Path) -> None:
    hf = save_llava(tmp_path / "a", tower="apart", mm_vision_tower=str(tmp_path / "clip"))
    shutil.move(tmp_path / "a/vision_tower", tmp_path / "clip")
    model = HookedVLM.from_pretrained(tmp_path / "a")
    assert torch.equal(model.hf.model.vision_tower.post_layernorm.weight, hf.model.vision_tower.post_layernorm.weight)
    (tmp_path / "clip/model.safetensors").unlink()
    with pytest.raises(CheckpointError, match="clip"):
        HookedVLM.from_pretrained(tmp_path / "a")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("mm_projector_type", "linear"),
        ("mm_use_im_start_end", True),
        ("image_aspect_ratio", "anyres"),
        ("mm_vision_select_feature", "cls_patch"),
    ],
)
def test_llava_fields_that_change_the_model(field: str, value: object, tmp_path: Path) -> None:
    save_llava(tmp_path, tower="apart", **{field: value})
    with pytest.raises(FamilyError, match=field):
        HookedVLM.from_pretrained(tmp_path)


def test_llava_keys_are_exact_both_ways(tmp_path: Path) -> None:
    save_llava(tmp_path, tower="apart")
    good = torch.load(tmp_path / "pytorch_model.bin", weights_only=True)
    for state, word in (
        ({key: tensor for key, tensor in good.items() if "mm_projector.2.bias" not in key}, r"1 missing: .*linear_2\.bias"),
        ({**good, "model.image_newline": torch.zeros(3)}, r"1 unexpected: model\.image_newline"),
        ({**good, "model.mm_projector.0.bias": torch.zeros(3)}, r"1 mismatched: .*linear_1\.bias"),
    ):
        torch.save(state, tmp_path / "pytorch_model.bin")
        with pytest.raises(CheckpointError, match=word):
            HookedVLM.from_pretrained(tmp_path)


def test_rules_reach_every_name_and_no_name_twice() -> None:
    for known in FORMATS:
        assert find_original({"architectures": [known.architecture]}) is known
        for pattern, targets in (*known.rules, *((pattern, ()) for pattern in known.dropped)):
            re.compile(pattern)
            assert len(set(targets)) == len(targets)
    assert find_original({"architectures": ["LlavaForConditionalGeneration"], "model_type": "llava"}) is None
    with pytest.raises(CheckpointError, match="a second one, b"):
        convert_keys({"a": torch.ones(1), "b": torch.ones(1)}, ((r"[ab]", ("c",)),))


def test_new_rows_are_means_and_old_ones_stay() -> None:
    rows = torch.randn(5, 3)
    grown = extend_vocabulary({"lm_head.weight": rows, "other": rows}, size=7)
    assert torch.equal(grown["lm_head.weight"][:5], rows)
    assert torch.allclose(grown["lm_head.weight"][5:], rows.mean(0).expand(2, 3))
    assert grown["other"] is rows
    assert extend_vocabulary({"lm_head.weight": rows}, size=4)["lm_head.weight"] is rows
