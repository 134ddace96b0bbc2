"""Visual features that a model adds again after early layers (Qwen3-VL's DeepStack), for the rows of a pass."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from sightlens.interventions import MERGED
from sightlens.layout import Layout
from sightlens.model.sites import Sites


def reinjected(sites: Sites, states: Mapping[str, Tensor], layouts: Sequence[Layout], *, skipped: int, span: slice) -> dict[str, Any]:
    """Return the decoder's arguments that add visual features again at the positions of a pass; none where nothing is added.

    Writes at the features' sites act on the rows' own copies.

    Args:
        sites: of the model, the rows' interventions applied and ``sites.window`` showing the rows.
        states: the clean run's features by hook name, ``[token, d_model]`` over the prompt's examples.
        layouts: of the prompt's examples.
        skipped: how many layers do not run; after them nothing is added.
        span: positions of the pass.
    """
    names, rows, like = sites.point(MERGED).site.companions, sites.window, next(sites.decoder.parameters())
    visual = torch.stack([torch.tensor(layout.structure.visual) for layout in rows.layouts])
    inside = torch.zeros_like(visual)
    inside[:, span] = visual[:, span]
    if skipped >= len(names) or not inside.any():
        return {}
    sizes = [layout.structure.feature_rows for layout in layouts]
    added = []
    for layer, name in enumerate(names):
        parts = states[name].to(like).split(sizes)
        features = sites.point(name)(torch.cat([parts[example] for example in rows.examples]))[inside[visual].to(like.device)]
        added.append(torch.zeros_like(features) if layer < skipped else features)
    return {"visual_pos_masks": inside[:, span].to(like.device), "deepstack_visual_embeds": added}
