"""What a model can be asked to prove: that layouts are true, and that every hook has an effect."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from sightlens.errors import LayoutError
from sightlens.families import Prompt
from sightlens.families.sites import Attention
from sightlens.layout import Layout
from sightlens.model.agreement import TOLERANCE, Check
from sightlens.model.hooked import HookedVLM
from sightlens.model.patches import merged_patches

EMBEDDED = "vision_encoder.embeddings.hook_out"


@torch.no_grad()
def verify_layout(model: HookedVLM, prompt: Prompt, *, tokens: int = 8, seed: int = 0) -> tuple[Check, ...]:
    """Prove a prompt's layouts on the model itself, for some visual tokens of each example.

    Three links are followed: a change of the pixels inside a token's box moves the patches that the layout gives the token
    more than any others; a change of those patches at the end of the tower moves that token's projector output and no
    other; and that output stands, unchanged, at the position the layout says.

    Args:
        model: the model the prompt was prepared for.
        prompt: with images.
        tokens: how many visual tokens per example.
        seed: of their choice.

    Raises:
        LayoutError: naming the token and the link that fails.
    """
    return tuple(
        check
        for example in range(len(prompt))
        for check in _verify_example(model, _alone(model, prompt, example), tokens=tokens, seed=seed)
    )


def _alone(model: HookedVLM, prompt: Prompt, example: int) -> Prompt:
    images = [np.asarray(image) for image in prompt.images[example]]
    return model.prepare(images, prompt.texts[example], template="raw", options=prompt.options)


def _verify_example(model: HookedVLM, prompt: Prompt, *, tokens: int, seed: int) -> Iterator[Check]:
    layout = prompt.layout
    table, carried = layout.visual_tokens(), _carried(layout)
    if not len(table):
        return
    places = [k for k, row in enumerate(table) if _drawable(row["box"], layout.image_sizes[row["image"]])]
    chosen = np.random.default_rng(seed).permutation(places)[:tokens]
    _, cache = model.run_with_cache(prompt, names_filter=["hook_visual_embed", "hook_merged_embed", EMBEDDED])
    merged, single = cache["hook_merged_embed"], carried >= 0
    features = _rows(model, "hook_visual_embed", cache["hook_visual_embed"]).to(merged.dtype)
    if not torch.equal(merged[0, table["position"][single]], features[carried[single]]):
        raise LayoutError(
            "the projector's outputs at the layout's visual positions", "other values", f"The layout of {layout} is wrong; report it."
        )
    for k in map(int, chosen):
        yield _verify_token(model, prompt, table[k], feature=int(carried[k]), before=cache[EMBEDDED])


def _carried(layout: Layout) -> Int[np.ndarray, " token"]:
    """Return which output of the projector each visual token carries, -1 for several."""
    given = layout.structure.features
    return np.arange(layout.structure.feature_rows) if given is None else np.asarray(given.of, dtype=np.int64)


def _rows(model: HookedVLM, name: str, value: Tensor) -> Tensor:
    """Lay all patches, or all outputs of the projector, out in one dimension."""
    return value.flatten(0, 1) if model.hook_dict[name].site.dims[0] == "view" else value


def _drawable(box: np.ndarray, size: tuple[int, int]) -> bool:
    x0, y0, x1, y1 = _inner(box)
    large = bool(min(box[2] - box[0], box[3] - box[1]) >= 2)  # smaller ones share their pixels with their neighbours
    return large and 0 <= x0 < x1 <= size[1] and 0 <= y0 < y1 <= size[0]


def _inner(box: np.ndarray) -> tuple[int, int, int, int]:
    """Return the whole pixels nearest to the middle half of a box."""
    x0, y0, x1, y1 = box
    inset = (x1 - x0) / 4, (y1 - y0) / 4
    return (
        round(x0 + inset[0]),
        round(y0 + inset[1]),
        max(round(x1 - inset[0]), round(x0 + inset[0]) + 1),
        max(round(y1 - inset[1]), round(y0 + inset[1]) + 1),
    )


def _verify_token(model: HookedVLM, prompt: Prompt, row: np.void, *, feature: int, before: Tensor) -> Check:
    images = [np.asarray(image).copy() for image in prompt.images[0]]
    x0, y0, x1, y1 = _inner(row["box"])
    images[row["image"]][y0:y1, x0:x1] ^= 0xFF
    changed = model.prepare(images, prompt.texts[0], template="raw", options=prompt.options)
    _, cache = model.run_with_cache(changed, names_filter=EMBEDDED)
    moved = _rows(model, EMBEDDED, cache[EMBEDDED] - before).norm(dim=-1)
    name = f"token at position {row['position']} (view {row['view']}, row {row['row']}, column {row['column']})"
    if feature < 0:
        moved[: before.shape[-2]] = 0  # the whole picture, which comes before the tiles that the token blends
        return _verify_blend(model, prompt, row, patch=int(moved.argmax()), name=name)
    grid, held = model.processing.grid, before.shape[-2]
    patches = merged_patches(np.array([feature]), prompt.layouts, grid, held=held)[0].tolist()
    inside = _of_crop(model, feature, moved, per_view=held)
    other = inside.clone()
    other[patches] = 0
    if inside[patches].max() <= other.max():
        raise LayoutError(
            f"the patches of the {name} to move most when its box changes",
            f"patch {int(other.argmax())}",
            "The layout is wrong; report it.",
        )
    _verify_merge(model, prompt, feature=feature, patches=patches)
    own, others = float(inside[patches].max()), float(other.max())
    detail = f"pixels move its patches {own / others:.1f}× more than any other" if others else "pixels move its patches and no other"
    return Check(name, passed=True, detail=detail)


def _of_crop(model: HookedVLM, feature: int, moved: Tensor, *, per_view: int) -> Tensor:
    """Leave of all patches' movement that in the token's own crop: other crops show the same pixels."""
    grid = model.processing.grid
    if not grid.count:
        return moved
    crop = feature // grid.count
    inside = torch.zeros_like(moved)
    inside[crop * per_view : (crop + 1) * per_view] = moved[crop * per_view : (crop + 1) * per_view]
    return inside


def _disturbed(model: HookedVLM, prompt: Prompt, site: str, *, patches: list[int]) -> Tensor:
    """Return which rows of a site move when patches at the end of the tower do."""
    towers = [name for name in model.hook_dict if name.startswith("vision_encoder.encoder_layers") and name.endswith("hook_resid_post")]

    def disturb(value: Tensor, hook: object) -> Tensor:
        value = value.clone(memory_format=torch.contiguous_format)
        rows = value.view(-1, value.shape[-1])
        rows[patches] += value.norm() * torch.linspace(-1, 1, value.shape[-1], device=value.device, dtype=value.dtype)
        return value

    _, plain = model.run_with_cache(prompt, names_filter=site)
    with model.hooks(fwd_hooks=[(towers[-1], disturb)]):
        _, cache = model.run_with_cache(prompt, names_filter=site)
    return (cache[site] != plain[site]).any(-1)


def _verify_merge(model: HookedVLM, prompt: Prompt, *, feature: int, patches: list[int]) -> None:
    moved = _disturbed(model, prompt, "hook_visual_embed", patches=patches).flatten().nonzero().flatten().tolist()
    if moved != [feature]:
        raise LayoutError(
            f"only output {feature} of the projector to move with its patches", f"{moved[:8]}", "The layout is wrong; report it."
        )


def _verify_blend(model: HookedVLM, prompt: Prompt, row: np.void, *, patch: int, name: str) -> Check:
    """Prove a token that blends several outputs: the patch in its middle moves it, and none but its neighbours beside it."""
    moved = _disturbed(model, prompt, "hook_merged_embed", patches=[patch])[0].nonzero().flatten().tolist()
    table = prompt.layout.visual_tokens()
    found = table[np.isin(table["position"], moved)]
    near = np.abs(found["row"] - row["row"]).max(initial=0) <= 1 and np.abs(found["column"] - row["column"]).max(initial=0) <= 1
    if row["position"] not in moved or not near or (found["view"] != row["view"]).any():
        raise LayoutError(f"the {name} to blend what its box shows", f"positions {moved[:8]}", "The layout is wrong; report it.")
    return Check(name, passed=True, detail=f"its patch moves it and {len(moved) - 1} neighbours")


def hook_contract(model: HookedVLM, prompt: Prompt) -> Iterator[Check]:
    """Check every hook name: it fires, writing back what was read changes nothing, writing something else changes the logits."""
    with torch.no_grad():
        plain = model(prompt).float()
    for name in model.hook_dict:
        yield _check_hook(model, prompt, name, plain=plain)


@torch.no_grad()
def _check_hook(model: HookedVLM, prompt: Prompt, name: str, *, plain: Tensor) -> Check:
    seen: list[torch.Size] = []

    def keep(value: Tensor, hook: object) -> Tensor:
        seen.append(value.shape)
        return value.clone()

    same = float((model.run_with_hooks(prompt, fwd_hooks=[(name, keep)]).float() - plain).abs().max())
    moved = float((model.run_with_hooks(prompt, fwd_hooks=[(name, _disturb)]).float() - plain).abs().max())
    inside = isinstance(model.hook_dict[name].site.tap, Attention)  # looking inside attention leaves the fused kernel
    limit = TOLERANCE.get(model.hf.dtype, 0.15) * float(plain.abs().max()) if inside else 0.0
    detail = f"fires {len(seen)}×, shape {list(seen[0]) if seen else None}, back {same:.1g}, moved {moved:.2g}"
    return Check(name, len(seen) == 1 and same <= limit and moved > 0, detail)


def _disturb(value: Tensor, hook: object) -> Tensor:
    noise = torch.linspace(-1, 1, value.numel(), device=value.device, dtype=value.dtype).reshape(value.shape)
    # finite and never upwards, so that it also means something to masks and scores
    return value - (1 + noise.abs()) * (1 + value.abs().clamp(max=1e3)) * (noise > 0)
