"""Activations of visual tokens and of the tower's patches, each with its place in its view."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from sightlens.errors import StudyError
from sightlens.families import Prompt
from sightlens.families.sites import Site
from sightlens.layout import Layout, ViewKind
from sightlens.model import Cache
from sightlens.probes import SiteTokens


@dataclass(frozen=True)
class Crop:
    """What a tower encodes at once: its kind, and rows and columns of patches."""

    kind: ViewKind
    rows: int
    columns: int

    @property
    def count(self) -> int:
        """Patches."""
        return self.rows * self.columns


def crops(layout: Layout) -> tuple[Crop, ...]:
    """Return what the tower encodes of an example, in its order; tiles whole, whatever of their tokens is cut away later."""
    features = layout.structure.features
    if features is None:
        return tuple(Crop(view.kind, view.grid[0] * view.merge, view.grid[1] * view.merge) for view in layout.views)
    table, given = layout.visual_tokens(), np.asarray(features.of)
    wholes = [k for k, view in enumerate(layout.views) if view.kind == "global"]
    (rows, columns), count = layout.views[wholes[0]].grid, layout.views[wholes[0]].count
    first = {int(given[table["view"] == k].min()) // count for k in wholes}
    return tuple(Crop("global" if k in first else "tile", rows, columns) for k in range(features.rows // count))


def site_tokens(cache: Cache, name: str, prompt: Prompt, *, view: ViewKind) -> SiteTokens:
    """Return a site's activations of the visual tokens (or patches) in views of one kind, with their places.

    Places are counted in the token's view, as the layout has it; those of patches in what the tower encoded at once, padding
    of tiles included. A tower's class token is left out.

    Raises:
        StudyError: at a site that has neither positions nor visual tokens nor patches, or where a token blends several activations.
    """
    site, value = cache.sites[name], cache[name]
    if "patch" in site.dims:
        return _patches(value, site, prompt, view)
    tables = [layout.visual_tokens() for layout in prompt.layouts]
    chosen = [np.array([one.kind == view for one in layout.views])[t["view"]] for layout, t in zip(prompt.layouts, tables, strict=True)]
    kept = [table[keep] for table, keep in zip(tables, chosen, strict=True)]
    rows, columns = (np.concatenate([table[axis] for table in kept]) for axis in ("row", "column"))
    owners = np.repeat(np.arange(len(kept)), [len(table) for table in kept])
    if "token" in site.dims:
        states = _features(value, site, prompt, chosen)
    elif "position" in site.dims:
        places = torch.as_tensor(np.concatenate([table["position"] for table in kept]), device=value.device)
        states = value[torch.as_tensor(owners, device=value.device), places]
    else:
        raise StudyError("a site with positions, visual tokens or patches", f"{site.name} {list(site.dims)}", "Probe a residual stream.")
    return SiteTokens(states.flatten(1), torch.as_tensor(rows), torch.as_tensor(columns), torch.as_tensor(owners))


def _features(value: Tensor, site: Site, prompt: Prompt, chosen: list[np.ndarray]) -> Tensor:
    """Return the projector's outputs of the chosen visual tokens."""
    flat, before, rows = (value if site.dims[0] == "token" else value.flatten(0, 1)), 0, []
    for layout, keep in zip(prompt.layouts, chosen, strict=True):
        given = layout.structure.features
        rows.append((np.arange(len(keep)) if given is None else np.asarray(given.of))[keep])
        if (rows[-1] < 0).any():
            got = f"{int((rows[-1] < 0).sum())} at {site.name} that blend several"
            raise StudyError("one activation per visual token", got, "Probe hook_merged_embed or a residual stream.")
        rows[-1] = rows[-1] + before
        before += layout.structure.feature_rows
    if before != len(flat):
        raise StudyError(f"{before} outputs of the projector", f"{len(flat)} at {site.name}", "This is a bug; report it.")
    return flat[torch.as_tensor(np.concatenate(rows), device=value.device)]


def _patches(value: Tensor, site: Site, prompt: Prompt, view: ViewKind) -> SiteTokens:
    encoded = [(example, crop) for example, layout in enumerate(prompt.layouts) for crop in crops(layout)]
    packed = site.dims[0] == "patch"
    extra = 0 if packed else value.shape[1] - encoded[0][1].count  # a class token stands before the patches
    flat = value if packed else value.flatten(0, 1)
    if len(flat) != sum(crop.count + extra for _, crop in encoded):
        raise StudyError(f"patches of {len(encoded)} crops", f"{list(value.shape)} at {site.name}", "This is a bug; report it.")
    parts, before = [], 0
    for example, crop in encoded:
        before += extra
        if crop.kind == view:
            grid = flat[before : before + crop.count].flatten(1).unflatten(0, (1, crop.rows, crop.columns))
            tokens = SiteTokens.of_grids(grid)
            parts.append(SiteTokens(tokens.states, tokens.rows, tokens.columns, tokens.owners + example))
        before += crop.count
    return SiteTokens.join(parts)
