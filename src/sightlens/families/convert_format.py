"""What is known about a checkpoint format that is not HF's own."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from transformers import CONFIG_MAPPING, PreTrainedConfig

from sightlens.errors import CheckpointError, FamilyError

KeyRule = tuple[str, tuple[str, ...]]
"""A pattern for a whole original name, and HF's names for it; several names cut a fused weight into equal parts."""

TEXT_FIELDS = [
    "attention_bias",
    "attention_dropout",
    "bos_token_id",
    "eos_token_id",
    "head_dim",
    "hidden_act",
    "hidden_size",
    "initializer_range",
    "intermediate_size",
    "layer_types",
    "max_position_embeddings",
    "max_window_layers",
    "mlp_bias",
    "num_attention_heads",
    "num_hidden_layers",
    "num_key_value_heads",
    "pad_token_id",
    "rms_norm_eps",
    "rope_parameters",
    "rope_scaling",
    "rope_theta",
    "sliding_window",
    "tie_word_embeddings",
    "use_sliding_window",
    "vocab_size",
]
"""The fields of a decoder's configuration that its class reads; what else a file holds changes nothing."""


class OriginalFormat(ABC):
    """One original checkpoint format, as tables and translations."""

    architecture: ClassVar[str]
    """The class named in ``config.json``."""
    model_type: ClassVar[str]
    """HF-style model type of ``config.json``, where it is not also HF's own."""
    family: ClassVar[str]
    """HF's model type after conversion."""
    image_token: ClassVar[str]
    adds_image_token: ClassVar[bool] = False
    """Whether the original tokenizer lacks the image token, so that it has to be added."""
    template: ClassVar[str]
    """A chat template that writes what the original code's default conversation writes."""
    rules: ClassVar[tuple[KeyRule, ...]]
    dropped: ClassVar[tuple[str, ...]] = ()
    separate_tower: ClassVar[str | None] = None
    """The field that names the vision tower, when its weights may be kept elsewhere."""
    tower_prefix: ClassVar[str] = ""
    """What stands before the tower's keys when they are not kept elsewhere."""

    @abstractmethod
    def config(self, data: Mapping[str, Any], *, image_token_id: int, tower: Mapping[str, Any] | None) -> PreTrainedConfig:
        """Translate a configuration.

        Args:
            data: the content of ``config.json``.
            image_token_id: id of the image token in the tokenizer.
            tower: the content of the vision tower's own ``config.json``, where there is one.

        Raises:
            CheckpointError: naming a field that is missing.
            FamilyError: naming a field whose value changes the model in a way that is not known.
        """

    @abstractmethod
    def image_processor(self, data: Mapping[str, Any], config: PreTrainedConfig) -> Any:
        """Return HF's image processor (Pillow, no torchvision) that does what the original code does.

        Args:
            data: the content of ``config.json``.
            config: the translated configuration.
        """


def text_config(data: Mapping[str, Any], model_type: str) -> PreTrainedConfig:
    """Make a decoder's configuration from the fields it reads.

    Args:
        data: where those fields stand.
        model_type: HF's name of the decoder.

    Raises:
        CheckpointError: when a size is missing.
    """
    require(data, ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size", "intermediate_size"), "the language model")
    fields = {name: data[name] for name in TEXT_FIELDS if name in data}
    if fields.get("rope_scaling") is None:
        fields.pop("rope_scaling", None)
    return CONFIG_MAPPING[model_type](**fields)


def require(data: Mapping[str, Any], fields: Sequence[str], of: str) -> None:
    """Check that a configuration has fields that must not be guessed.

    Raises:
        CheckpointError: naming the missing ones.
    """
    if missing := [name for name in fields if name not in data]:
        raise CheckpointError(f"{', '.join(fields)} of {of} in config.json", f"no {', '.join(missing)}", "Fetch the file again.")


def refuse(data: Mapping[str, Any], allowed: Mapping[str, Sequence[Any]]) -> None:
    """Check the fields that change the model; a field that is absent has the original code's default, which is allowed.

    Raises:
        FamilyError: naming the field.
    """
    for field, values in allowed.items():
        if field in data and data[field] not in values:
            raise FamilyError(
                f"{field} in {list(values)}", repr(data[field]), "This changes the model in a way that is not supported; open an issue."
            )
