"""The norms of visual tokens, which the selector ``register(…)`` compares."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from sightlens.engine import read_states
from sightlens.families import Prompt
from sightlens.interventions import MERGED, Intervention
from sightlens.layout import Register, Selector, walk
from sightlens.model import HookedVLM


def bind_norms(model: HookedVLM, prompt: Prompt) -> Prompt:
    """Return a prompt whose layouts know the norm of each visual token's merged embedding, so that ``register(…)`` works in it.

    Norms are taken in float32 from a clean run; a study whose cells say ``register(…)`` does this by itself.
    """
    merged = read_states(model, prompt, MERGED)[MERGED]
    norms = merged.float().norm(dim=-1).double().cpu().numpy()
    layouts = tuple(layout.with_norms(norms[k, layout.visual_tokens()["position"]]) for k, layout in enumerate(prompt.layouts))
    return replace(prompt, layouts=layouts)


def needs_norms(interventions: Iterable[Intervention]) -> bool:
    """Say whether any selector of some interventions reads norms."""
    places = (getattr(one, place) for one in interventions for place in one.places)
    return any(isinstance(part, Register) for place in places if isinstance(place, Selector) for part in walk(place))
