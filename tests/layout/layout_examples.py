"""Layouts that the tests of this folder share: one per way in which processors arrange visual tokens."""

from __future__ import annotations

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st

from sightlens.layout import Layout, Special, Text, TokenSet, View, build_layout, mark_ids

quick = settings(max_examples=30, deadline=None)
"""Enough examples to find what breaks, on a machine that others use too."""

BOS, IMAGE, START, END, NEWLINE, WORD = 1, 9, 5, 6, 7, 2


def square_layout(grid: int = 8, *, size: tuple[int, int] = (480, 640)) -> Layout:
    """LLaVA: one view padded to a square, between texts."""
    height, width = size
    left, top = max(height - width, 0) // 2, max(width - height, 0) // 2
    box = (-left, -top, width + left, height + top)
    ids = [BOS, *[WORD] * 4, *[IMAGE] * grid**2, *[WORD] * 9]
    return build_layout(
        [f"t{token}" for token in ids],
        visual=np.flatnonzero(np.array(ids) == IMAGE),
        views=[View("global", 0, (grid, grid), box)],
        image_sizes=[size],
        known=[*mark_ids(ids, specials={BOS: "bos"}), Text(6 + grid**2, 9 + grid**2, "question")],
    )


def tiled_views(tiles: tuple[int, int], side: int, *, size: tuple[int, int], image: int = 0) -> list[View]:
    """InternVL: row-major tiles of the whole image, then the thumbnail."""
    (rows, columns), (height, width) = tiles, size
    cuts = [
        ((r, c), (c * width / columns, r * height / rows, (c + 1) * width / columns, (r + 1) * height / rows))
        for r in range(rows)
        for c in range(columns)
    ]
    views = [View("tile", image, (side, side), box, tile=tile, merge=2) for tile, box in cuts]
    return [*views, View("global", image, (side, side), (0, 0, width, height), merge=2)]


def tiled_layout(tiles: tuple[int, int] = (2, 3), side: int = 4, *, size: tuple[int, int] = (480, 640)) -> Layout:
    """InternVL: tiles and thumbnail between one pair of separators."""
    views = tiled_views(tiles, side, size=size)
    count = sum(view.count for view in views)
    ids = [*[WORD] * 3, START, *[IMAGE] * count, END, *[WORD] * 9]
    return build_layout(
        [{START: "<img>", END: "</img>"}.get(token, f"t{token}") for token in ids],
        visual=np.flatnonzero(np.array(ids) == IMAGE),
        views=views,
        image_sizes=[size],
        known=[*mark_ids(ids, separators={START: "start", END: "end"}), Text(0, 3, "system")],
    )


def newline_layout() -> Layout:
    """LLaVA-NeXT: the base view, then two tiles side by side whose rows alternate, a newline after each."""
    views = [View("global", 0, (2, 2), (0, 0, 40, 20))]
    views += [View("tile", 0, (2, 3), (20 * c, 0, 20 * c + 20, 20), tile=(0, c)) for c in range(2)]
    ids = [BOS, *[IMAGE] * 4, *[*[IMAGE] * 6, NEWLINE] * 2, WORD, WORD]
    placeholders = np.flatnonzero(np.array(ids) == IMAGE)
    rows = placeholders[4:].reshape(2, 2, 3)
    return build_layout(
        [f"<{token}>" for token in ids],
        visual=np.concatenate([placeholders[:4], rows[:, 0].ravel(), rows[:, 1].ravel()]),
        views=views,
        image_sizes=[(20, 40)],
        known=mark_ids(ids, specials={BOS: "bos"}, separators={NEWLINE: "newline"}),
    )


def two_images_layout() -> Layout:
    """Two images of different grids with a word between them."""
    views = [View("global", 0, (2, 3), (0, 0, 30, 20)), View("global", 1, (3, 2), (0, 0, 20, 30))]
    return build_layout(
        ["w", *["i"] * 6, "w", *["i"] * 6, "w"],
        visual=[*range(1, 7), *range(8, 14)],
        views=views,
        image_sizes=[(20, 30), (30, 20)],
    )


def text_layout() -> Layout:
    """A sequence without image."""
    return build_layout(["<s>", "a", "b"], known=[Special(0, 1, "bos"), Text(1, 2, "question")])


LAYOUTS = {
    "square": square_layout(5),
    "tiled": tiled_layout((2, 3), 2),
    "newline": newline_layout(),
    "two images": two_images_layout(),
    "text": text_layout(),
    "padded": tiled_layout((1, 2), 3).pad(left=3),
    "answered": square_layout(4).with_answer(["yes", "!"]).pad(left=1, right=2),
}

layouts = st.sampled_from(list(LAYOUTS.values()))
image_layouts = st.sampled_from([layout for layout in LAYOUTS.values() if layout.views])


def any_set(data: st.DataObject, layout: Layout) -> TokenSet:
    """Any set of a layout, with or without generated positions."""
    chosen = _drawn(data, layout, np.flatnonzero(layout.structure.attended))
    return ~chosen if data.draw(st.booleans()) else chosen


def any_visual_set(data: st.DataObject, layout: Layout) -> TokenSet:
    """Any set of a layout's visual tokens."""
    return _drawn(data, layout, np.flatnonzero(layout.structure.visual))


def _drawn(data: st.DataObject, layout: Layout, pool: np.ndarray) -> TokenSet:
    flags = data.draw(st.lists(st.booleans(), min_size=len(pool), max_size=len(pool)))
    return layout.at(pool[np.array(flags, dtype=bool)])
