"""The engine: many cells over one prompt, each at the cost of what it changes."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from sightlens.engine.budget import Resources
from sightlens.engine.cost import ModelCost
from sightlens.engine.explanation import UNITS
from sightlens.engine.plan import Plan
from sightlens.engine.prefix import Keep
from sightlens.engine.schedule import Cells, schedule
from sightlens.errors import EngineError
from sightlens.families import Prompt
from sightlens.model import HookedVLM
from sightlens.model.apply import Donor
from sightlens.model.inputs import all_donors, check_inputs


class Engine:
    """Runs many cells (lists of interventions) over a prompt at the cost of what they change.

    Keys, values and the states that cells start from are kept from one clean run; each cell runs from its first touched
    layer and position on, so that the tower runs once per example, but for cells that act in it or before the merge: those
    run whole. Cells that start at the same place run as rows of one batch; logits are computed only where they are read.
    Results are those of a full forward pass per cell.

    >>> engine = Engine(model, memory="4GB")  # doctest: +SKIP
    >>> plan = engine.plan(prompt, [[Knockout("post_image", "object", layers=(layer,))] for layer in range(8)])  # doctest: +SKIP
    >>> print(plan.explain())  # doctest: +SKIP
    >>> logits = plan.logits()  # doctest: +SKIP
    """

    def __init__(self, model: HookedVLM, *, memory: str | int = "4GB", keep: Keep | None = None) -> None:
        """Serve a model.

        Args:
            model: whose donors cells may name.
            memory: budget beside the model for the kept clean run and one batch of rows: bytes, or ``"4GB"``.
            keep: in which dtype and where the clean run is kept.

        Raises:
            EngineError: when the budget cannot be read.
        """
        self.model = model
        self._resources = Resources(read_size(memory), keep or Keep(), ModelCost.of(model))

    def plan(
        self,
        prompt: Prompt,
        cells: Cells,
        *,
        donors: Mapping[str, Donor] | None = None,
        reads: str = "last",
        examples: Sequence[Sequence[int]] | None = None,
    ) -> Plan:
        """Sort cells into passes; nothing runs yet.

        Args:
            prompt: one example or a batch.
            cells: the interventions of each cell; an empty list is the untouched run.
            donors: values that interventions take by name, beside ``model.donors``.
            reads: at which positions logits are wanted: ``"last"``; ``"all"``; ``"answer"``, those that predict a teacher-forced
                answer; or a selector such as ``"question"``, which must choose the same positions of every example.
            examples: which examples each cell runs on; all when None.

        Raises:
            EngineError: without cells, without an answer to read, or with a selector that chooses nothing, or other positions
                of one example than of another.
            InterventionError, HookError, SelectorError: when an intervention does not fit.
        """
        given = all_donors(self.model.donors, donors)
        for cell in cells:
            check_inputs(self.model.processing, prompt, cell, given)
        chosen = [range(len(prompt))] * len(cells) if examples is None else examples
        plan = schedule(cells, chosen, prompt.layouts, self.model.sites, free=self._resources.cost.free_positions)
        return Plan(self.model, prompt, plan, read_positions(prompt, reads), given, self._resources)


def read_size(memory: str | int) -> int:
    """Return a number of bytes.

    >>> read_size("4GB"), read_size("512 MiB")
    (4000000000, 536870912)

    Raises:
        EngineError: when it is not a positive size.
    """
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMG]?i?B)\s*", memory) if isinstance(memory, str) else None
    size = int(float(found[1]) * UNITS.get(found[2], 0)) if found else memory if isinstance(memory, int) else 0
    if size <= 0:
        raise EngineError("a size such as 4GB, 512MiB or a number of bytes", repr(memory), "Give the budget beside the model.")
    return size


def read_positions(prompt: Prompt, reads: str) -> tuple[int, ...]:
    """Return the positions whose logits are read, ascending.

    Raises:
        EngineError: for an answer that the prompt does not have, or a selector that chooses nothing, or not the same everywhere.
        SelectorError: for a selector that does not parse.
    """
    length = prompt.layouts[0].length
    if reads == "last":
        return (length - 1,)
    if reads == "all":
        return tuple(range(length))
    chosen = {tuple(sorted(layout.select(reads).positions.tolist())) for layout in prompt.layouts}
    if reads == "answer":
        if chosen == {()}:
            raise EngineError("a prompt with a teacher-forced answer", "one without", "Use model.with_answers(prompt, answers).")
        return tuple(position - 1 for position in chosen.pop())
    if len(chosen) != 1 or chosen == {()}:
        got = f"`{reads}`, which chooses {' or '.join(str(len(positions)) for positions in sorted(chosen))} positions"
        raise EngineError("reads that choose the same positions of every example", got, "Plan the examples apart, or use reads='all'.")
    return chosen.pop()
