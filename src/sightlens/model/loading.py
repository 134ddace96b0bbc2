"""Loading a checkpoint strictly: local files only, no code from the checkpoint, every key accounted for."""

from __future__ import annotations

import json
import pickle
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, StrictDataclassError
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from tokenizers import AddedToken
from torch import Tensor
from transformers import AutoConfig, AutoImageProcessor, AutoTokenizer, PreTrainedConfig, PreTrainedModel

from sightlens.errors import CheckpointError, listing
from sightlens.families import Processing, find_family
from sightlens.families.convert import convert_keys, extend_vocabulary, find_original
from sightlens.families.convert_format import OriginalFormat
from sightlens.interventions import Mean
from sightlens.interventions.means import load_mean
from sightlens.metrics import BinTokens, BoxFormat

SHIPPED = Path(__file__).parent.parent / "zoo"
PREFIX = "sightlens/"
OWN_FILE = "sightlens.json"
MEAN_FILE = "mean_embedding.safetensors"
TOWER_FOLDER = "vision_tower"
PATTERNS = ["*.json", "*.jinja", "*.safetensors", "*.model", "*.txt"]
OLDER = "pytorch_model*.bin"
INDEXES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
UNREADABLE = (OSError, RuntimeError, ValueError, TypeError, KeyError, EOFError, SafetensorError, pickle.UnpicklingError)


@dataclass(frozen=True)
class Loaded:
    """What a checkpoint folder holds."""

    hf: PreTrainedModel
    processing: Processing
    box_format: BoxFormat | None
    mean: Mean | None


def load_checkpoint(name: str | Path, *, revision: str | None, dtype: torch.dtype | str, placement: Any) -> Loaded:
    """Load a model and everything beside it.

    Args:
        name: a shipped model, a folder, or a hub id; in HF's format, or in the original one of LLaVA or InternVL.
        revision: of a hub id.
        dtype: of the weights, or ``"auto"``.
        placement: a device, or accelerate's device map; None for the CPU.

    Raises:
        CheckpointError: naming the file or the keys at fault.
        FamilyError: an unknown family or configuration.
    """
    folder = find_folder(name, revision=revision)
    data = read_json(folder / "config.json")
    original = find_original(data)
    if original is None:
        config, state = read_config(folder), None
        check_files(folder)
        processing = load_processing(folder, config)
    else:
        check_files(folder)
        processing, state = _read_original(folder, data, original)
    hf = _load_weights(folder, processing.config, state=state, dtype=dtype, placement=placement)
    _check_tied(hf, data)
    return Loaded(hf.eval(), processing, _load_box_format(folder), _load_mean(folder))


def find_folder(name: str | Path, *, revision: str | None = None) -> Path:
    """Return the local folder of a checkpoint, downloading it only when the name is no local folder.

    Raises:
        CheckpointError: when it cannot be found or fetched.
    """
    text = str(name)
    shipped = SHIPPED / text.removeprefix(PREFIX)
    here = [shipped] if text.startswith(PREFIX) and shipped.is_dir() else [Path(text)] if Path(text).is_dir() else []
    if here and revision is not None:
        raise CheckpointError("a hub id, of which there are revisions", f"the folder {text!r} with revision={revision!r}", "Leave it out.")
    if here:
        return here[0]
    if Path(text).exists() or Path(text).is_absolute() or text.startswith("."):
        raise CheckpointError("a checkpoint folder", f"{text!r}", "Give the folder that holds config.json.")
    try:
        folder = Path(snapshot_download(text, revision=revision, allow_patterns=PATTERNS))
        if not list(folder.glob("*.safetensors")):
            snapshot_download(text, revision=revision, allow_patterns=[OLDER])
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as problem:
        shipped = [PREFIX + path.parent.name for path in sorted(SHIPPED.glob("*/config.json"))]
        raise CheckpointError(
            f"a folder, a hub id, or a shipped model ({listing(shipped)})", f"{text!r}", f"It could not be fetched: {problem}"
        ) from problem
    return folder


def read_json(path: Path) -> dict[str, Any]:
    """Read a file that must hold a JSON object.

    Raises:
        CheckpointError: when it is missing, no JSON, or no object.
    """
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as problem:
        raise CheckpointError(f"{path.name} in the checkpoint folder", f"none in {path.parent}", "Is this the right folder?") from problem
    except ValueError as problem:
        raise CheckpointError(f"valid JSON in {path.name}", str(problem), "Fetch the file again.") from problem
    if not isinstance(data, dict):
        raise CheckpointError(f"a JSON object in {path.name}", type(data).__name__, "Fetch the file again.")
    return data


def read_config(folder: Path) -> PreTrainedConfig:
    """Read and check a configuration in HF's format.

    Raises:
        CheckpointError: when config.json is missing, no JSON, or not what its model type needs.
        FamilyError: for an unknown family or configuration.
    """
    data = read_json(folder / "config.json")
    family = find_family(str(data.get("model_type")))
    if "quantization_config" in data:
        raise CheckpointError(
            "weights that are not quantized", "quantization_config in config.json", "Use the checkpoint in 16 or 32 bits."
        )
    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError, TypeError, KeyError, AttributeError, StrictDataclassError) as problem:
        raise CheckpointError(f"a {family.name} configuration in config.json", _reason(problem), "Fetch the file again.") from problem
    family.check_config(config)
    return config


def check_files(folder: Path) -> None:
    """Check that every weight file is there and complete.

    Raises:
        CheckpointError: naming the file.
    """
    if (folder / "adapter_config.json").exists():
        raise CheckpointError("the weights of a whole model", f"an adapter in {folder}", "Merge the adapter into its base model first.")
    files = sorted(path for path in folder.glob("*.safetensors") if path.name != MEAN_FILE)
    present = {path.name for path in files} | {path.name for path in folder.glob(OLDER)}
    for index in (folder / name for name in INDEXES if (folder / name).exists()):
        weights = read_json(index).get("weight_map")
        if not isinstance(weights, dict):
            raise CheckpointError(f"a weight_map in {index.name}", "none", "Fetch the file again.")
        wanted = set(map(str, weights.values()))
        if absent := sorted(wanted - present):
            raise CheckpointError(f"all {len(wanted)} weight files of the index", f"no {listing(absent)}", "Fetch the missing files.")
        break  # as HF does, take safetensors where there are both
    if not present:
        raise CheckpointError("*.safetensors weights", f"none in {folder}", "Is the download complete?")
    for path in files:
        try:
            with safe_open(path, framework="pt") as file:
                file.keys()
        except (SafetensorError, OSError) as problem:
            raise CheckpointError("a complete safetensors file", f"{path.name}: {problem}", "Fetch the file again.") from problem


def read_state(folder: Path) -> dict[str, Tensor]:
    """Read all weights of a folder, mapped from disk.

    Raises:
        CheckpointError: naming a file that holds anything but weights.
    """
    files = sorted(path for path in folder.glob("*.safetensors") if path.name != MEAN_FILE)
    state: dict[str, Tensor] = {}
    for path in files or sorted(folder.glob(OLDER)):
        try:
            state |= (
                load_file(path) if path.suffix == ".safetensors" else torch.load(path, map_location="cpu", weights_only=True, mmap=True)
            )
        except UNREADABLE as problem:
            raise CheckpointError("a file of weights alone", f"{path.name}: {_reason(problem)}", "Fetch the file again.") from problem
    return state


def _load_weights(
    folder: Path, config: PreTrainedConfig, *, state: dict[str, Tensor] | None, dtype: torch.dtype | str, placement: Any
) -> PreTrainedModel:
    cls = getattr(transformers, find_family(config.model_type).architecture)
    options = {"local_files_only": True, "output_loading_info": True, "ignore_mismatched_sizes": True, "weights_only": True}
    source = {"pretrained_model_name_or_path": folder if state is None else None, "state_dict": state}
    if state is not None and dtype == "auto":
        dtype = next(tensor.dtype for tensor in state.values() if tensor.is_floating_point())
        automatic = True
    else:
        automatic = dtype == "auto"
    try:
        hf, info = cls.from_pretrained(**source, config=config, dtype=dtype, device_map=placement, **options)
    except UNREADABLE as problem:
        raise CheckpointError("weights that HF can load", _reason(problem), "Check the checkpoint's files.") from problem
    _check_keys(info)
    half_on_cpu = automatic and hf.dtype == torch.float16 and hf.device.type == "cpu"
    return hf.float() if half_on_cpu else hf


def _check_keys(info: Mapping[str, Any]) -> None:
    faults = {what: sorted(str(key) for key in info[f"{what}_keys"]) for what in ("missing", "unexpected", "mismatched")}
    found = [f"{len(keys)} {what}: {listing(keys, limit=6)}" for what, keys in faults.items() if keys]
    if found:
        raise CheckpointError(
            "exactly the model's keys and shapes", "; ".join(found), "The weights belong to another configuration, or the file is damaged."
        )


def _check_tied(hf: Any, data: Mapping[str, Any]) -> None:
    """Refuse an unembedding that HF took from the embedding although the configuration says that they differ."""
    text = data.get("text_config") or data.get("llm_config") or {}
    tied = data.get("tie_word_embeddings", text.get("tie_word_embeddings", True))
    if not tied and hf.get_input_embeddings().weight is hf.get_output_embeddings().weight:
        raise CheckpointError(
            "exactly the model's keys and shapes",
            "1 missing: lm_head.weight, with tie_word_embeddings false",
            "Fetch the weights again, or mend tie_word_embeddings in config.json.",
        )


def _reason(problem: BaseException) -> str:
    return f"{type(problem).__name__}: {problem}"[:1000]


def _read_original(folder: Path, data: Mapping[str, Any], original: OriginalFormat) -> tuple[Processing, dict[str, Tensor]]:
    """Translate a checkpoint in an original format."""
    tokenizer = _read_tokenizer(folder)
    unknown = original.image_token not in tokenizer.get_vocab()
    if unknown and original.adds_image_token:
        tokenizer.add_tokens(AddedToken(original.image_token, special=True, normalized=False), special_tokens=True)
    elif unknown:
        raise CheckpointError(f"{original.image_token!r} in the tokenizer", "no such token", "Use the checkpoint's own tokenizer.")
    tokenizer.chat_template = original.template
    state = read_state(folder)
    tower_config, tower = _read_tower(folder, data, original, held=any(name.startswith(original.tower_prefix) for name in state))
    image_id = tokenizer.convert_tokens_to_ids(original.image_token)
    config = original.config(data, image_token_id=image_id, tower=tower_config)
    config.text_config.eos_token_id = tokenizer.eos_token_id
    find_family(original.family).check_config(config)
    state = convert_keys({**state, **tower}, original.rules, original.dropped)
    state = extend_vocabulary(state, size=config.text_config.vocab_size)
    return processing_for(config, tokenizer, original.image_processor(data, config)), state


def _read_tower(
    folder: Path, data: Mapping[str, Any], original: OriginalFormat, *, held: bool
) -> tuple[dict[str, Any] | None, dict[str, Tensor]]:
    """Return the vision tower's own configuration and weights, where they stand apart; its keys get the format's prefix."""
    if original.separate_tower is None:
        return None, {}
    name = str(data.get(original.separate_tower))
    places = [folder / TOWER_FOLDER, *([Path(name)] if Path(name).is_absolute() else [folder / name])]
    found = next((place for place in places if (place / "config.json").exists()), None)
    if held:
        return (None if found is None else read_json(found / "config.json")), {}
    if found is None:
        raise CheckpointError(
            f"the vision tower {name!r}, which this checkpoint names and does not hold",
            f"no {places[0] / 'config.json'}",
            f"Put config.json and the weights (model.safetensors or pytorch_model.bin) of {name} into {places[0]}.",
        )
    check_files(found)
    return read_json(found / "config.json"), {original.tower_prefix + key: tensor for key, tensor in read_state(found).items()}


def _read_tokenizer(folder: Path) -> Any:
    try:
        return AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError, KeyError, TypeError, ImportError, AttributeError) as problem:
        raise CheckpointError("the checkpoint's tokenizer (tokenizer.json)", _reason(problem), "Fetch the tokenizer's files.") from problem


def load_processing(folder: Path, config: PreTrainedConfig) -> Processing:
    """Read the tokenizer, the chat template and the image processor of a checkpoint in HF's format.

    Raises:
        CheckpointError: when one of them is missing or damaged, or belongs to another configuration.
    """
    tokenizer = _read_tokenizer(folder)
    older = folder / "chat_template.json"
    if tokenizer.chat_template is None and older.exists():
        tokenizer.chat_template = read_json(older).get("chat_template")
    if not find_family(config.model_type).images:
        return processing_for(config, tokenizer, None)
    try:
        image_processor = AutoImageProcessor.from_pretrained(folder, local_files_only=True, trust_remote_code=False, backend="pil")
    except (OSError, ValueError, KeyError, TypeError, ImportError, AttributeError) as problem:
        raise CheckpointError("the image processor (preprocessor_config.json)", _reason(problem), "Fetch the file.") from problem
    return processing_for(config, tokenizer, image_processor)


def processing_for(config: PreTrainedConfig, tokenizer: Any, image_processor: Any) -> Processing:
    """Bring tokenizer and image processor together, and check that they belong to the configuration.

    Raises:
        FamilyError: for an unknown family.
        CheckpointError: when ids disagree between configuration and tokenizer.
    """
    family = find_family(config.model_type)
    if family.images:
        wanted = family.image_token_id(config)
        found = tokenizer.convert_tokens_to_ids(family.image_token or family.template_image)
        if found != wanted:
            raise CheckpointError(
                f"the id {wanted} of config.json for {family.image_token or family.template_image!r}",
                f"{found} in the tokenizer",
                "Use the checkpoint's own tokenizer.",
            )
        family.check_processor(config, image_processor)
    if not tokenizer.is_fast:
        raise CheckpointError("a fast tokenizer", type(tokenizer).__name__, "Convert it with transformers (tokenizer.json).")
    return Processing(family, config, tokenizer, image_processor)


def _load_box_format(folder: Path) -> BoxFormat | None:
    if not (folder / OWN_FILE).exists():
        return None
    fields = read_json(folder / OWN_FILE).get("box_format")
    if fields is None:
        return None
    try:
        values: dict[str, Any] = {name: tuple(v) if isinstance(v, list) else v for name, v in fields.items()}
        return BinTokens(**values)
    except (TypeError, AttributeError) as problem:
        raise CheckpointError(f"a box_format in {OWN_FILE}", _reason(problem), "Fetch the file again.") from problem


def _load_mean(folder: Path) -> Mean | None:
    path = folder / MEAN_FILE
    if not path.exists():
        return None
    try:
        return load_mean(path)
    except UNREADABLE as problem:
        raise CheckpointError(f"a mean embedding in {MEAN_FILE}", _reason(problem), "Fetch the file again, or remove it.") from problem
