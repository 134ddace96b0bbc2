"""From images and texts to prompts: what HF's own processor makes, without needing torchvision, and with a layout."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal

import numpy as np
import torch
from PIL import Image
from transformers import PreTrainedConfig

from sightlens.errors import PromptError
from sightlens.families.family import Cells, Family, Grid, ImageOptions, Mark, Part, Place, ViewedImage
from sightlens.families.family import Words as Written
from sightlens.families.images import ImageLike, open_image
from sightlens.families.items import ItemList, Span, mark_text
from sightlens.families.prompt import PER_POSITION, Origin, Prompt
from sightlens.families.span import locate_parts
from sightlens.layout import Layout, Segment, build_layout, mark_ids
from sightlens.metrics import BoxFormat

Template = Literal["chat", "raw"]
Images = ImageLike | Sequence[ImageLike] | None
Words = str | ItemList
MARK = "\ue000"
"""A private-use character that stands for a message while its place in a chat template is looked up."""


@dataclass(frozen=True)
class _Example:
    """One example before padding."""

    ids: list[int]
    layout: Layout
    viewed: tuple[ViewedImage, ...]
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
        return self.tokenizer.convert_ids_to_tokens(self.family.image_token_id(self.config))

    @property
    def box_format(self) -> BoxFormat:
        """How the family's published checkpoints write boxes."""
        return self.family.box_format(self.image_processor)

    @property
    def grid(self) -> Grid:
        """Visual tokens per view."""
        return self.family.token_grid(self.config)

    @cached_property
    def origin(self) -> Origin:
        """What prompts for this checkpoint can be told by."""
        vocabulary = json.dumps(sorted(self.tokenizer.get_vocab().items(), key=lambda entry: entry[1])).encode()
        return Origin(self.family.name, hashlib.sha256(vocabulary).hexdigest(), (self.grid.rows, self.grid.columns, self.grid.merge))

    def prepare(
        self, images: Images | Sequence[Images], texts: Words | Sequence[Words], *, wording: Wording, options: ImageOptions
    ) -> Prompt:
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
        if not isinstance(options, ImageOptions):
            raise PromptError("options as ImageOptions(…)", type(options).__name__, "Write options=sl.ImageOptions(max_tiles=6), say.")
        self.family.check_options(options)
        groups = _pair_up(images, texts)
        examples = [self._example(group, text, wording, options=options) for group, text in groups]
        return replace(self._batch(examples), options=options)

    def select(self, prompt: Prompt, examples: Sequence[int]) -> Prompt:
        """Return a prompt of some examples of another, in this order; one may come several times, and padding stays.

        Args:
            prompt: prepared here.
            examples: indices of its examples, at least one.
        """
        layouts, index = [prompt.layouts[k] for k in examples], torch.tensor(list(examples))
        images = {name: tensor for name, tensor in prompt.tensors.items() if name not in PER_POSITION}
        tensors = {name: tensor[..., index.to(tensor.device), :] for name, tensor in prompt.tensors.items() if name in PER_POSITION}
        if images and any(layout.views for layout in layouts):
            rows = self.family.image_rows(images, prompt.layouts)
            for name, tensor in images.items():
                parts = tensor.split(rows[name])
                tensors[name] = torch.cat([parts[k] for k in examples])
        chosen = {"images": tuple(prompt.images[k] for k in examples), "texts": tuple(prompt.texts[k] for k in examples)}
        return replace(prompt, tensors=tensors, layouts=tuple(layouts), **chosen)

    def _example(self, group: Sequence[ImageLike], words: Words, wording: Wording, *, options: ImageOptions) -> _Example:
        if group and not self.family.images:
            raise PromptError(f"no images: {self.family.name} reads text alone", f"{len(group)}", "Give None for the images.")
        text = words.text if isinstance(words, ItemList) else words
        pictures = tuple(open_image(image) for image in group)
        places = [Place(k, len(pictures), self.grid, self.config) for k in range(len(pictures))]
        viewed = [
            self.family.view_image(picture, self.image_processor, options, place=place)
            for picture, place in zip(pictures, places, strict=True)
        ]
        rendered = self._render(text, wording, images=len(pictures))
        spans = self._spans(rendered, text, wording, images=len(pictures))
        if isinstance(words, ItemList):
            spans = _listed(words, spans, raw=wording.template == "raw")
        expanded, moves = self._expand(rendered, viewed)
        encoded = self._encode(expanded)
        segments = mark_text(encoded["offset_mapping"], expanded, _moved(spans, moves))
        layout = self._layout(encoded["input_ids"], viewed, segments=segments, sizes=[(p.height, p.width) for p in pictures])
        return _Example(encoded["input_ids"], layout, tuple(viewed), pictures, rendered)

    def _render(self, text: str, wording: Wording, *, images: int) -> str:
        if wording.template not in ("chat", "raw"):
            raise PromptError("template 'chat' or 'raw'", repr(wording.template), "Leave it out for the chat template.")
        placeholder = self.family.template_image
        if wording.template == "raw":
            if wording.system is not None:
                raise PromptError("no system message in a raw text", repr(wording.system), "Write it into the text.")
            if self.family.images and text.count(placeholder) != images:
                raise PromptError(
                    f"{images} times {placeholder!r} in a raw text with {images} images",
                    f"{text.count(placeholder)}",
                    "Write one per image.",
                )
            return text
        if self.family.images and placeholder in text:
            raise PromptError(
                f"a text without {placeholder!r} for the chat template", repr(text[:80]), "Use template='raw' to place images yourself."
            )
        if self.tokenizer.chat_template is None:
            raise PromptError("a checkpoint with a chat template", "none", f"Use template='raw', with {placeholder!r} where an image goes.")
        rendered = self._fill(text, wording.system, images=images)
        if self.family.images and rendered.count(placeholder) != images:
            raise PromptError(f"a chat template that writes {placeholder!r} once per image", repr(rendered[:120]), "Use template='raw'.")
        return rendered

    def _fill(self, text: str, system: str | None, *, images: int) -> str:
        content, message = [{"type": "image"}] * images + [{"type": "text", "text": text}], system and [{"type": "text", "text": system}]
        if not self.family.images:  # templates of language models take plain strings
            content, message = text, system
        before = [] if system is None else [{"role": "system", "content": message}]
        return self.tokenizer.apply_chat_template(
            [*before, {"role": "user", "content": content}], tokenize=False, add_generation_prompt=True
        )

    def _spans(self, rendered: str, text: str, wording: Wording, *, images: int) -> list[Span]:
        """Return the character spans of the question and the system message in the rendered chat."""
        if wording.template == "raw":
            return []
        marked = [("question", self._fill(MARK, wording.system, images=images))]
        if wording.system is not None:
            marked.append(("system", self._fill(text, MARK, images=images)))
        return [span for role, filled in marked if (span := _difference(rendered, filled, role)) is not None]

    def _expand(self, rendered: str, viewed: Sequence[ViewedImage]) -> tuple[str, list[tuple[int, int]]]:
        """Replace each placeholder by an image's tokens, and return where the text moved: ``(place in rendered, shift)``."""
        if not viewed:
            return rendered, [(0, 0)]
        parts, moves, shift, last = [], [(0, 0)], 0, 0
        for match, view in zip(re.finditer(re.escape(self.family.template_image), rendered), viewed, strict=True):
            span = "".join(self._written(part) for part in view.span)
            parts += [rendered[last : match.start()], span]
            shift += len(span) - len(match.group())
            last = match.end()
            moves.append((last, shift))
        return "".join([*parts, rendered[last:]]), moves

    def _written(self, part: Part) -> str:
        match part:
            case Cells(count=count):
                return self.image_token * count
            case Mark(token=token):
                return self.image_token if token is None else token
            case Written(text=text):
                return text

    def _encode(self, text: str) -> Mapping[str, Any]:
        bos = self.tokenizer.bos_token
        has_bos = bos is not None and text.startswith(bos)
        encoded = self.tokenizer(text, return_offsets_mapping=True, add_special_tokens=not has_bos)
        limit = self.config.get_text_config().max_position_embeddings
        if len(encoded["input_ids"]) > limit:
            raise PromptError(
                f"at most {limit} positions", f"{len(encoded['input_ids'])}", "Use fewer tiles, fewer images or a shorter text."
            )
        return encoded

    def _layout(
        self, tokens: Sequence[int], viewed: Sequence[ViewedImage], *, segments: list[Segment], sizes: list[tuple[int, int]]
    ) -> Layout:
        ids = np.asarray(tokens)
        places = np.flatnonzero(ids == self.family.image_token_id(self.config)) if self.family.images else np.zeros(0, dtype=np.int64)
        found = locate_parts(places, viewed)
        taken = {segment.start for segment in found.separators} | set(places.tolist())
        specials = [segment for segment in mark_ids(ids, specials=self._special_names()) if segment.start not in taken]
        layout = build_layout(
            self.tokenizer.convert_ids_to_tokens(ids.tolist()),
            visual=found.visual,
            views=[view for image in viewed for view in image.views],
            image_sizes=sizes,
            known=[*found.separators, *specials, *segments],
        )
        return replace(layout, structure=replace(layout.structure, features=found.features))

    def _special_names(self) -> dict[int, str]:
        tokens = self.tokenizer
        names = {index: str(token).strip("<|>/[]") for index, token in zip(tokens.all_special_ids, tokens.all_special_tokens, strict=True)}
        known = {tokens.bos_token_id: "bos", tokens.eos_token_id: "eos", tokens.pad_token_id: "pad"}
        names.update({index: name for index, name in known.items() if index is not None})
        names.pop(self.family.image_token_id(self.config), None)
        names.pop(tokens.unk_token_id, None)  # an unknown word is part of the text it stands in
        return names

    def _batch(self, examples: Sequence[_Example]) -> Prompt:
        longest = max(len(example.ids) for example in examples)
        pad = self.tokenizer.pad_token_id if self.tokenizer.pad_token_id is not None else (self.tokenizer.eos_token_id or 0)
        ids = torch.tensor([[pad] * (longest - len(example.ids)) + example.ids for example in examples])
        mask = torch.tensor([[0] * (longest - len(example.ids)) + [1] * len(example.ids) for example in examples])
        layouts = tuple(example.layout.pad(left=longest - len(example.ids)) for example in examples)
        tensors = {"input_ids": ids, "attention_mask": mask, "position_ids": (mask.cumsum(1) - 1).clamp(min=0)}
        tensors = self.family.token_tensors(tensors, layouts)
        if any(example.viewed for example in examples):
            tensors |= self.family.image_tensors([example.viewed for example in examples])
        return Prompt(tensors, layouts, tuple(e.images for e in examples), tuple(e.text for e in examples), self.origin)


def _pair_up(images: Any, texts: Words | Sequence[Words]) -> list[tuple[list[ImageLike], Words]]:
    if isinstance(texts, (str, ItemList)):
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


def _listed(words: ItemList, spans: list[Span], *, raw: bool) -> list[Span]:
    """Put what a list's own text consists of in place of the user's words as a whole."""
    start = 0 if raw else next(span[0] for span in spans if span[2] == "question")
    inner = [(start + first, start + stop, what) for first, stop, what in words.spans()]
    return [*inner, *(span for span in spans if span[2] != "question")]


def _difference(rendered: str, filled: str, role: str) -> Span | None:
    """Return where a rendered chat differs from the same chat with the mark instead of one message, spaces around it left out."""
    before, found, after = filled.partition(MARK)
    stop = len(rendered) - len(after)
    if not found or not rendered.startswith(before) or not rendered.endswith(after) or stop <= len(before):
        return None
    words = rendered[len(before) : stop]
    start = len(before) + len(words) - len(words.lstrip())
    return (start, start + len(words.strip()), role) if words.strip() else None


def _moved(spans: list[Span], moves: list[tuple[int, int]]) -> list[Span]:
    """Shift spans of the rendered text to where images' tokens have moved them."""
    shifts = [max(move for move in moves if move[0] <= start)[1] for start, _, _ in spans]
    return [(start + shift, stop + shift, role) for (start, stop, role), shift in zip(spans, shifts, strict=True)]
