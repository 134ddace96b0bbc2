"""Checkpoints in the layout of the original code: LLaVA's ``LlavaLlamaForCausalLM`` and ``InternVLChatModel``.

Their keys and configurations are translated to HF's own classes by tables, so that no code from a checkpoint runs.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from sightlens.errors import CheckpointError, listing
from sightlens.families.convert_format import KeyRule, OriginalFormat
from sightlens.families.convert_internvl import InternVLChat
from sightlens.families.convert_llava import LlavaLlama

FORMATS: tuple[OriginalFormat, ...] = (LlavaLlama(), InternVLChat())


def find_original(data: Mapping[str, Any]) -> OriginalFormat | None:
    """Return the original format that a ``config.json`` describes, or None for HF's own.

    Args:
        data: the content of ``config.json``.
    """
    named = data.get("architectures") or ()
    return next((known for known in FORMATS if known.architecture in named or known.model_type == data.get("model_type")), None)


def convert_keys(state: Mapping[str, Tensor], rules: Sequence[KeyRule], dropped: Sequence[str] = ()) -> dict[str, Tensor]:
    """Rename every weight, and cut fused ones along their first dimension.

    Args:
        state: weights by their original names.
        rules: the first rule whose pattern matches a whole name applies.
        dropped: patterns of names that hold no weight of the model, such as precomputed frequencies.

    Returns:
        The weights by HF's names, sharing memory with ``state``.

    Raises:
        CheckpointError: for a name without a rule, a fused weight that cannot be cut, or two weights of one name.
    """
    converted: dict[str, Tensor] = {}
    unknown: list[str] = []
    for name, tensor in state.items():
        if any(re.fullmatch(pattern, name) for pattern in dropped):
            continue
        targets = _targets(name, rules)
        if not targets:
            unknown.append(name)
            continue
        if tensor.ndim == 0 or tensor.shape[0] % len(targets):
            raise CheckpointError(f"{name} of {len(targets)} equal parts", f"shape {list(tensor.shape)}", "The file is damaged.")
        for target, part in zip(targets, tensor.chunk(len(targets)), strict=True):
            if target in converted:
                raise CheckpointError(f"one weight for {target}", f"a second one, {name}", "Remove the file that repeats it.")
            converted[target] = part
    if unknown:
        raise CheckpointError(
            "keys of the original layout",
            f"{len(unknown)} unexpected: {listing(sorted(unknown), limit=6)}",
            "The weights belong to another model.",
        )
    return converted


def extend_vocabulary(state: dict[str, Tensor], *, size: int) -> dict[str, Tensor]:
    """Append rows to the embedding and the unembedding, for tokens that the original vocabulary lacks.

    A new row is the mean of the others: its logit is their mean, so the token is never the likeliest.

    Args:
        state: weights by HF's names.
        size: rows wanted.
    """
    names = [name for name in ("model.language_model.embed_tokens.weight", "lm_head.weight") if name in state]
    longer = {}
    for name in names:
        rows = state[name]
        mean = rows.float().mean(dim=0, keepdim=True).to(rows.dtype)
        longer[name] = rows if len(rows) >= size else rows.new_empty((size, rows.shape[1])).copy_(mean.expand(size, -1))
        longer[name][: len(rows)] = rows
    return {**state, **longer}


def _targets(name: str, rules: Sequence[KeyRule]) -> list[str]:
    for pattern, targets in rules:
        if match := re.fullmatch(pattern, name):
            return [match.expand(target) for target in targets]
    return []
