"""Whatever a user calls an image becomes the RGB picture a person would see, or is refused with a reason."""

from __future__ import annotations

import struct
import zlib
from io import BytesIO
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from tests.conftest import hooked
from tests.tiny import VARIANTS

from sightlens.errors import ImageError
from sightlens.families import ImageOptions, open_image
from sightlens.families.geometry import ImageSteps

RED, WHITE, BLACK = (255, 0, 0), (255, 255, 255), (0, 0, 0)


def encoded(image: Image.Image, format: str = "PNG", **options: object) -> bytes:
    """The bytes of an image file."""
    buffer = BytesIO()
    image.save(buffer, format, **options)
    return buffer.getvalue()


def noise(height: int = 5, width: int = 7, channels: int = 3, dtype: type = np.uint8) -> np.ndarray:
    """Random pixels."""
    shape = (height, width, channels) if channels else (height, width)
    return np.random.default_rng(0).integers(0, np.iinfo(dtype).max + 1, shape, dtype=dtype)


def seen(source: object) -> np.ndarray:
    """The opened picture's pixels."""
    image = open_image(source)
    assert image.mode == "RGB"
    return np.asarray(image)


@pytest.mark.parametrize("make", [lambda path: path, str, lambda path: path.read_bytes(), Image.open], ids=["Path", "str", "bytes", "PIL"])
def test_every_source_is_the_same_picture(tmp_path: Path, make: object) -> None:
    pixels = noise()
    (tmp_path / "a.png").write_bytes(encoded(Image.fromarray(pixels)))
    assert (seen(make(tmp_path / "a.png")) == pixels).all()
    assert (seen(pixels) == pixels).all()


@pytest.mark.parametrize(
    ("orientation", "turn"),
    [
        (2, lambda a: a[:, ::-1]),
        (3, lambda a: a[::-1, ::-1]),
        (4, lambda a: a[::-1]),
        (5, lambda a: a.transpose(1, 0, 2)),
        (6, lambda a: np.rot90(a, -1)),
        (7, lambda a: np.rot90(a.transpose(1, 0, 2), 2)),
        (8, lambda a: np.rot90(a, 1)),
    ],
)
def test_orientation_is_applied(orientation: int, turn: object) -> None:
    pixels = noise()
    exif = Image.Exif()
    exif[0x0112] = orientation
    assert (seen(encoded(Image.fromarray(pixels), exif=exif)) == turn(pixels)).all()


def test_orientation_moves_the_size_that_boxes_are_made_from() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    model = hooked(VARIANTS[0])
    layout = model.prepare(encoded(Image.fromarray(noise(40, 60)), exif=exif), "what ?").layout
    assert layout.image_sizes == ((60, 40),)


def test_palettes() -> None:
    indexed = Image.new("P", (2, 1))
    indexed.putpalette([*RED, *BLACK])
    indexed.putdata([0, 1])
    assert seen(indexed).tolist() == [[list(RED), list(BLACK)]]
    assert seen(encoded(indexed, transparency=1)).tolist() == [[list(RED), list(WHITE)]]
    assert seen(encoded(indexed, "GIF", transparency=1)).tolist() == [[list(RED), list(WHITE)]]


def test_transparent_parts_are_white() -> None:
    layer = np.array([[[255, 0, 0, 255], [255, 0, 0, 0], [0, 0, 0, 128]]], dtype=np.uint8)
    for source in (layer, Image.fromarray(layer), encoded(Image.fromarray(layer))):
        assert seen(source)[0, :2].tolist() == [list(RED), list(WHITE)]
        assert np.ptp(seen(source)[0, 2]) == 0
        assert abs(int(seen(source)[0, 2, 0]) - 127) <= 1
    grey = Image.merge("LA", [Image.new("L", (2, 1), 0), Image.new("L", (2, 1), 0)])
    grey.putpixel((0, 0), (0, 255))
    assert seen(grey).tolist() == [[list(BLACK), list(WHITE)]]
    keyed = encoded(Image.fromarray(np.array([[RED, BLACK]], dtype=np.uint8)), transparency=BLACK)
    assert seen(keyed).tolist() == [[list(RED), list(WHITE)]]
    floats = layer.astype(np.float32) / 255
    assert seen(floats)[0, 1].tolist() == list(WHITE)


def test_other_modes() -> None:
    assert seen(Image.new("CMYK", (1, 1), (0, 255, 255, 0))).tolist() == [[[255, 0, 0]]]
    assert seen(Image.new("1", (1, 1), 1)).tolist() == [[list(WHITE)]]
    assert seen(Image.new("L", (1, 1), 77)).tolist() == [[[77] * 3]]
    assert seen(encoded(Image.new("CMYK", (8, 8), (0, 255, 255, 0)), "JPEG")).shape == (8, 8, 3)
    assert seen(Image.new("YCbCr", (1, 1), (255, 128, 128))).tolist() == [[list(WHITE)]]
    assert seen(Image.new("F", (1, 1), 0.5)).tolist() == [[[128] * 3]]


def test_sixteen_bits_are_scaled_not_clipped() -> None:
    deep = np.array([[0, 257, 32896, 65535]], dtype=np.uint16)
    wanted = [[[level] * 3 for level in (0, 1, 128, 255)]]
    assert seen(deep).tolist() == wanted
    assert seen(encoded(Image.fromarray(deep))).tolist() == wanted
    assert seen(Image.fromarray(deep)).tolist() == wanted
    dark = np.array([[0, 200]], dtype=np.uint16)  # a dark 16-bit picture must not be taken for an 8-bit one
    for source in (dark, Image.fromarray(dark), encoded(Image.fromarray(dark))):
        assert seen(source).max() <= 1
    assert seen(dark.astype(">u2")).max() <= 1
    assert seen(encoded(Image.fromarray(deep), "TIFF")).tolist() == wanted
    assert seen(Image.fromarray(deep.astype(np.int32))).tolist() == wanted


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_floats_are_shares_of_white(dtype: type) -> None:
    assert seen(np.array([[0, 0.5, 1]], dtype=dtype)).tolist() == [[[0] * 3, [128] * 3, [255] * 3]]


def test_bools_and_small_integers() -> None:
    assert seen(np.array([[True, False]])).tolist() == [[list(WHITE), list(BLACK)]]
    assert seen(np.array([[7, 255]], dtype=np.int64)).tolist() == [[[7] * 3, [255] * 3]]
    assert seen(np.array([[7, 255]], dtype=np.int16)).tolist() == [[[7] * 3, [255] * 3]]
    assert (seen(noise(channels=1)) == noise(channels=1)).all()
    assert (seen(noise(channels=0)) == noise(channels=0)[..., None]).all()
    flipped = noise()[::-1, ::-1]
    assert (seen(flipped) == flipped).all()


@pytest.mark.parametrize("size", [(1, 1), (1, 60), (60, 1), (2, 10_000), (10_000, 2)])
def test_thin_pictures_open(size: tuple[int, int]) -> None:
    assert seen(np.zeros((*size, 3), dtype=np.uint8)).shape == (*size, 3)


GOOD = encoded(Image.fromarray(noise(64, 64)))
JPEG = encoded(Image.fromarray(noise(64, 64)), "JPEG")


def _bomb() -> bytes:
    head = struct.pack(">IIBBBBB", 60_000, 60_000, 8, 2, 0, 0, 0)
    chunks = [(b"IHDR", head), (b"IDAT", zlib.compress(b"")), (b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data)) for kind, data in chunks
    )


REFUSED: dict[str, tuple[object, str]] = {
    "truncated png": (GOOD[: len(GOOD) // 2], "complete image"),
    "truncated jpeg": (JPEG[: len(JPEG) // 2], "complete image"),
    "corrupt png": (GOOD[:60] + bytes(40) + GOOD[100:], "decode"),
    "text": (b"where is the red circle?", "image file that Pillow can read"),
    "no bytes": (b"", "image file that Pillow can read"),
    "a bomb": (_bomb(), "pixels"),
    "no such file": ("nowhere/at-all.png", "does not exist"),
    "a folder": (Path(__file__).parent, "image file that Pillow can read"),
    "this very file": (Path(__file__), "image file that Pillow can read"),
    "a nul in the path": ("a\0b.png", "null byte"),
    "NaN": (np.array([[0.5, np.nan]]), "finite"),
    "infinity": (np.array([[0.5, np.inf]]), "finite"),
    "complex": (np.zeros((2, 2), dtype=complex), "real"),
    "text array": (np.array([["a", "b"]]), "numbers"),
    "objects": (np.array([[None, 1]], dtype=object), "numbers"),
    "two channels": (np.zeros((4, 4, 2)), "shape [4, 4, 2]"),
    "channels first": (np.zeros((3, 40, 40)), "channels last"),
    "batch": (np.zeros((1, 4, 4, 3)), "shape [1, 4, 4, 3]"),
    "a row": (np.zeros(4), "shape [4]"),
    "empty": (np.zeros((0, 4, 3)), "shape [0, 4, 3]"),
    "no width": (np.zeros((4, 0)), "shape [4, 0]"),
    "floats to 255": (np.array([[0.0, 255.0]]), "between 0 and 1"),
    "negative floats": (np.array([[-0.5, 0.5]]), "between 0 and 1"),
    "negative integers": (np.array([[-1, 5]]), "8 or 16 bits"),
    "wide integers": (np.array([[0, 70_000]]), "8 or 16 bits"),
    "float picture to 255": (Image.new("F", (2, 2), 200.0), "between 0 and 1"),
    "no pixels": (Image.new("RGB", (0, 4)), "at least one pixel"),
    "a number": (7, "an image"),
    "nothing": (None, "an image"),
    "a list": ([[0, 1]], "an image"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_refused_with_a_reason(what: str) -> None:
    source, reason = REFUSED[what]
    opener = getattr(open_image, "__wrapped__", open_image)  # without the tests' own type check
    with pytest.raises(ImageError) as caught:
        opener(source)
    assert reason in str(caught.value)
    assert all((caught.value.expected, caught.value.got, caught.value.do))


def test_the_file_of_a_path_is_closed(tmp_path: Path, recwarn: pytest.WarningsRecorder) -> None:
    (tmp_path / "a.png").write_bytes(GOOD)
    for _ in range(3):
        open_image(tmp_path / "a.png")
    assert not [warning for warning in recwarn if issubclass(warning.category, ResourceWarning)]


def test_an_image_given_is_not_changed() -> None:
    image = Image.fromarray(noise(4, 4, 4))
    pixels = noise(4, 4, 4)
    open_image(image)
    open_image(pixels)
    assert image.mode == "RGBA"
    assert (pixels == noise(4, 4, 4)).all()


def test_a_crop_that_would_be_absurdly_large_is_refused_and_names_the_way_out() -> None:
    steps = ImageSteps(pad=False, resize=("short", 336), crop=(336, 336))
    for size in ((1, 10_000), (10_000, 1)):
        with pytest.raises(ImageError, match=r'image_mode="pad"'):
            steps.shown_box(size)
        ImageSteps(pad=True, resize=("short", 336), crop=(336, 336)).shown_box(size)
    assert steps.shown_box((480, 640)) == (80.0, 0.0, 560.0, 480.0)


def test_a_thin_strip_in_crop_mode_is_refused_before_any_pixel_is_made() -> None:
    model = hooked(VARIANTS[0])
    strip = np.zeros((1, 100_000, 3), dtype=np.uint8)
    with pytest.raises(ImageError, match=r'image_mode="pad"'):
        model.prepare(strip, "what ?")
    small = np.zeros((1, 1_000, 3), dtype=np.uint8)
    assert model.prepare(small, "what ?", options=ImageOptions(image_mode="pad")).layout.views[0].box == (0.0, -499.0, 1000.0, 501.0)
