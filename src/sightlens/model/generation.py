"""What may be asked of HF's ``forward`` and ``generate``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from transformers import GenerationConfig

from sightlens.errors import PromptError, listing

Keep = Literal["all", "last"]
OBJECTS = ("logits_processor", "stopping_criteria", "streamer")
"""Options that HF takes beside those of its generation config."""
REFUSED: Mapping[str, str] = {
    "num_beams": "Beams reorder examples; generate them one by one.",
    "num_return_sequences": "Ask for one sequence per example, with different seeds.",
    "return_dict_in_generate": "Read logits with model(prompt) or run_with_cache.",
    "max_length": "Give max_new_tokens.",
    "prompt_lookup_num_tokens": "Assisted generation runs passes that are thrown away.",
    "cache_implementation": "The cache is chosen for you.",
}
NEUTRAL: Mapping[str, Any] = {
    "do_sample": False,
    "num_beams": 1,
    "num_return_sequences": 1,
    "return_dict_in_generate": False,
    "prompt_lookup_num_tokens": None,
    "cache_implementation": None,
    "use_cache": True,
}
"""What holds unless options say otherwise, whatever the checkpoint's own generation config says."""


def kept_logits(keep: str) -> int:
    """Return HF's ``logits_to_keep``.

    Raises:
        PromptError: for a word other than all and last.
    """
    kept = {"all": 0, "last": 1}
    if keep not in kept:
        raise PromptError("keep='all' or keep='last'", repr(keep), "Say of which positions logits are wanted.")
    return kept[keep]


def generation_settings(options: Mapping[str, Any] | None, *, max_new_tokens: int, tokenizer: Any) -> dict[str, Any]:
    """Return the arguments for HF's ``generate``: greedy, one sequence per example, with a cache, unless the options say otherwise.

    Raises:
        PromptError: for an option that HF does not know or that cannot keep one row per example, or no new tokens.
    """
    given = dict(options or {})
    known = {*vars(GenerationConfig()), *OBJECTS}
    if unknown := sorted(set(given) - known):
        raise PromptError("generation options of HF", listing(unknown), "See transformers.GenerationConfig.")
    for name, do in REFUSED.items():
        if given.get(name) not in (None, False, 1):
            raise PromptError("options that keep one row per example and pass", f"{name}={given[name]!r}", do)
    settings = {**NEUTRAL, "max_new_tokens": max_new_tokens, **given}
    new = settings["max_new_tokens"]
    if not isinstance(new, int) or isinstance(new, bool) or new < 1:
        raise PromptError("max_new_tokens of 1 or more", repr(new), "Use model(prompt) for logits alone.")
    return {**settings, "tokenizer": tokenizer} if given.get("stop_strings") else settings
