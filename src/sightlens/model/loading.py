"""Loading a checkpoint strictly: local files only, no code from the checkpoint, every key accounted for."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import nn
from transformers import AutoConfig, AutoImageProcessor, AutoTokenizer, PreTrainedConfig

from sightlens.errors import CheckpointError, listing
from sightlens.families import Processing, find_family
from sightlens.interventions import Mean
from sightlens.metrics import BinTokens, BoxFormat

SHIPPED = Path(__file__).parent.parent / "zoo"
PREFIX = "sightlens/"
OWN_FILE = "sightlens.json"
MEAN_FILE = "mean_embedding.safetensors"
PATTERNS = ["*.json", "*.jinja", "*.safetensors", "*.model", "*.txt"]


@dataclass(frozen=True)
class Loaded:
    """What a checkpoint folder holds."""

    hf: nn.Module
    processing: Processing
    box_format: BoxFormat | None
    mean: Mean | None


def load_checkpoint(name: str | Path, *, revision: str | None, dtype: torch.dtype | str, placement: Any) -> Loaded:
    """Load a model and everything beside it.

    Args:
        name: a shipped model, a folder, or a hub id.
        revision: of a hub id.
        dtype: of the weights, or ``"auto"``.
        placement: a device, or accelerate's device map; None for the CPU.

    Raises:
        CheckpointError: naming the file or the keys at fault.
        FamilyError: an unknown family or configuration.
    """
    folder = find_folder(name, revision=revision)
    config = read_config(folder)
    check_files(folder)
    hf = _load_weights(folder, config, dtype=dtype, placement=placement)
    own = json.loads((folder / OWN_FILE).read_text()) if (folder / OWN_FILE).exists() else {}
    box_format = BinTokens(**_tuples(own["box_format"])) if "box_format" in own else None
    return Loaded(hf.eval(), load_processing(folder, config), box_format, _load_mean(folder))


def find_folder(name: str | Path, *, revision: str | None = None) -> Path:
    """Return the local folder of a checkpoint, downloading it only when the name is no local folder.

    Raises:
        CheckpointError: when it cannot be found or fetched.
    """
    text = str(name)
    if text.startswith(PREFIX) and (SHIPPED / text.removeprefix(PREFIX)).is_dir():
        return SHIPPED / text.removeprefix(PREFIX)
    if Path(text).is_dir():
        return Path(text)
    if Path(text).exists() or Path(text).is_absolute() or text.startswith("."):
        raise CheckpointError("a checkpoint folder", f"{text!r}", "Give the folder that holds config.json.")
    try:
        return Path(snapshot_download(text, revision=revision, allow_patterns=PATTERNS))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as problem:
        shipped = [PREFIX + path.parent.name for path in sorted(SHIPPED.glob("*/config.json"))]
        raise CheckpointError(
            f"a folder, a hub id, or a shipped model ({listing(shipped)})", f"{text!r}", f"It could not be fetched: {problem}"
        ) from problem


def read_config(folder: Path) -> PreTrainedConfig:
    """Read and check a checkpoint's configuration.

    Raises:
        CheckpointError: when config.json is missing or no JSON.
        FamilyError: for an unknown family or configuration.
    """
    path = folder / "config.json"
    try:
        data = json.loads(path.read_text())
    except FileNotFoundError as problem:
        raise CheckpointError("config.json in the checkpoint folder", f"none in {folder}", "Is this the right folder?") from problem
    except ValueError as problem:
        raise CheckpointError("valid JSON in config.json", str(problem), "Fetch the file again.") from problem
    family = find_family(str(data.get("model_type")))
    config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    family.check_config(config)
    return config


def check_files(folder: Path) -> None:
    """Check that every weight file is there and complete.

    Raises:
        CheckpointError: naming the file.
    """
    files = sorted(path for path in folder.glob("*.safetensors") if path.name != MEAN_FILE)
    index = folder / "model.safetensors.index.json"
    if index.exists():
        wanted = set(json.loads(index.read_text())["weight_map"].values())
        if absent := sorted(wanted - {path.name for path in files}):
            raise CheckpointError(f"all {len(wanted)} weight files of the index", f"no {listing(absent)}", "Fetch the missing files.")
    if not files and not list(folder.glob("pytorch_model*.bin")):
        raise CheckpointError("*.safetensors weights", f"none in {folder}", "Is the download complete?")
    for path in files:
        try:
            with safe_open(path, framework="pt") as file:
                file.keys()
        except (SafetensorError, OSError) as problem:
            raise CheckpointError("a complete safetensors file", f"{path.name}: {problem}", "Fetch the file again.") from problem


def _load_weights(folder: Path, config: PreTrainedConfig, *, dtype: torch.dtype | str, placement: Any) -> nn.Module:
    cls = getattr(transformers, find_family(config.model_type).architecture)
    options = {"local_files_only": True, "output_loading_info": True, "ignore_mismatched_sizes": True, "weights_only": True}
    try:
        hf, info = cls.from_pretrained(folder, config=config, dtype=dtype, device_map=placement, **options)
    except (OSError, RuntimeError, ValueError, KeyError, SafetensorError) as problem:
        raise CheckpointError(
            "weights that HF can load", f"{type(problem).__name__}: {problem}", "Check the checkpoint's files."
        ) from problem
    _check_keys(info)
    half_on_cpu = dtype == "auto" and hf.dtype == torch.float16 and hf.device.type == "cpu"
    return hf.float() if half_on_cpu else hf


def _check_keys(info: Mapping[str, Any]) -> None:
    faults = {what: sorted(str(key) for key in info[f"{what}_keys"]) for what in ("missing", "unexpected", "mismatched")}
    found = [f"{len(keys)} {what}: {listing(keys, limit=6)}" for what, keys in faults.items() if keys]
    if found:
        raise CheckpointError(
            "exactly the model's keys and shapes", "; ".join(found), "The weights belong to another configuration, or the file is damaged."
        )


def load_processing(folder: Path, config: PreTrainedConfig) -> Processing:
    """Read the tokenizer, the chat template and the image processor of a checkpoint."""
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    older = folder / "chat_template.json"
    if tokenizer.chat_template is None and older.exists():
        tokenizer.chat_template = json.loads(older.read_text())["chat_template"]
    image_processor = AutoImageProcessor.from_pretrained(folder, local_files_only=True, trust_remote_code=False, backend="pil")
    return processing_for(config, tokenizer, image_processor)


def processing_for(config: PreTrainedConfig, tokenizer: Any, image_processor: Any) -> Processing:
    """Bring tokenizer and image processor together, and check that they belong to the configuration.

    Raises:
        FamilyError: for an unknown family.
        CheckpointError: when ids disagree between configuration and tokenizer.
    """
    family = find_family(config.model_type)
    found = tokenizer.convert_tokens_to_ids(family.template_image)
    if found != config.image_token_id:
        raise CheckpointError(
            f"the id {config.image_token_id} of config.json for {family.template_image!r}",
            f"{found} in the tokenizer",
            "Use the checkpoint's own tokenizer.",
        )
    if not tokenizer.is_fast:
        raise CheckpointError("a fast tokenizer", type(tokenizer).__name__, "Convert it with transformers (tokenizer.json).")
    return Processing(family, config, tokenizer, image_processor)


def _load_mean(folder: Path) -> Mean | None:
    path = folder / MEAN_FILE
    if not path.exists():
        return None
    with safe_open(path, framework="pt") as file:
        about = file.metadata() or {}
    vector = load_file(path)["mean"]
    return Mean(vector, about["site"], about["source"], int(about["tokens"]))


def _tuples(fields: Mapping[str, Any]) -> dict[str, Any]:
    return {name: tuple(value) if isinstance(value, list) else value for name, value in fields.items()}
