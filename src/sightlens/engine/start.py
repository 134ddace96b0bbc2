"""Where a row's computation first differs from the clean run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

import numpy as np

from sightlens.errors import InterventionError
from sightlens.interventions import MERGED, Ablate, AblateHeads, Intervention, Knockout, PatchIn, Rearrangement, resolve_where
from sightlens.layout import Layout
from sightlens.model.apply import matching, with_companions
from sightlens.model.sites import Sites


class Stage(IntEnum):
    """How much of a layer is taken from the clean run."""

    WHOLE_LAYER = 0
    """Nothing: the layer runs from its input on."""
    AFTER_ATTENTION = 1
    """Attention up to z: the layer runs from its output projection on."""
    AFTER_LAYER = 2
    """Everything: only what comes after the layer runs."""


@dataclass(frozen=True, order=True)
class Point:
    """A place in the language model; earlier places compare smaller."""

    layer: int
    stage: Stage

    @property
    def skipped(self) -> int:
        """How many layers do not run at all."""
        return self.layer + (self.stage is Stage.AFTER_LAYER)


@dataclass(frozen=True)
class Start:
    """Where a row starts.

    Attributes:
        point: place in the model.
        position: the first whose value there may differ.
        late: whether something acts inside the last MLP or behind it, so that this MLP must run at every position.
    """

    point: Point
    position: int
    late: bool


@dataclass(frozen=True)
class FullRun:
    """A row that cannot take anything from the clean run, and why."""

    reason: str


BEFORE_ATTENTION = (
    "hook_resid_pre",
    "ln1.hook_out",
    "hook_q",
    "hook_k",
    "hook_v",
    "hook_rot_q",
    "hook_rot_k",
    "hook_attn_mask",
    "hook_attn_scores",
    "hook_pattern",
)


def find_start(interventions: Sequence[Intervention], layout: Layout, sites: Sites) -> Start | FullRun | None:
    """Return where an example's run first differs from the clean one.

    Args:
        interventions: applied in order.
        layout: of the example.
        sites: of the model.

    Returns:
        None when no position of the prompt is touched (nothing to do, or generated positions only).

    Raises:
        InterventionError, HookError, SelectorError: when an intervention does not fit the model or the layout.
    """
    starts: list[tuple[Point, int]] = []
    late = False
    for intervention in interventions:
        position = _first_position(intervention, layout, bidirectional=sites.bidirectional_images)
        for name in _names(intervention, sites):
            point = site_point(name, sites)
            if point is None:
                return FullRun(f"{name} acts before image features are placed, so the vision tower or the merge runs again")
            if position is not None:
                starts.append((point, position))
                late = late or _is_late(name, sites.n_layers)
    if not starts:
        return None
    return Start(min(point for point, _ in starts), min(position for _, position in starts), late)


def _is_late(name: str, layers: int) -> bool:
    last = f"blocks.{layers - 1}."
    return name.startswith((f"{last}mlp.", f"{last}hook_mlp_out", f"{last}hook_resid_post", "ln_final."))


def site_point(name: str, sites: Sites) -> Point | None:
    """Return from which place on a site's writes have an effect; None for sites before the merged sequence."""
    again = sites.point(MERGED).site.companions
    if name == MERGED or name in again:
        return Point(0 if name == MERGED else again.index(name), Stage.WHOLE_LAYER)
    if name.startswith("ln_final"):
        return Point(sites.n_layers - 1, Stage.AFTER_LAYER)
    if not name.startswith("blocks."):
        return None
    _, layer, rest = name.split(".", 2)
    if rest == "hook_resid_post":
        return Point(int(layer), Stage.AFTER_LAYER)
    before = rest in BEFORE_ATTENTION or rest.removeprefix("attn.") in BEFORE_ATTENTION
    return Point(int(layer), Stage.WHOLE_LAYER if before else Stage.AFTER_ATTENTION)


def _names(intervention: Intervention, sites: Sites) -> Sequence[str]:
    if isinstance(intervention, Knockout):
        return [f"blocks.{min(sites.layers(intervention.layers))}.attn.hook_attn_mask"]
    if isinstance(intervention, PatchIn):
        return with_companions(sites, matching(sites, intervention), follow=intervention.reinjected)
    if isinstance(intervention, AblateHeads):
        return [f"blocks.{min(sites.layers(list(intervention.by_layer())))}.attn.hook_z"]
    if isinstance(intervention, Ablate | Rearrangement):
        follow = intervention.reinjected if isinstance(intervention, Ablate) else True
        return with_companions(sites, [sites.point(intervention.site).site.name], follow=follow)
    raise _unknown(intervention)


def _first_position(intervention: Intervention, layout: Layout, *, bidirectional: bool) -> int | None:
    """Return the first position of the prompt that an intervention reads or changes, or None.

    Where visual tokens see later ones of their view, that is the start of the view at the latest.
    """
    if isinstance(intervention, Knockout | AblateHeads) and "prefill" not in intervention.phases:
        return None
    if isinstance(intervention, Knockout):
        queries, keys = (np.sort(resolve_where(where, layout).positions) for where in (intervention.queries, intervention.keys))
        positions = keys if not len(keys) else queries if bidirectional else queries[queries >= keys[0]]
    elif isinstance(intervention, Rearrangement):
        moves = intervention.moves(layout)
        positions = np.concatenate([moves.targets, moves.sources])
    elif isinstance(intervention, Ablate | PatchIn | AblateHeads):
        positions = resolve_where(intervention.at, layout).positions
    else:
        raise _unknown(intervention)
    if not len(positions):
        return None
    first = int(positions.min())
    holding = [grid for grid in layout.grid_positions if bidirectional and first in grid]
    return int(holding[0].min()) if holding else first


def _unknown(intervention: Intervention) -> InterventionError:
    return InterventionError("a kind that sightlens.interventions offers", type(intervention).__name__, "Use one of those.")
