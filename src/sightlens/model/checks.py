"""What a model can be asked to prove: that layouts are true, and that every hook has an effect."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from sightlens.errors import LayoutError
from sightlens.families import Prompt
from sightlens.families.sites import Attention
from sightlens.model.agreement import TOLERANCE, Check
from sightlens.model.hooked import HookedVLM


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
    table = layout.visual_tokens()
    places = [k for k, row in enumerate(table) if _drawable(row["box"], layout.image_sizes[row["image"]])]
    chosen = np.random.default_rng(seed).permutation(places)[:tokens]
    names = ["hook_visual_embed", "hook_merged_embed", "vision_encoder.embeddings.hook_out"]
    _, cache = model.run_with_cache(prompt, names_filter=names)
    flat = cache["hook_visual_embed"].flatten(0, 1)
    if not torch.equal(cache["hook_merged_embed"][0, table["position"]], flat.to(cache["hook_merged_embed"].dtype)):
        raise LayoutError(
            "the projector's outputs at the layout's visual positions", "other values", f"The layout of {layout} is wrong; report it."
        )
    for k in chosen:
        yield _verify_token(model, prompt, table[int(k)], flat=int(k), before=cache["vision_encoder.embeddings.hook_out"])


def _drawable(box: np.ndarray, size: tuple[int, int]) -> bool:
    x0, y0, x1, y1 = _inner(box)
    return 0 <= x0 < x1 <= size[1] and 0 <= y0 < y1 <= size[0]


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


def _verify_token(model: HookedVLM, prompt: Prompt, row: np.void, *, flat: int, before: Tensor) -> Check:
    images = [np.asarray(image).copy() for image in prompt.images[0]]
    x0, y0, x1, y1 = _inner(row["box"])
    images[row["image"]][y0:y1, x0:x1] ^= 0xFF
    changed = model.prepare(images, prompt.texts[0], template="raw", options=prompt.options)
    _, cache = model.run_with_cache(changed, names_filter="vision_encoder.embeddings.hook_out")
    moved = (cache["vision_encoder.embeddings.hook_out"] - before)[int(row["view"])].norm(dim=-1)
    patches = _patches(model, row, count=moved.shape[0])
    other = moved.clone()
    other[patches] = 0
    name = f"token at position {row['position']} (view {row['view']}, row {row['row']}, column {row['column']})"
    if moved[patches].max() <= other.max():
        raise LayoutError(
            f"the patches of the {name} to move most when its box changes",
            f"patch {int(other.argmax())}",
            "The layout is wrong; report it.",
        )
    _verify_merge(model, prompt, row, flat=flat, patches=patches)
    return Check(
        name,
        passed=True,
        detail=f"pixels move its patches {float(moved[patches].max() / other.max().clamp(min=1e-9)):.1f}× more than any other",
    )


def _patches(model: HookedVLM, row: np.void, *, count: int) -> list[int]:
    grid = model.processing.grid
    extra = count - grid.count * grid.merge**2  # a class token stands before the patches
    columns = grid.columns * grid.merge
    first = row["row"] * grid.merge, row["column"] * grid.merge
    return [int(extra + (first[0] + r) * columns + first[1] + c) for r in range(grid.merge) for c in range(grid.merge)]


def _verify_merge(model: HookedVLM, prompt: Prompt, row: np.void, *, flat: int, patches: list[int]) -> None:
    towers = [name for name in model.hook_dict if name.startswith("vision_encoder.encoder_layers") and name.endswith("hook_resid_post")]
    view = int(row["view"])

    def disturb(value: Tensor, hook: object) -> Tensor:
        value = value.clone()
        value[view, patches] += value.norm() * torch.linspace(-1, 1, value.shape[-1], device=value.device, dtype=value.dtype)
        return value

    _, plain = model.run_with_cache(prompt, names_filter="hook_visual_embed")
    with model.hooks(fwd_hooks=[(towers[-1], disturb)]):
        _, cache = model.run_with_cache(prompt, names_filter="hook_visual_embed")
    moved = (cache["hook_visual_embed"] != plain["hook_visual_embed"]).flatten(0, 1).any(-1)
    if moved.nonzero().flatten().tolist() != [flat]:
        raise LayoutError(
            f"only visual token {flat} to move with its patches",
            f"{moved.nonzero().flatten().tolist()[:8]}",
            "The layout is wrong; report it.",
        )


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
