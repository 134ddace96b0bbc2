"""What a run is given, checked before anything runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from sightlens.errors import InterventionError, PromptError
from sightlens.families import Processing, Prompt
from sightlens.interventions import Intervention
from sightlens.model.apply import Donor
from sightlens.model.cache import Cache


def check_inputs(processing: Processing, prompt: Prompt, interventions: Sequence[Intervention], donors: Mapping[str, Donor]) -> None:
    """Refuse a prompt of a model with other tokens, what is no list of interventions, and donors of another batch.

    Args:
        processing: of the model that is to run.
        prompt: of any model.
        interventions: of one cell.
        donors: values that interventions take by name.

    Raises:
        PromptError, InterventionError: saying what came.
    """
    if not isinstance(prompt, Prompt):
        raise PromptError("a Prompt from model.prepare(image, text)", type(prompt).__name__, "Call prepare first.")
    if prompt.origin != processing.origin:
        raise PromptError(f"a prompt prepared for {processing.origin}", f"one for {prompt.origin}", "Prepare it with this model.")
    if not isinstance(interventions, Sequence) or not all(isinstance(one, Intervention) for one in interventions):
        raise InterventionError("a list of interventions", repr(interventions)[:200], "Write interventions=[…].")
    for name in dict.fromkeys(name for one in interventions for name in one.donors):
        donor = donors.get(name)
        if isinstance(donor, Cache) and len(donor.window.layouts) not in (1, len(prompt)):
            got = f"{len(donor.window.layouts)} in {name!r}"
            raise InterventionError(f"a donor of one example, or of {len(prompt)}", got, "Capture it on as many prompts.")


def all_donors(own: Mapping[str, Donor], given: Mapping[str, Donor] | None) -> dict[str, Donor]:
    """Return a model's own donors and those that are given beside them.

    Raises:
        InterventionError: for anything but a mapping.
    """
    if not isinstance(given, Mapping | None):
        raise InterventionError("donors by name", type(given).__name__, 'Write donors={"clean": cache}.')
    return {**own, **(given or {})}
