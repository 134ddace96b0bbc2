"""What a model family has to say about itself; everything else is shared."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from itertools import chain
from typing import Any, ClassVar

import numpy as np
import torch
from jaxtyping import Bool, Float
from PIL import Image
from torch import Tensor
from transformers import PreTrainedConfig

from sightlens.errors import FamilyError, listing
from sightlens.families.images import MAX_PIXELS
from sightlens.families.sites import Site
from sightlens.layout import Layout, View
from sightlens.metrics import BoxFormat

MOST_TILES = 128  # the grids of so many tiles are all looked at, for every picture; published models use 12


@dataclass(frozen=True)
class ImageOptions:
    """Choices a user may make about how an image becomes views; None leaves the checkpoint's own.

    Attributes:
        image_mode: LLaVA: ``"pad"`` to a square as the original code and the localization paper (arXiv 2605.19792) do, or
            ``"crop"`` the centre as the converted checkpoints do.
        max_tiles: InternVL: the largest number of tiles, 12 in the published processor, 6 in the localization paper.
            Gemma-3: the largest number of pan-and-scan crops.
        min_pixels: Qwen-VL: a picture is scaled up to at least this area.
        max_pixels: Qwen-VL: a picture is scaled down to at most this area.
        pan_and_scan: Gemma-3: whether elongated pictures get crops beside the whole; off in the published processor.
    """

    image_mode: str | None = None
    max_tiles: int | None = None
    min_pixels: int | None = None
    max_pixels: int | None = None
    pan_and_scan: bool | None = None

    def __post_init__(self) -> None:
        """Refuse values that are not of the field's type, and numbers out of range.

        Raises:
            FamilyError: naming the field.
        """
        for name, most in (("max_tiles", MOST_TILES), ("min_pixels", MAX_PIXELS), ("max_pixels", MAX_PIXELS)):
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int | np.integer) or not 1 <= value <= most):
                raise FamilyError(f"{name} >= 1 and <= {most:,}, a whole number", repr(value), "None leaves the checkpoint's own.")
        if not isinstance(self.image_mode, str | None):
            raise FamilyError("the name of an image mode", repr(self.image_mode), "None leaves the checkpoint's own.")
        if not isinstance(self.pan_and_scan, bool | None):
            raise FamilyError("pan_and_scan True or False", repr(self.pan_and_scan), "None leaves the checkpoint's own.")


@dataclass(frozen=True)
class Cells:
    """A run of visual tokens: the cells ``first, first + 1, …`` of one view, counted in raster order."""

    view: int
    first: int
    count: int


@dataclass(frozen=True)
class Mark:
    """A separator; without a token of its own it stands on a further image placeholder, as newline vectors do."""

    name: str
    token: str | None = None


@dataclass(frozen=True)
class Words:
    """Text that the processor writes into an image's span."""

    text: str


Part = Cells | Mark | Words


@dataclass(frozen=True)
class ViewedImage:
    """One image as the model sees it.

    Attributes:
        pixels: what the tower takes, ``[crop, channel, height, width]`` or ``[patch, pixel]``, normalised.
        views: what the visual tokens show; a crop of which the model drops every token has no view.
        span: what stands in the sequence for this image, in order.
        extras: further tensors that the model takes, one row for this image.
        features: the projector output that each visual token carries, view by view in raster order, among those of this
            image; -1 for a token that blends several. None when they are the same in number and order.
        rows: projector outputs of this image, where ``features`` is given.
    """

    pixels: Float[Tensor, "row *rest"]
    views: tuple[View, ...]
    span: tuple[Part, ...]
    extras: Mapping[str, Tensor] = field(default_factory=dict)
    features: tuple[int, ...] | None = None
    rows: int = 0

    @property
    def feature_rows(self) -> int:
        """Projector outputs of this image."""
        return sum(view.count for view in self.views) if self.features is None else self.rows


@dataclass(frozen=True)
class Place:
    """Which image of a prompt is being viewed, and by which model.

    Attributes:
        index: of the image, from 0.
        count: images in the prompt.
        grid: visual tokens per view.
        config: of the model.
    """

    index: int
    count: int
    grid: Grid
    config: PreTrainedConfig


def in_order(views: Sequence[View], *, opening: Sequence[str] = (), closing: Sequence[str] = ()) -> tuple[Part, ...]:
    """Return the span of an image whose views follow each other without a break, between delimiters."""
    cells = [Cells(index, 0, view.count) for index, view in enumerate(views)]
    return (*(Mark("start", token) for token in opening), *cells, *(Mark("end", token) for token in closing))


class Family(ABC):
    """A family of vision-language models with one layout rule and one set of hook names."""

    name: ClassVar[str]
    model_type: ClassVar[str]
    """HF's ``config.model_type``."""
    architecture: ClassVar[str]
    """HF's model class."""
    template_image: ClassVar[str]
    """What a chat template writes where an image goes."""
    image_token: ClassVar[str | None] = None
    """What stands at visual positions, where that is something else."""
    options: ClassVar[frozenset[str]] = frozenset()
    """The fields of :class:`ImageOptions` that mean something to this family."""
    images: ClassVar[bool] = True
    """Whether the family takes pictures."""
    bidirectional_images: ClassVar[bool] = False
    """Whether visual tokens of one image attend to later ones, so that none may be recomputed without the whole block."""

    @abstractmethod
    def check_config(self, config: PreTrainedConfig) -> None:
        """Refuse a configuration whose layout this family does not know.

        Raises:
            FamilyError: naming the field.
        """

    @abstractmethod
    def sites(self, config: PreTrainedConfig) -> tuple[Site, ...]:
        """List every hook name this configuration offers."""

    @abstractmethod
    def view_image(self, image: Image.Image, processor: Any, options: ImageOptions, *, place: Place) -> ViewedImage:
        """Cut one RGB image into views as HF's own processor does, and say what each shows.

        Args:
            image: RGB picture.
            processor: HF's image processor.
            options: the user's choices.
            place: which image of the prompt this is, and the model.
        """

    @abstractmethod
    def token_grid(self, config: PreTrainedConfig) -> Grid:
        """Return the rows and columns of projector outputs that one view becomes, 0 × 0 when the picture decides."""

    @abstractmethod
    def box_format(self, processor: Any) -> BoxFormat:
        """Return how this family's published checkpoints write boxes, with this image processor."""

    def image_token_id(self, config: PreTrainedConfig) -> int | None:
        """Return the id at visual positions, None for a family without pictures."""
        return config.image_token_id

    def check_processor(self, config: PreTrainedConfig, processor: Any) -> None:  # noqa: B027 - not every family has to
        """Refuse an image processor that cuts images otherwise than the model expects; most have nothing to compare.

        Raises:
            FamilyError: naming the field.
        """

    def reinjections(self, config: PreTrainedConfig) -> int:
        """Return after how many early decoder layers the model adds visual features again."""
        return 0

    def tower_windows(self, config: PreTrainedConfig) -> tuple[int, int]:
        """Return how many layers of the tower attend inside windows, and how many visual tokens a side of those has."""
        return 0, 0

    def image_tensors(self, examples: Sequence[Sequence[ViewedImage]]) -> dict[str, Tensor]:
        """Return what the model takes for the pictures of a batch, at least one, image after image."""
        images = list(chain.from_iterable(examples))
        parts = [{"pixel_values": image.pixels, **image.extras} for image in images]
        return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}

    def image_rows(self, tensors: Mapping[str, Tensor], layouts: Sequence[Layout]) -> dict[str, list[int]]:
        """Return how many rows of each tensor that :meth:`image_tensors` makes belong to each example of a batch."""
        images = [len(layout.structure.image_sizes) for layout in layouts]
        return {**dict.fromkeys(tensors, images), "pixel_values": [len(layout.views) for layout in layouts]}

    def token_tensors(self, tensors: dict[str, Tensor], layouts: Sequence[Layout]) -> dict[str, Tensor]:
        """Return ``input_ids``, ``attention_mask``, ``position_ids`` and whatever else the model takes per position."""
        return tensors

    def check_options(self, options: ImageOptions) -> None:
        """Refuse an option that would have no effect here."""
        for option in fields(options):
            if getattr(options, option.name) is not None and option.name not in self.options:
                raise FamilyError(
                    f"options that {self.name} knows ({listing(sorted(self.options)) or 'none'})", f"{option.name}=", "Leave it out."
                )


@dataclass(frozen=True)
class Grid:
    """Rows and columns of visual tokens in a view, and patches per side merged into each token."""

    rows: int
    columns: int
    merge: int = 1

    @property
    def count(self) -> int:
        """Visual tokens per view."""
        return self.rows * self.columns


def visual_mask(layouts: Sequence[Layout]) -> Bool[Tensor, "batch position"]:
    """Return which positions of equally long layouts are visual tokens."""
    return torch.stack([torch.as_tensor(layout.structure.visual.copy()) for layout in layouts])


def require_values(config: PreTrainedConfig, field: str, allowed: Sequence[Any]) -> None:
    """Refuse a configuration field with a value that no test covers.

    Raises:
        FamilyError: naming the field, its value and the known ones.
    """
    value = getattr(config, field)
    if value not in allowed:
        raise FamilyError(
            f"{field} in {list(allowed)} for model type {config.model_type!r}",
            repr(value),
            "This configuration changes the layout; open an issue.",
        )
