"""From images and texts to prompts: what HF's own processor makes, without needing torchvision, and with a layout."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import torch
from PIL import Image
from transformers import PreTrainedConfig

from sightlens.errors import PromptError
from sightlens.families.family import Family, Grid, ImageOptions, ViewedImage
from sightlens.families.images import ImageLike, open_image
from sightlens.families.prompt import Prompt
from sightlens.layout import Layout, Segment, Separator, Text, build_layout, mark_ids

Template = Literal["chat", "raw"]
Images = ImageLike | Sequence[ImageLike] | None
_Span = tuple[int, int, str]
MARK = "\ue000"
"""A private-use character that stands for a message while its place in a chat template is looked up."""


@dataclass(frozen=True)
class _Example:
    """One example before padding."""

    ids: list[int]
    layout: Layout
    pixels: tuple[torch.Tensor, ...]
    images: tuple[Image.Image, ...]
    text: str


@dataclass(frozen=True)
class Wording:
    """How a text is put to the model.

    Attributes:
        template: ``"chat"`` wraps the text in the checkpoint's chat template; ``"raw"`` takes it as it is, with the
            image placeholder where each image goes.
        system: a system message for the chat template, or None.
    """

    template: Template = "chat"
    system: str | None = None


@dataclass(frozen=True)
class Processing:
    """Everything between a user's image and a model's tensors, for one checkpoint."""

    family: Family
    config: PreTrainedConfig
    tokenizer: Any
    image_processor: Any

    @property
    def image_token(self) -> str:
        """The token that visual tokens replace."""
        return self.tokenizer.convert_ids_to_tokens(self.config.image_token_id)

    @property
    def grid(self) -> Grid:
        """Visual tokens per view."""
        return self.family.token_grid(self.config)

    def prepare(self, images: Images | Sequence[Images], texts: str | Sequence[str], *, wording: Wording, options: ImageOptions) -> Prompt:
        """Make one example from a text, or a left-padded batch from several.

        Args:
            images: for one text an image, a list of images, or None; for several texts one such entry each.
            texts: the words.
            wording: template and system message.
            options: choices about views.

        Raises:
            PromptError: when images and texts do not pair up, or the text's placeholders do not match the images.
            ImageError: when an image cannot be used.
        """
        self.family.check_options(options)
        groups = _pair_up(images, texts)
        examples = [self._example(group, text, wording, options=options) for group, text in groups]
        return replace(self._batch(examples), options=options)

    def _example(self, group: Sequence[ImageLike], text: str, wording: Wording, *, options: ImageOptions) -> _Example:
        pictures = tuple(open_image(image) for image in group)
        grid = self.grid
        viewed = [self.family.view_image(picture, self.image_processor, options, index=k, grid=grid) for k, picture in enumerate(pictures)]
        rendered = self._render(text, wording, images=len(pictures))
        spans = self._spans(rendered, text, wording, images=len(pictures))
        expanded, moves = self._expand(rendered, viewed)
        encoded = self._encode(expanded)
        layout = self._layout(encoded, viewed, spans=_moved(spans, moves), sizes=[(p.height, p.width) for p in pictures])
        return _Example(encoded["input_ids"], layout, tuple(view.pixels for view in viewed), pictures, rendered)

    def _render(self, text: str, wording: Wording, *, images: int) -> str:
        if wording.template not in ("chat", "raw"):
            raise PromptError("template 'chat' or 'raw'", repr(wording.template), "Leave it out for the chat template.")
        placeholder = self.family.template_image
        if wording.template == "raw":
            if wording.system is not None:
                raise PromptError("no system message in a raw text", repr(wording.system), "Write it into the text.")
            if text.count(placeholder) != images:
                raise PromptError(
                    f"{images} times {placeholder!r} in a raw text with {images} images",
                    f"{text.count(placeholder)}",
                    "Write one per image.",
                )
            return text
        if placeholder in text:
            raise PromptError(
                f"a text without {placeholder!r} for the chat template", repr(text[:80]), "Use template='raw' to place images yourself."
            )
        if self.tokenizer.chat_template is None:
            raise PromptError(
                "a checkpoint with a chat template", "none", f"Use template='raw' and write {placeholder!r} where the image goes."
            )
        rendered = self._fill(text, wording.system, images=images)
        if rendered.count(placeholder) != images:
            raise PromptError(f"a chat template that writes {placeholder!r} once per image", repr(rendered[:120]), "Use template='raw'.")
        return rendered

    def _fill(self, text: str, system: str | None, *, images: int) -> str:
        content = [{"type": "image"}] * images + [{"type": "text", "text": text}]
        before = [] if system is None else [{"role": "system", "content": [{"type": "text", "text": system}]}]
        return self.tokenizer.apply_chat_template(
            [*before, {"role": "user", "content": content}], tokenize=False, add_generation_prompt=True
        )

    def _spans(self, rendered: str, text: str, wording: Wording, *, images: int) -> list[_Span]:
        """Return the character spans of the question and the system message in the rendered chat."""
        if wording.template == "raw":
            return []
        marked = [("question", self._fill(MARK, wording.system, images=images))]
        if wording.system is not None:
            marked.append(("system", self._fill(text, MARK, images=images)))
        return [span for role, filled in marked if (span := _difference(rendered, filled, role)) is not None]

    def _expand(self, rendered: str, viewed: Sequence[ViewedImage]) -> tuple[str, list[tuple[int, int]]]:
        """Replace each placeholder by an image's tokens, and return where the text moved: ``(place in rendered, shift)``."""
        parts, moves, shift, last = [], [(0, 0)], 0, 0
        for match, view in zip(re.finditer(re.escape(self.family.template_image), rendered), viewed, strict=True):
            span = "".join(view.opening) + self.image_token * sum(v.count for v in view.views) + "".join(view.closing)
            parts += [rendered[last : match.start()], span]
            shift += len(span) - len(match.group())
            last = match.end()
            moves.append((last, shift))
        return "".join([*parts, rendered[last:]]), moves

    def _encode(self, text: str) -> Mapping[str, Any]:
        bos = self.tokenizer.bos_token
        has_bos = bos is not None and text.startswith(bos)
        encoded = self.tokenizer(text, return_offsets_mapping=True, add_special_tokens=not has_bos)
        limit = self.config.text_config.max_position_embeddings
        if len(encoded["input_ids"]) > limit:
            raise PromptError(
                f"at most {limit} positions", f"{len(encoded['input_ids'])}", "Use fewer tiles, fewer images or a shorter text."
            )
        return encoded

    def _layout(
        self, encoded: Mapping[str, Any], viewed: Sequence[ViewedImage], *, spans: list[_Span], sizes: list[tuple[int, int]]
    ) -> Layout:
        ids = np.asarray(encoded["input_ids"])
        views = [view for image in viewed for view in image.views]
        visual = np.flatnonzero(ids == self.config.image_token_id)
        expected = sum(view.count for view in views)
        if len(visual) != expected:
            raise PromptError(
                f"{expected} image tokens after tokenization",
                f"{len(visual)}",
                "The text holds the image token, or the tokenizer splits it.",
            )
        known = [*self._markers(ids, viewed, visual), *_text_segments(encoded["offset_mapping"], spans)]
        return build_layout(self.tokenizer.convert_ids_to_tokens(ids.tolist()), visual=visual, views=views, image_sizes=sizes, known=known)

    def _markers(self, ids: np.ndarray, viewed: Sequence[ViewedImage], visual: np.ndarray) -> list[Segment]:
        """Name the separators around each image's visual tokens, and the special tokens elsewhere."""
        separators: list[Segment] = []
        first = 0
        for image in viewed:
            count = sum(view.count for view in image.views)
            start, stop = int(visual[first]), int(visual[first + count - 1]) + 1
            separators += [Separator(start - k - 1, start - k, "start") for k in range(len(image.opening))]
            separators += [Separator(stop + k, stop + k + 1, "end") for k in range(len(image.closing))]
            first += count
        taken = {segment.start for segment in separators} | set(visual.tolist())
        specials = mark_ids(ids, specials=self._special_names())
        return [*separators, *(segment for segment in specials if segment.start not in taken)]

    def _special_names(self) -> dict[int, str]:
        tokens = self.tokenizer
        names = {index: str(token).strip("<|>/[]") for index, token in zip(tokens.all_special_ids, tokens.all_special_tokens, strict=True)}
        known = {tokens.bos_token_id: "bos", tokens.eos_token_id: "eos", tokens.pad_token_id: "pad"}
        names.update({index: name for index, name in known.items() if index is not None})
        names.pop(self.config.image_token_id, None)
        names.pop(tokens.unk_token_id, None)  # an unknown word is part of the text it stands in
        return names

    def _batch(self, examples: Sequence[_Example]) -> Prompt:
        longest = max(len(example.ids) for example in examples)
        pad = self.tokenizer.pad_token_id if self.tokenizer.pad_token_id is not None else (self.tokenizer.eos_token_id or 0)
        ids = torch.tensor([[pad] * (longest - len(example.ids)) + example.ids for example in examples])
        mask = torch.tensor([[0] * (longest - len(example.ids)) + [1] * len(example.ids) for example in examples])
        tensors = {"input_ids": ids, "attention_mask": mask, "position_ids": (mask.cumsum(1) - 1).clamp(min=0)}
        pixels = [crop for example in examples for crop in example.pixels]
        if pixels:
            tensors["pixel_values"] = torch.cat(pixels)
        layouts = tuple(example.layout.pad(left=longest - len(example.ids)) for example in examples)
        return Prompt(tensors, layouts, tuple(e.images for e in examples), tuple(e.text for e in examples))


def _pair_up(images: Any, texts: str | Sequence[str]) -> list[tuple[list[ImageLike], str]]:
    if isinstance(texts, str):
        return [(_as_list(images), texts)]
    if len(texts) == 0:
        raise PromptError("at least one text", "an empty list", "Give a text.")
    groups = [None] * len(texts) if images is None else images
    if not isinstance(groups, (list, tuple)) or len(groups) != len(texts):
        count = len(groups) if isinstance(groups, (list, tuple)) else 1
        raise PromptError(
            f"{len(texts)} image entries for {len(texts)} texts", f"{count}", "Give each text an image, a list of images, or None."
        )
    return [(_as_list(group), text) for group, text in zip(groups, texts, strict=True)]


def _as_list(images: Any) -> list[ImageLike]:
    return [] if images is None else list(images) if isinstance(images, (list, tuple)) else [images]


def _difference(rendered: str, filled: str, role: str) -> _Span | None:
    """Return where a rendered chat differs from the same chat with the mark instead of one message, spaces around it left out."""
    before, found, after = filled.partition(MARK)
    stop = len(rendered) - len(after)
    if not found or not rendered.startswith(before) or not rendered.endswith(after) or stop <= len(before):
        return None
    words = rendered[len(before) : stop]
    start = len(before) + len(words) - len(words.lstrip())
    return (start, start + len(words.strip()), role) if words.strip() else None


def _moved(spans: list[_Span], moves: list[tuple[int, int]]) -> list[_Span]:
    """Shift spans of the rendered text to where images' tokens have moved them."""
    shifts = [max(move for move in moves if move[0] <= start)[1] for start, _, _ in spans]
    return [(start + shift, stop + shift, role) for (start, stop, role), shift in zip(spans, shifts, strict=True)]


def _text_segments(offsets: Sequence[tuple[int, int]], spans: list[_Span]) -> list[Segment]:
    found: list[Segment] = []
    for start, stop, role in spans:
        inside = [k for k, (a, b) in enumerate(offsets) if a < stop and b > start and b > a]
        if inside:
            found.append(Text(inside[0], inside[-1] + 1, role))  # type: ignore[arg-type]
    return found
