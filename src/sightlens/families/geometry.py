"""Which rectangle of the original image a processed view shows."""

from __future__ import annotations

from dataclasses import dataclass

from sightlens._types import Box
from sightlens.errors import ImageError

MAX_RESIZED = 64_000_000


@dataclass(frozen=True)
class ImageSteps:
    """What an image processor does to the geometry of an image, in this order: pad to a square, resize, crop the centre.

    Attributes:
        pad: whether the image is first padded to a square.
        resize: ``("short", n)`` keeps the aspect ratio; ``("to", height, width)`` squashes; None leaves the size.
        crop: ``(height, width)`` of the centre that is kept, or None.
    """

    pad: bool
    resize: tuple[str, int] | tuple[str, int, int] | None
    crop: tuple[int, int] | None

    def shown_box(self, size: tuple[int, int]) -> Box:
        """Return what a view shows, in pixels of the original image; beyond its edges where the image was padded.

        Args:
            size: ``(height, width)`` of the original image.

        Raises:
            ImageError: when keeping the aspect ratio would make an absurdly large picture.
        """
        (top, height), (left, width) = self._canvas(size[0], max(size)), self._canvas(size[1], max(size))
        new_height, new_width = self._resized(height, width)
        crop_height, crop_width = self.crop or (new_height, new_width)
        x, y = (new_width - crop_width) // 2, (new_height - crop_height) // 2
        return (
            x * width / new_width - left,
            y * height / new_height - top,
            (x + crop_width) * width / new_width - left,
            (y + crop_height) * height / new_height - top,
        )

    def _canvas(self, side: int, longest: int) -> tuple[int, int]:
        return ((longest - side) // 2, longest) if self.pad else (0, side)

    def _resized(self, height: int, width: int) -> tuple[int, int]:
        if self.resize is None:
            return height, width
        if len(self.resize) == 3:
            return self.resize[1], self.resize[2]
        short, long = min(height, width), max(height, width)
        target = self.resize[1]
        stretched = int(target * long / short)
        if target * stretched > MAX_RESIZED:
            raise ImageError(
                "an image whose sides differ by less than a factor of "
                f"{MAX_RESIZED // target**2} (its short side is scaled to {target} pixels)",
                f"{width}×{height}",
                'Use image_mode="pad", or crop the image.',
            )
        return (target, stretched) if height <= width else (stretched, target)
