"""All contact with the moving parts of transformers and transformer_lens.

Two kinds of things move between releases: where a name lives, and how attention receives its mask. Both are pinned
down here, and versions outside the tested range are refused with the range they would need.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib.metadata import version
from typing import Any

import torch
import transformers
from packaging.version import Version
from torch import nn
from transformer_lens.hook_points import HookPoint
from transformer_lens.model_bridge.generalized_components.base import GeneralizedComponent
from transformer_lens.model_bridge.sources._bridge_builder import build_bridge_config_from_hf
from transformer_lens.utilities.components_utils import get_act_name
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import eager_mask, sdpa_mask

from sightlens.errors import VersionError

__all__ = [
    "TESTED",
    "HookPoint",
    "check_versions",
    "get_act_name",
    "lens_config",
    "register_attention",
    "sdpa_attention_forward",
    "unwrap_bridge",
]

TESTED: Mapping[str, tuple[str, str]] = {
    "transformers": ("5.23", "5.25"),
    "transformer-lens": ("4.3", "4.4"),
}
"""Half-open ranges ``[low, high)`` of the releases the tests ran on."""


def check_versions(installed: Mapping[str, str] | None = None) -> None:
    """Refuse library versions outside the tested range.

    Args:
        installed: versions by distribution name; read from the environment when None.

    Raises:
        VersionError: naming the library, its version and the range.
    """
    for name, (low, high) in TESTED.items():
        found = installed[name] if installed is not None else version(name)
        if not Version(low) <= Version(found) < Version(high):
            raise VersionError(
                f"{name} >= {low}, < {high}", f"{name} {found}", f"Install a tested release: `pip install '{name}>={low},<{high}'`."
            )


def register_attention(name: str, *, fused: Callable[..., Any], eager: Callable[..., Any]) -> None:
    """Offer attention functions to HF models under two names, one per mask format.

    ``{name}_sdpa`` receives None or bool masks (True keeps the edge), ``{name}_eager`` additive float masks.
    """
    for base, function, mask in (("sdpa", fused, sdpa_mask), ("eager", eager, eager_mask)):
        AttentionInterface.register(f"{name}_{base}", function)
        AttentionMaskInterface.register(f"{name}_{base}", mask)


def lens_config(hf: PreTrainedModel, name: str) -> Any:
    """Return the TransformerLens config of an HF model (``d_model``, ``n_heads``, ``n_layers``, …)."""
    config = hf.config
    dtype = next(hf.parameters()).dtype
    return build_bridge_config_from_hf(config, config.architectures[0] if config.architectures else type(hf).__name__, name, dtype)


def unwrap_bridge(model: PreTrainedModel) -> PreTrainedModel:
    """Put HF's own modules back where a TransformerBridge replaced them, in place.

    Args:
        model: the bridge's ``original_model``; the bridge must not be used afterwards.
    """
    _unwrap(model)
    return model


def _unwrap(model: nn.Module) -> None:
    for child_name, child in list(model._modules.items()):
        if child is None:
            continue
        inner = nn.ModuleList([_innermost(item) for item in child]) if isinstance(child, nn.ModuleList) else _innermost(child)
        model._modules[child_name] = inner
        _unwrap(inner)


def _innermost(module: nn.Module) -> nn.Module:
    while isinstance(module, GeneralizedComponent):
        module = module.original_component  # pyright: ignore[reportAssignmentType]  # None only before the bridge is set up
    return module


def library_versions() -> dict[str, str]:
    """Return the versions that a result depends on."""
    return {"torch": torch.__version__, "transformers": transformers.__version__, "transformer-lens": version("transformer-lens")}


def cache_keyword() -> str:
    """Return the name under which models take a key-value cache; it was renamed in transformers 5.24."""
    return "cache" if Version(transformers.__version__) >= Version("5.24") else "past_key_values"


def cached_length(arguments: Mapping[str, Any]) -> int:
    """Return how many positions the key-value cache among a decoder's arguments already holds."""
    cache = arguments.get(cache_keyword())
    return 0 if cache is None else int(cache.get_seq_length())
