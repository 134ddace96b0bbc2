"""Annotated photographs: readers against hand-made data sets, removal, and pair folders that go on after a kill."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from sightlens import stimuli
from sightlens.errors import StimulusError
from sightlens.stimuli import MeanFill, OpenCV, PairRecipe, PhotoWording, SizeFilter, build_pairs, pair_folder, remove_object

VOC = """<annotation><filename>a.jpg</filename><size><width>300</width><height>220</height><depth>3</depth></size>
<object><name>dog</name><bndbox><xmin>11</xmin><ymin>21</ymin><xmax>60</xmax><ymax>70</ymax></bndbox></object>
<object><name>cat</name><bndbox><xmin>101</xmin><ymin>21</ymin><xmax>120</xmax><ymax>40</ymax></bndbox></object></annotation>"""


def runs_of(mask: np.ndarray) -> list[int]:
    """COCO's plain run lengths: column by column, starting with the background."""
    flat = mask.ravel(order="F")
    edges = np.flatnonzero(np.diff(np.concatenate([[False], flat, [not flat[-1]]])))
    return np.diff(np.concatenate([[0], edges])).tolist()


def blob(y0, y1, x0, x1, size=(220, 300)) -> np.ndarray:
    mask = np.zeros(size, dtype=bool)
    mask[y0:y1, x0:x1] = True
    return mask


@pytest.fixture
def coco(tmp_path: Path) -> tuple[Path, Path]:
    """Three pictures: one with two classes (one twice), one small, one with a crowd."""
    pytest.importorskip("pycocotools")
    images = tmp_path / "images"
    images.mkdir()
    rng = np.random.default_rng(0)
    for name, size in (("1.png", (220, 300)), ("2.png", (100, 300)), ("3.png", (220, 300)), ("4.png", (220, 300))):
        Image.fromarray(rng.integers(0, 256, (*size, 3), dtype=np.uint8)).save(images / name)
    square = {"polygon": [[10, 20, 60, 20, 60, 70, 10, 70]], "plain": {"size": [220, 300], "counts": runs_of(blob(20, 70, 10, 60))}}
    crowd = {"size": [220, 300], "counts": runs_of(blob(0, 100, 0, 100))}

    def entry(image, category, segmentation, **more):
        return {"image_id": image, "category_id": category, "bbox": [10, 20, 50, 50], "segmentation": segmentation, **more}

    data = {
        "categories": [{"id": 7, "name": "dog"}, {"id": 9, "name": "cat"}],
        "images": [{"id": k, "file_name": f"{k}.png", "width": 300, "height": 100 if k == 2 else 220} for k in (3, 1, 2, 4)],
        "annotations": [
            entry(1, 7, square["polygon"]),
            entry(1, 9, square["polygon"]),
            entry(1, 9, [[100, 100, 150, 100, 150, 150, 100, 150]]),
            entry(2, 7, square["polygon"]),
            entry(3, 7, square["plain"]),
            entry(3, 9, square["plain"]),
            entry(3, 9, crowd, iscrowd=1),
        ],
    }
    file = tmp_path / "instances.json"
    file.write_text(json.dumps(data))
    return file, images


def recipe(**changes) -> PairRecipe:
    settings = {"inpainter": MeanFill(), "dilation": 3, "classes": ("cat", "dog"), **changes}
    return PairRecipe(**settings)


def test_coco_masks_boxes_and_crowds(coco):
    photos = stimuli.read_coco(*coco)
    assert [photo.id for photo in photos] == ["1", "2", "3"]  # 4 has no object
    for photo, target in ((photos[0], 0), (photos[2], 0)):
        mask = photo.mask(target)
        assert mask.shape == (220, 300)
        assert (mask == blob(20, 70, 10, 60)).all()
    first = photos[0].load()
    assert first.objects[0].box == (10, 20, 60, 70)
    assert [item.label for item in first.objects] == ["dog", "cat", "cat"]
    assert (np.asarray(first.image) == np.asarray(Image.open(coco[1] / "1.png"))).all()
    assert [item.crowd for item in photos[2].objects] == [False, False, True]


def test_an_object_of_several_polygons(coco):
    two = stimuli.CocoSegmentation([[10, 20, 60, 20, 60, 70, 10, 70], [100, 100, 110, 100, 110, 120, 100, 120]])
    assert (two.mask((300, 220)) == blob(20, 70, 10, 60) | blob(100, 120, 100, 110)).all()


def test_compressed_run_lengths(coco):
    from pycocotools import mask as coco_mask

    runs = coco_mask.encode(np.asfortranarray(blob(3, 9, 5, 50).astype(np.uint8)))
    data = {"size": list(runs["size"]), "counts": runs["counts"].decode()}
    assert (stimuli.CocoSegmentation(data).mask((300, 220)) == blob(3, 9, 5, 50)).all()


def test_filters_keep_what_the_paper_keeps(coco):
    one, small, crowd = stimuli.read_coco(*coco)
    share = 50 * 50 / (220 * 300)
    assert SizeFilter().targets(one) == [0]
    assert SizeFilter().targets(small) == []
    assert SizeFilter(min_side=100).targets(small) == [0]
    assert SizeFilter().targets(crowd) == [0]  # the cat is also in the crowd
    assert SizeFilter(unique_class=False).targets(one) == [0, 1, 2]
    assert SizeFilter(unique_class=False).targets(crowd) == [0, 1]
    assert SizeFilter(min_fraction=share * 1.01).targets(one) == []
    assert SizeFilter(min_fraction=share, max_fraction=share).targets(one) == [0]
    assert SizeFilter(max_fraction=share * 0.99).targets(one) == []


def test_voc_masks_and_boxes(tmp_path):
    for folder in ("Annotations", "JPEGImages", "SegmentationObject", "ImageSets/Main"):
        (tmp_path / folder).mkdir(parents=True)
    for name in ("a", "b"):
        (tmp_path / "Annotations" / f"{name}.xml").write_text(VOC.replace("a.jpg", f"{name}.jpg"))
    Image.new("RGB", (300, 220), "grey").save(tmp_path / "JPEGImages" / "a.jpg")
    instances = Image.fromarray((blob(20, 70, 10, 60) * 1 + blob(20, 40, 100, 120) * 2).astype(np.uint8), mode="P")
    instances.putpalette([0, 0, 0, 128, 0, 0, 0, 128, 0])
    instances.save(tmp_path / "SegmentationObject" / "a.png")
    (tmp_path / "ImageSets/Main/val.txt").write_text("b\na 1\n")
    (photo,) = stimuli.read_voc(tmp_path)
    assert (photo.mask(0) == blob(20, 70, 10, 60)).all()
    assert (photo.mask(1) == blob(20, 40, 100, 120)).all()
    assert photo.objects[0].box == (10, 20, 60, 70)
    assert photo.load().size == (300, 220)
    boxed = stimuli.read_voc(tmp_path, split="val", masks="box")
    assert [photo.id for photo in boxed] == ["b", "a"]
    assert (boxed[0].mask(0) == blob(20, 70, 10, 60)).all()
    for wrong in (lambda: stimuli.read_voc(tmp_path, split="train"), lambda: stimuli.read_voc(tmp_path / "no")):
        with pytest.raises(StimulusError, match="expected"):
            wrong()


def test_readers_say_what_is_wrong(coco, tmp_path):
    file, images = coco
    (tmp_path / "broken.json").write_text('{"images": [')
    (tmp_path / "other.json").write_text('{"images": [], "annotations": [{"id": 1}]}')
    for name in ("broken.json", "other.json", "none.json"):
        with pytest.raises(StimulusError, match=name):
            stimuli.read_coco(tmp_path / name, images)
    photo = stimuli.read_coco(file, images)[0]
    Image.new("RGB", (220, 300)).save(images / "1.png")
    with pytest.raises(StimulusError, match="300×220"):
        photo.load()
    (images / "1.png").write_bytes(b"no picture")
    with pytest.raises(StimulusError, match="readable"):
        photo.load()


def test_a_folder_streams_its_pictures_again_and_again(tmp_path):
    for k, name in enumerate(("n02/b.JPEG", "n01/a.png", "n01/notes.txt", "c.jpg")):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text("x") if name.endswith("txt") else Image.new("RGB", (10 + k, 8)).save(path)
    folder = stimuli.folder_images(tmp_path)
    assert len(folder) == 3
    for _ in range(2):
        assert [(s.id, s.size[0]) for s in folder] == [("c.jpg", 13), ("n01/a.png", 11), ("n02/b.JPEG", 10)]
    assert folder.sample(2, seed=1).paths == folder.sample(2, seed=1).paths
    assert len({folder.sample(1, seed=seed).paths for seed in range(30)}) == 3
    with pytest.raises(StimulusError, match="3 pictures"):
        folder.sample(4)
    with pytest.raises(StimulusError, match="folder with pictures"):
        stimuli.folder_images(tmp_path / "n01" / "none")


@pytest.mark.parametrize("inpainter", [MeanFill(), OpenCV(), OpenCV("navier_stokes", 3)], ids=lambda i: i.describe()["kind"])
@pytest.mark.parametrize("dilation", [0, 4])
def test_removal_changes_the_grown_mask_and_nothing_else(inpainter, dilation):
    if isinstance(inpainter, OpenCV):
        pytest.importorskip("cv2")
    pixels = np.full((60, 80, 3), 90, dtype=np.uint8) + np.arange(80, dtype=np.uint8)[None, :, None]
    mask = blob(20, 30, 40, 55, (60, 80))
    pixels[mask] = (250, 10, 10)
    clean = stimuli.Stimulus("p", Image.fromarray(pixels), (stimuli.SceneObject("cup", (40.0, 20.0, 55.0, 30.0), mask),))
    pair = remove_object(clean, 0, inpainter=inpainter, dilation=dilation)
    differs = (np.asarray(pair.clean.image) != np.asarray(pair.corrupted.image)).any(-1)
    assert (pair.region == blob(20 - dilation, 30 + dilation, 40 - dilation, 55 + dilation, (60, 80))).all()
    assert not (differs & ~pair.region).any()
    assert differs[mask].all()
    assert pair.corrupted.objects == ()
    if dilation and isinstance(inpainter, OpenCV):  # a smooth picture comes back nearly as it was
        plain = 90.0 + np.arange(80)[None, :, None]
        assert np.abs(np.asarray(pair.corrupted.image)[mask] - np.broadcast_to(plain, pixels.shape)[mask]).max() < 12


def test_removal_refuses_what_cannot_be_filled():
    clean = stimuli.Stimulus(
        "p", Image.new("RGB", (8, 8)), (stimuli.SceneObject("cup", (0.0, 0.0, 8.0, 8.0), np.ones((8, 8), dtype=bool)),)
    )
    for call in (
        lambda: remove_object(clean, 0, inpainter=MeanFill()),
        lambda: remove_object(clean, 1, inpainter=MeanFill()),
        lambda: remove_object(clean, 0, inpainter=MeanFill(), dilation=-1),
        lambda: remove_object(clean, 0, inpainter=stimuli.LaMa(Path("nowhere.pt")), dilation=0),
    ):
        with pytest.raises(StimulusError):
            call()


class _Brightener(torch.nn.Module):
    """Stands in for LaMa: refuses sides that are no multiples of 8, paints the hole in the right colour."""

    def forward(self, picture: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        if picture.shape[2] % 8 != 0 or picture.shape[3] % 8 != 0:
            raise RuntimeError("sides")
        return picture * (1 - mask) + mask * torch.tensor([0.2, 0.4, 0.6]).view(1, 3, 1, 1)


def test_lama_runs_from_a_local_file(tmp_path):
    torch.jit.script(_Brightener()).save(str(tmp_path / "lama.pt"))
    lama = stimuli.LaMa(tmp_path / "lama.pt")
    pixels, hole = np.full((21, 30, 3), 7, dtype=np.uint8), blob(5, 9, 20, 30, (21, 30))
    filled = lama.fill(pixels, hole)
    assert (filled[hole] == (51, 102, 153)).all()
    assert (filled[~hole] == 7).all()
    before = lama.describe()
    (tmp_path / "lama.pt").write_bytes(b"else")
    assert lama.describe() != before
    with pytest.raises(StimulusError, match="TorchScript"):
        stimuli.LaMa(tmp_path / "other.pt").fill(pixels, hole)


def test_pairs_are_made_once_and_ask_three_questions(coco, tmp_path, monkeypatch):
    photos = stimuli.read_coco(*coco)
    folder = build_pairs(photos, tmp_path / "pairs", recipe=recipe())
    assert [(entry.photo, entry.target) for entry in folder.entries] == [("1", 0), ("3", 0)]
    pair = next(folder.pairs())
    differs = (np.asarray(pair.clean.image) != np.asarray(pair.corrupted.image)).any(-1)
    assert differs.any()
    assert not (differs & ~pair.region).any()
    assert (pair.region == blob(17, 73, 7, 63)).all()
    assert [q.kind for q in pair.questions] == ["existence", "localization", "classification"]
    assert pair.questions[1].box == (10, 20, 60, 70)
    assert "cat, dog" in pair.questions[2].text
    assert pair.questions[2].answer == "dog"

    def no_more(*args, **kwargs):
        raise AssertionError("made again")

    monkeypatch.setattr(pair_folder, "remove_object", no_more)
    again = build_pairs(photos, tmp_path / "pairs", recipe=recipe(wording=PhotoWording(existence="{label} ?")))
    assert again.entries == folder.entries
    assert again.folder == folder.folder
    with pytest.raises(AssertionError, match="made again"):
        build_pairs(photos, tmp_path / "pairs", recipe=recipe(dilation=4))
    with pytest.raises(StimulusError, match="different ids"):
        build_pairs([*photos, photos[0]], tmp_path / "pairs", recipe=recipe())


def test_a_killed_build_goes_on(coco, tmp_path, monkeypatch):
    photos, made = stimuli.read_coco(*coco), []
    real = pair_folder.remove_object

    def counted(stimulus, *args, **kwargs):
        if len(made) == 1:
            raise KeyboardInterrupt
        made.append(stimulus.id)
        return real(stimulus, *args, **kwargs)

    monkeypatch.setattr(pair_folder, "remove_object", counted)
    with pytest.raises(KeyboardInterrupt):
        build_pairs(photos, tmp_path / "pairs", recipe=recipe())
    manifest = tmp_path / "pairs" / recipe().key / "pairs.jsonl"
    manifest.write_bytes(manifest.read_bytes() + b'{"photo": "3", "targ')  # a line the kill cut off
    made[:] = [None, None]
    folder = build_pairs(photos, tmp_path / "pairs", recipe=recipe())
    assert made == [None, None, "3"]
    assert len(folder) == 2
    assert [json.loads(line)["photo"] for line in manifest.read_text().splitlines()] == ["1", "2", "3"]


def test_models_choose_pairs_and_are_asked_once(coco, tmp_path):
    folder = build_pairs(stimuli.read_coco(*coco), tmp_path / "pairs", recipe=recipe())
    asked = []

    def good(pictures, texts):
        asked.extend(picture.id for picture in pictures)
        assert all("cat, dog" in text for text in texts)
        return ["cat" if "remove" in picture.id else "a dog, a cat" for picture in pictures]

    folder.judge("good", good, batch_size=1)
    folder.judge("good", good)
    assert asked == ["1", "1-remove-0", "3", "3-remove-0"]
    folder.judge("partial", lambda pictures, texts: ["dog" if p.id in ("1", "3", "3-remove-0") else "" for p in pictures])
    assert len(folder.kept(["good"])) == 2
    assert [entry.photo for entry in folder.kept(["good", "partial"])] == ["1"]
    assert folder.kept(["good"], keep=lambda label, clean, corrupted: label in corrupted) == ()
    with pytest.raises(StimulusError, match="nobody"):
        folder.kept(["good", "nobody"])
    with pytest.raises(StimulusError, match="4 answers"):
        folder.judge("mute", lambda pictures, texts: [])
    bare = build_pairs(list(folder.photos.values()), tmp_path / "pairs", recipe=recipe(classes=()))
    with pytest.raises(StimulusError, match="classes"):
        bare.judge("good", good)
