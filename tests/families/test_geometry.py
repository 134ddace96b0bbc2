"""Boxes and tile counts against closed forms, and against marks drawn into the picture."""

from __future__ import annotations

import numpy as np
import pytest
from PIL import Image
from tests.conftest import hooked, picture
from tests.tiny import VARIANTS
from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil
from transformers.models.llava.image_processing_pil_llava import LlavaImageProcessorPil

from sightlens.errors import ImageError
from sightlens.families import ImageOptions
from sightlens.families.family import Place
from sightlens.families.geometry import ImageSteps

LLAVA, INTERNVL = VARIANTS[0], VARIANTS[4]
QUESTION = "what colour is the circle ?"


def test_boxes_of_the_published_llava_sizes() -> None:
    """Section B1 of the method notes: 480×640 gets bands of 42 of 336 pixels, or loses 80 pixels left and right."""
    pad = ImageSteps(pad=True, resize=("short", 336), crop=(336, 336))
    crop = ImageSteps(pad=False, resize=("short", 336), crop=(336, 336))
    assert pad.shown_box((480, 640)) == (0, -80, 640, 560)
    assert pad.shown_box((640, 480)) == (-80, 0, 560, 640)
    assert pad.shown_box((5, 8)) == (0, -1, 8, 7)  # three rows are missing: one above, two below
    assert crop.shown_box((480, 640)) == (80, 0, 560, 480)
    assert crop.shown_box((640, 480)) == (0, 80, 480, 560)
    assert ImageSteps(pad=False, resize=("to", 384, 384), crop=None).shown_box((480, 640)) == (0, 0, 640, 480)
    assert ImageSteps(pad=False, resize=None, crop=(100, 100)).shown_box((480, 640)) == (270, 190, 370, 290)
    processor = LlavaImageProcessorPil(
        size={"shortest_edge": 336}, crop_size={"height": 336, "width": 336}, do_pad=True, do_normalize=False
    )
    white = processor(images=[Image.new("RGB", (640, 480), "white")], return_tensors="pt")["pixel_values"][0]
    rows = (white.amin(dim=(0, 2)) > 0.99).nonzero().flatten()
    assert 42 <= rows.min() <= 44
    assert 291 <= rows.max() <= 293


@pytest.mark.parametrize(
    ("size", "most", "views"),
    [
        ((480, 640), 6, 7),
        ((427, 640), 6, 7),
        ((500, 375), 6, 7),
        ((1000, 1000), 6, 5),
        ((1000, 1000), 12, 10),
        ((448, 448), 12, 1),
        ((300, 300), 6, 1),
        ((640, 640), 6, 5),
        ((620, 620), 6, 1),
        ((448, 5376), 12, 13),
        ((1, 5000), 12, 13),
        ((5000, 1), 6, 7),
        ((480, 640), 12, 13),
    ],
)
def test_tiles_of_the_published_internvl_sizes(size: tuple[int, int], most: int, views: int) -> None:
    """Section B2 of the method notes, on the real view size of 448 pixels."""
    processing = hooked(INTERNVL).processing
    family, place = processing.family, Place(0, 1, processing.grid, processing.config)
    processor = GotOcr2ImageProcessorPil(size={"height": 448, "width": 448}, crop_to_patches=True)
    made = family.view_image(Image.fromarray(picture(*size)), processor, ImageOptions(max_tiles=most), place=place)
    assert len(made.views) == len(made.pixels) == views


@pytest.mark.parametrize("mode", ["pad", "crop"])
@pytest.mark.parametrize("size", [(48, 64), (64, 48), (40, 41), (32, 96)], ids=str)
def test_a_mark_shows_up_in_the_cell_whose_box_holds_it(size: tuple[int, int], mode: str) -> None:
    model = hooked(LLAVA)
    options = ImageOptions(image_mode=mode)
    blank = np.full((*size, 3), 90, dtype=np.uint8)
    layout = model.prepare(blank, QUESTION, options=options).layout
    before = model.prepare(blank, QUESTION, options=options).tensors["pixel_values"][0]
    for row in layout.visual_tokens():
        x0, y0, x1, y1 = row["box"]
        if x0 < 0 or y0 < 0 or x1 > size[1] or y1 > size[0]:
            continue
        marked = blank.copy()
        marked[
            int(np.ceil(y0 + 0.3 * (y1 - y0))) : int(y0 + 0.8 * (y1 - y0)) + 1,
            int(np.ceil(x0 + 0.3 * (x1 - x0))) : int(x0 + 0.8 * (x1 - x0)) + 1,
        ] = 255
        moved = (model.prepare(marked, QUESTION, options=options).tensors["pixel_values"][0] - before).abs().sum(0)
        cells = moved.unflatten(0, (4, 8)).unflatten(2, (4, 8)).sum(dim=(1, 3))
        assert divmod(int(cells.argmax()), 4) == (row["row"], row["column"])


def test_thin_strips_that_crop_mode_cannot_show() -> None:
    with pytest.raises(ImageError, match='image_mode="pad"'):
        hooked(LLAVA).prepare(picture(1, 70_000), QUESTION, options=ImageOptions(image_mode="crop"))
