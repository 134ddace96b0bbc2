"""What a model family has to say about itself; everything else is shared."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from jaxtyping import Float
from PIL import Image
from torch import Tensor
from transformers import PreTrainedConfig

from sightlens.errors import FamilyError, listing
from sightlens.families.sites import Site
from sightlens.layout import View
from sightlens.metrics import BoxFormat


@dataclass(frozen=True)
class ImageOptions:
    """Choices a user may make about how an image becomes views; None leaves the checkpoint's own.

    Attributes:
        image_mode: LLaVA: ``"pad"`` to a square as the original code and the localization paper (arXiv 2605.19792) do, or
            ``"crop"`` the centre as the converted checkpoints do.
        max_tiles: InternVL: the largest number of tiles, 12 in the published processor, 6 in the localization paper.
    """

    image_mode: str | None = None
    max_tiles: int | None = None


@dataclass(frozen=True)
class ViewedImage:
    """One image as the model sees it.

    Attributes:
        pixels: one crop per view, ``[view, channel, height, width]``, normalised.
        views: what each crop shows, in the order of the sequence.
        opening: tokens before the visual tokens, each one separator.
        closing: tokens after them.
    """

    pixels: Float[Tensor, "view channel height width"]
    views: tuple[View, ...]
    opening: tuple[str, ...] = ()
    closing: tuple[str, ...] = ()


class Family(ABC):
    """A family of vision-language models with one layout rule and one set of hook names."""

    name: ClassVar[str]
    model_type: ClassVar[str]
    """HF's ``config.model_type``."""
    architecture: ClassVar[str]
    """HF's model class."""
    template_image: ClassVar[str]
    """What a chat template writes where an image goes."""
    options: ClassVar[frozenset[str]] = frozenset()
    """The fields of :class:`ImageOptions` that mean something to this family."""

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
    def view_image(self, image: Image.Image, processor: Any, options: ImageOptions, *, index: int, grid: Grid) -> ViewedImage:
        """Cut one RGB image into views as HF's own processor does, and say what each shows.

        Args:
            image: RGB picture.
            processor: HF's image processor.
            options: the user's choices.
            index: which image of the prompt this is.
            grid: visual tokens per view, and patches per token.
        """

    @abstractmethod
    def token_grid(self, config: PreTrainedConfig) -> Grid:
        """Return the rows and columns of visual tokens that one view becomes."""

    @abstractmethod
    def box_format(self, *, padded: bool) -> BoxFormat:
        """Return how this family's published checkpoints write boxes."""

    def check_options(self, options: ImageOptions) -> None:
        """Refuse an option that would have no effect here."""
        for field in ("image_mode", "max_tiles"):
            if getattr(options, field) is not None and field not in self.options:
                raise FamilyError(
                    f"options that {self.name} knows ({listing(sorted(self.options)) or 'none'})", f"{field}=", "Leave it out."
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
