"""A prompt: the tensors a model takes, and what each of their positions is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from jaxtyping import Bool
from PIL import Image
from torch import Tensor

from sightlens._types import PixelMask
from sightlens.errors import LayoutError, PromptError
from sightlens.families.family import ImageOptions, visual_mask
from sightlens.layout import Layout, TokenSet
from sightlens.render import Plot, draw_layout

TYPES = ("token_type_ids", "mm_token_type_ids")
"""Tensors that say for each position whether it is text (0) or image (1)."""
PER_POSITION = ("input_ids", "attention_mask", "position_ids", *TYPES)
"""Tensors whose last dimension counts positions."""


@dataclass(frozen=True)
class Origin:
    """What a model must have in common with the one that a prompt was prepared for.

    Attributes:
        family: its name.
        vocabulary: digest of the tokenizer's tokens and ids.
        grid: rows and columns of visual tokens per view, patches per side of a token.
    """

    family: str
    vocabulary: str
    grid: tuple[int, int, int]

    def __str__(self) -> str:
        """The family, the grid and the vocabulary, shortly."""
        rows, columns, merge = self.grid
        size = f", {rows} × {columns} tokens per view, {merge} × {merge} patches each" if rows else ""
        return f"{self.family}{size}, vocabulary {self.vocabulary[:8]}"


@dataclass(frozen=True, eq=False)
class Prompt:
    """One example or a left-padded batch, ready for the model.

    Attributes:
        tensors: what HF's processor makes (``input_ids``, ``attention_mask`` ``[batch, position]``, ``pixel_values``
            ``[view, channel, height, width]`` over all images in order) and ``position_ids``, which count from each
            example's first real token, so that an example gives the same logits alone and in a padded batch
            (``[3, batch, position]`` in families with time, row and column positions).
        layouts: one per example.
        images: the RGB originals of each example.
        texts: what was tokenized, before image placeholders were expanded.
        origin: of the model it was prepared for.
        options: the choices about views that it was made with.
    """

    tensors: Mapping[str, Tensor]
    layouts: tuple[Layout, ...]
    images: tuple[tuple[Image.Image, ...], ...]
    texts: tuple[str, ...]
    origin: Origin
    options: ImageOptions = field(default_factory=ImageOptions)

    def __post_init__(self) -> None:
        """Check that tensors and layouts agree in length."""
        batch, length = self.tensors["input_ids"].shape
        if len(self.layouts) != batch or any(layout.length != length for layout in self.layouts):
            raise LayoutError(
                f"{batch} layouts of {length} positions", str([layout.length for layout in self.layouts]), "This is a bug; report it."
            )

    def __len__(self) -> int:
        """Count the examples."""
        return len(self.layouts)

    def __repr__(self) -> str:
        """The layouts, one line each."""
        return "\n".join(repr(layout) for layout in self.layouts)

    @property
    def layout(self) -> Layout:
        """The layout of the only example.

        Raises:
            PromptError: for a batch.
        """
        if len(self) != 1:
            raise PromptError("a single example", f"a batch of {len(self)}", "Use prompt.layouts[k].")
        return self.layouts[0]

    @property
    def image(self) -> Image.Image:
        """The only image of the only example.

        Raises:
            PromptError: when there are several, or none.
        """
        if len(self) != 1 or len(self.images[0]) != 1:
            raise PromptError("one example with one image", f"{[len(group) for group in self.images]} images", "Use prompt.images[k].")
        return self.images[0][0]

    @property
    def lengths(self) -> tuple[int, ...]:
        """Real positions of each example, padding left out."""
        return tuple(int(count) for count in self.tensors["attention_mask"].sum(dim=1))

    @property
    def visual(self) -> Bool[Tensor, "batch position"]:
        """Which positions are visual tokens, on the device of the tensors."""
        return visual_mask(self.layouts).to(self.tensors["input_ids"].device)

    def show(self, tokens: TokenSet | str | None = None) -> Plot:
        """Draw where each visual token of a single example lies, in the picture and in the sequence.

        Args:
            tokens: a token set or selector to tint.
        """
        chosen = self.layout.select(tokens) if isinstance(tokens, str) else tokens
        return draw_layout(list(self.images[0]), self.layout, tokens=chosen)

    def to(self, device: torch.device | str) -> Prompt:
        """Return a copy with the tensors on another device."""
        return replace(self, tensors={name: tensor.to(device) for name, tensor in self.tensors.items()})

    def generation_inputs(self, *, pixels: bool = True) -> dict[str, Tensor]:
        """Return what HF's ``generate`` takes; it counts positions itself.

        Args:
            pixels: whether with the images, which a filled cache makes superfluous. Without them positions are given, since
                they may depend on the images' sizes; every tensor is then ``[…, batch, position]``.
        """
        if pixels:
            return {name: tensor for name, tensor in self.tensors.items() if name != "position_ids"}
        return {name: tensor for name, tensor in self.tensors.items() if name in PER_POSITION}

    def with_objects(self, masks: PixelMask | Sequence[Bool[np.ndarray, "_ _"] | None]) -> Prompt:
        """Bind object masks, so that the selectors ``object`` and ``background`` work.

        Args:
            masks: one boolean mask ``[height, width]`` per example, of its first image's size, or None for an example
                without one; a bare mask for a single example.

        Raises:
            MaskError: when a mask does not fit its image.
            PromptError: when there are not as many masks as examples.
        """
        given = [masks] if isinstance(masks, np.ndarray) else list(masks)
        if len(given) != len(self):
            raise PromptError(f"{len(self)} masks, one per example", f"{len(given)}", "For several objects use layout.with_object.")
        pairs = zip(self.layouts, given, strict=True)
        return replace(self, layouts=tuple(layout if mask is None else layout.with_object(mask) for layout, mask in pairs))

    def with_answers(self, ids: Sequence[Sequence[int]], tokens: Sequence[Sequence[str]]) -> Prompt:
        """Append an answer to every example, to be read by teacher forcing; the selector ``answer`` names it.

        Args:
            ids: token ids of each example's answer, all equally long.
            tokens: their strings.

        Raises:
            PromptError: when the answers differ in length, are empty, or are not one per example.
        """
        lengths = {len(answer) for answer in ids}
        if len(ids) != len(self) or len(lengths) != 1 or 0 in lengths:
            raise PromptError(
                f"{len(self)} answers of one length", f"{[len(answer) for answer in ids]}", "Batch answers of one length together."
            )
        count = lengths.pop()
        added = {
            "input_ids": torch.tensor([list(answer) for answer in ids]),
            "attention_mask": torch.ones(len(self), count, dtype=torch.long),
            "position_ids": self.tensors["position_ids"][..., -1:].cpu() + torch.arange(1, count + 1),
            **dict.fromkeys(TYPES, torch.zeros(len(self), count, dtype=torch.long)),
        }
        tensors = {
            name: torch.cat([tensor, added[name].to(tensor)], dim=-1) if name in added else tensor for name, tensor in self.tensors.items()
        }
        layouts = tuple(layout.with_answer(list(words)) for layout, words in zip(self.layouts, tokens, strict=True))
        return replace(self, tensors=tensors, layouts=layouts)
