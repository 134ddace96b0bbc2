"""The localization paper's command on annotated photographs: made on the spot in COCO's and VOC's formats, with their defects."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from tests.stimuli.test_photos import blob, runs_of

from sightlens import cli
from sightlens.errors import StimulusError, StudyError
from sightlens.experiments import paper_data, photo_pairs
from sightlens.model import HookedVLM
from sightlens.stimuli import pair_folder
from sightlens.store import read_store

pytest.importorskip("cv2")
coco_mask = pytest.importorskip("pycocotools.mask")
DOG, CAT, CUP = 1, 2, 3
SQUARE, OTHER = blob(20, 70, 10, 60), blob(100, 160, 150, 230)


def photograph(folder: Path, name: str, *masks: np.ndarray) -> None:
    """A smooth picture with a red object wherever a mask is."""
    pixels = np.zeros((220, 300, 3), dtype=np.uint8) + np.linspace(40, 200, 300, dtype=np.uint8)[None, :, None]
    for mask in masks:
        pixels[mask] = (230, 20, 20)
    folder.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels).save(folder / name, quality=95)


def polygon(y0, y1, x0, x1):
    return [[x0, y0, x1, y0, x1, y1, x0, y1]]


def compressed(mask):
    runs = coco_mask.encode(np.asfortranarray(mask.astype(np.uint8)))
    return {"size": list(runs["size"]), "counts": runs["counts"].decode()}


@pytest.fixture
def coco(tmp_path: Path) -> Path:
    """Seven photographs: four with objects that qualify (one with two), a twin and a tiny object, one missing, one corrupt."""
    images = tmp_path / "coco" / "val2017"
    for name in ("1.jpg", "2.jpg", "3.jpg", "4.jpg", "7.jpg"):
        photograph(images, name, SQUARE, OTHER)
    (images / "6.jpg").write_bytes((images / "1.jpg").read_bytes()[:200])
    other = {"size": [220, 300], "counts": runs_of(OTHER)}
    crowd = {"size": [220, 300], "counts": runs_of(blob(0, 100, 100, 300))}
    objects = [
        (1, DOG, polygon(20, 70, 10, 60), [10, 20, 50, 50], 0),
        (1, CAT, other, [150, 100, 80, 60], 0),
        (1, CUP, polygon(5, 10, 5, 10), [5, 5, 5, 5], 0),  # tiny
        (2, DOG, compressed(SQUARE), [10, 20, 50, 50], 0),
        (2, CAT, other, [150, 100, 80, 60], 0),
        (2, CAT, polygon(180, 210, 10, 60), [10, 180, 50, 30], 0),  # a second cat
        (3, CUP, other, [150, 100, 80, 60], 0),
        (4, DOG, polygon(20, 70, 10, 60), [10, 20, 50, 50], 0),
        (4, DOG, crowd, [100, 0, 200, 100], 1),  # a crowd of dogs
        (5, DOG, polygon(20, 70, 10, 60), [10, 20, 50, 50], 0),  # no such file
        (6, DOG, polygon(20, 70, 10, 60), [10, 20, 50, 50], 0),  # a file cut off
        (7, CAT, compressed(OTHER), [150, 100, 80, 60], 0),
    ]
    names = ("image_id", "category_id", "segmentation", "bbox", "iscrowd")
    data = {
        "categories": [{"id": DOG, "name": "dog"}, {"id": CAT, "name": "cat"}, {"id": CUP, "name": "cup"}],
        "images": [{"id": k, "file_name": f"{k}.jpg", "width": 300, "height": 220} for k in range(1, 8)],
        "annotations": [dict(zip(names, entry, strict=True)) for entry in objects],
    }
    (tmp_path / "coco" / "annotations").mkdir()
    (tmp_path / "coco" / "annotations" / "instances_val2017.json").write_text(json.dumps(data))
    return tmp_path / "coco"


MADE = ["1-0", "1-1", "2-0", "3-0", "7-0"]


@pytest.fixture
def lister(monkeypatch) -> list[str]:
    """Let the model see every object but the dog of picture 2; the shipped models cannot list objects."""
    seen: list[str] = []

    def answers(stimuli, texts):
        seen.extend(stimulus.id for stimulus in stimuli)
        assert all("cat, cup, dog" in text for text in texts)
        return [", ".join(item.label for item in stimulus.objects if stimulus.id != "2") for stimulus in stimuli]

    monkeypatch.setattr(paper_data, "ask", lambda model: answers)
    return seen


def call(monkeypatch, *arguments: object) -> int:
    monkeypatch.setattr(sys, "argv", ["sightlens", *map(str, arguments)])
    with pytest.raises(SystemExit) as stopped:
        cli.main()
    return int(stopped.value.code or 0)


def test_the_command_makes_pairs_chooses_them_and_goes_on(coco, lister, tmp_path, monkeypatch, capsys):
    arguments = ("reproduce", "p5", "--data", coco, "--store", tmp_path / "out")
    assert call(monkeypatch, *arguments) == 0
    first = capsys.readouterr().out
    assert first.startswith("4 of 5 pairs kept")
    assert "unreadable: 2" in first
    assert "5.jpg" in first
    assert "6.jpg" in first
    pictures = sorted(path.stem for path in (tmp_path / "out" / "pairs").rglob("*.png"))
    assert pictures == MADE
    for target, mask in (("1-0", SQUARE), ("7-0", OTHER)):
        (removed,) = (tmp_path / "out" / "pairs").rglob(f"{target}.png")
        painted = np.asarray(Image.open(removed)).astype(int)
        assert np.ptp(painted[mask], axis=-1).max() < 40  # grey again, where it was red
    records = read_store(tmp_path / "out" / "ablate_tokens").records
    assert len(records[0].examples) == 4 * 2
    assert "cannot do the list task" in first
    assert lister == ["1", "1", "2", "3", "7", "1-remove-0", "1-remove-1", "2-remove-0", "3-remove-0", "7-remove-0"]

    def never(*args, **kwargs):
        raise AssertionError("made again")

    files = sorted(path for path in tmp_path.rglob("*") if path.is_file())
    monkeypatch.setattr(pair_folder, "remove_object", never)
    assert call(monkeypatch, *arguments) == 0
    assert capsys.readouterr().out == first
    assert sorted(path for path in tmp_path.rglob("*") if path.is_file()) == files
    assert len(lister) == 10


def test_a_model_that_keeps_no_pair_is_told_so(coco, tmp_path, monkeypatch, capsys):
    assert call(monkeypatch, "reproduce", "p5", "--data", coco, "--store", tmp_path / "out", "--trials", 2) == 2
    said = capsys.readouterr().out
    assert said.count("error") == 1
    assert "names before its removal and not after; got none of 2" in said.replace("\n", " ")


def test_without_a_picture_or_annotations_there_is_one_error(coco, tmp_path, monkeypatch, capsys):
    for path in (coco / "val2017").iterdir():
        path.unlink()
    for data, words in ((coco, "1.jpg"), (tmp_path / "nowhere", "instances_val2017.json")):
        assert call(monkeypatch, "reproduce", "p5", "--data", data, "--store", tmp_path / "out") == 2
        said = capsys.readouterr().out
        assert said.count("error") == 1
        assert words in said


def test_pairs_are_made_up_to_the_number_asked_for(coco, lister, tmp_path):
    model = HookedVLM.from_pretrained("sightlens/tiny-llava", check=False)
    chosen = photo_pairs(coco, model, count=3, cache=tmp_path)
    assert (len(chosen.pairs), chosen.made, chosen.left_out) == (2, 3, {})
    assert sorted(path.stem for path in tmp_path.rglob("*.png")) == MADE[:3]
    assert [pair.questions[1].box for pair in chosen.pairs] == [(10, 20, 60, 70), (150, 100, 230, 160)]
    with pytest.raises(StimulusError, match="annotations"):
        photo_pairs(tiny_only(coco), model, count=3, cache=tmp_path)
    with pytest.raises(StudyError, match="filters"):
        photo_pairs(coco, model, count=3, cache=tmp_path / "new")


def tiny_only(coco: Path) -> Path:
    """Say that every object is tiny."""
    file = coco / "annotations" / "instances_val2017.json"
    data = json.loads(file.read_text())
    tiny = {"segmentation": polygon(5, 10, 5, 10), "bbox": [5, 5, 5, 5]}
    file.write_text(json.dumps({**data, "annotations": [{**entry, **tiny} for entry in data["annotations"]]}))
    return coco


def test_voc_folders_are_read_alike(lister, tmp_path, monkeypatch):
    root = tmp_path / "VOC2012"
    photograph(root / "JPEGImages", "a.jpg", SQUARE, OTHER)
    for folder in ("Annotations", "SegmentationObject"):
        (root / folder).mkdir()
    one = "<object><name>{}</name><bndbox><xmin>{}</xmin><ymin>{}</ymin><xmax>{}</xmax><ymax>{}</ymax></bndbox></object>"
    listed = one.format("dog", 11, 21, 60, 70) + one.format("cat", 151, 101, 230, 160) + one.format("cup", 1, 1, 5, 5)
    size = "<size><width>300</width><height>220</height><depth>3</depth></size>"
    (root / "Annotations" / "a.xml").write_text(f"<annotation><filename>a.jpg</filename>{size}{listed}</annotation>")
    instances = Image.fromarray((SQUARE * 1 + OTHER * 2 + blob(0, 5, 0, 5) * 3).astype(np.uint8), mode="P")
    instances.putpalette([0, 0, 0, 128, 0, 0, 0, 128, 0, 0, 0, 128])
    instances.save(root / "SegmentationObject" / "a.png")
    model = HookedVLM.from_pretrained("sightlens/tiny-llava", check=False)
    chosen = photo_pairs(root, model, count=9, cache=tmp_path / "pairs")
    assert [pair.questions[2].answer for pair in chosen.pairs] == ["dog", "cat"]
    for pair, mask in zip(chosen.pairs, (SQUARE, OTHER), strict=True):
        assert (pair.clean.objects[pair.changed[0]].mask == mask).all()
        differs = (np.asarray(pair.clean.image) != np.asarray(pair.corrupted.image)).any(-1)
        assert differs[mask].mean() > 0.95
        assert not (differs & ~pair.region).any()
