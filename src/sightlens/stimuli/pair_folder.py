"""Pairs of photographs with and without an object, made once, kept on disk, and chosen by what models answer."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from sightlens.errors import StimulusError, listing
from sightlens.metrics import names_object
from sightlens.stimuli.inpaint import Inpainter, OpenCV
from sightlens.stimuli.photos import Photo, read_picture
from sightlens.stimuli.removal import PhotoWording, SizeFilter, grow, remove_object, removed
from sightlens.stimuli.stimulus import Pair, Stimulus

Ask = Callable[[Sequence[Stimulus], Sequence[str]], Sequence[str]]
"""From pictures and one question about each to a model's answers."""
Keep = Callable[[str, str, str], bool]
"""From the object's label, the answer about the clean and the answer about the corrupted picture to whether a pair is kept."""


@dataclass(frozen=True)
class PairRecipe:
    """How pairs are made; another recipe is another folder.

    Attributes:
        filters: which objects are taken out.
        inpainter: what fills the hole.
        dilation: pixels by which the object's mask grows first.
        wording: of the questions.
        classes: listed in the classification question; none asks no such question.
    """

    filters: SizeFilter = field(default_factory=SizeFilter)
    inpainter: Inpainter = field(default_factory=OpenCV)
    dilation: int = 5
    wording: PhotoWording = field(default_factory=PhotoWording)
    classes: tuple[str, ...] = ()

    def describe(self) -> dict[str, Any]:
        """Return the settings that decide the pictures, as JSON data."""
        return {"filters": asdict(self.filters), "inpainter": self.inpainter.describe(), "dilation": self.dilation}

    @property
    def key(self) -> str:
        """A hash of those settings (16 hexadecimal digits)."""
        return hashlib.sha256(json.dumps(self.describe(), sort_keys=True).encode()).hexdigest()[:16]


@dataclass(frozen=True)
class PairEntry:
    """One pair of a folder: the object ``target`` of a photograph taken out."""

    photo: str
    target: int

    @property
    def name(self) -> str:
        """The name under which it is stored."""
        return f"{self.photo.replace('/', '_')}-{self.target}"


def named_then_gone(label: str, clean: str, corrupted: str) -> bool:
    """Keep a pair when the list answer names the object before its removal and not after (arXiv 2605.19792, dataset)."""
    return names_object(clean, label) and not names_object(corrupted, label)


def build_pairs(
    photos: Sequence[Photo],
    root: str | Path,
    *,
    recipe: PairRecipe | None = None,
    unreadable: Literal["raise", "leave_out"] = "raise",
    most: int | None = None,
) -> PairFolder:
    """Take each qualifying object out of each photograph, and keep the results in a folder below ``root``.

    The folder's name is the recipe's hash. A run that was stopped goes on where it was; what is there is not made again.

    Args:
        photos: in the order in which they are taken.
        root: of all recipes' folders.
        recipe: how pairs are made.
        unreadable: what is done with a photograph that cannot be read, or whose mask has another size: refused, or left
            out and named in ``left_out``. A later run tries it again.
        most: pairs to make; photographs beyond are not looked at. All when None.

    Raises:
        StimulusError: for two photographs of one id, a picture that cannot be read, or a folder made from other annotations.
        ExtraError: when the inpainter or the masks need a package that is not installed.
    """
    chosen = recipe or PairRecipe()
    by_id = {photo.id: photo for photo in photos}
    if len(by_id) < len(photos):
        raise StimulusError("photographs with different ids", f"{len(photos)} with {len(by_id)} ids", "Read the data set once.")
    folder = Path(root) / chosen.key
    (folder / "pictures").mkdir(parents=True, exist_ok=True)
    _write(folder / "settings.json", json.dumps(chosen.describe(), indent=1, sort_keys=True).encode())
    manifest = _Lines(folder / "pairs.jsonl")
    done = {line["photo"]: _targets(line, by_id, folder) for line in manifest.read()}
    entries: list[PairEntry] = []
    left_out: dict[str, str] = {}
    for photo in photos:
        if most is not None and len(entries) >= most:
            break
        try:
            if photo.id not in done:
                done[photo.id] = _make(photo, folder, chosen)
                manifest.append({"photo": photo.id, "targets": done[photo.id], "annotations": photo.digest})
            entries += [PairEntry(photo.id, target) for target in done[photo.id]]
        except StimulusError as problem:
            if unreadable == "raise":
                raise
            left_out[photo.id] = problem.got
    return PairFolder(folder, by_id, tuple(entries[:most]), chosen, left_out)


def _targets(line: Mapping[str, Any], photos: Mapping[str, Photo], folder: Path) -> list[int]:
    """Return what was taken out of a photograph, refusing pairs that were made from other annotations."""
    photo = photos.get(line["photo"])
    if photo is not None and line["annotations"] != photo.digest:
        raise StimulusError(f"pairs made from these annotations of {photo.id!r}", f"others in {folder}", "Use a new folder.")
    return line["targets"]


def _make(photo: Photo, folder: Path, recipe: PairRecipe) -> list[int]:
    """Store the picture without each of its targets, and return those."""
    targets = recipe.filters.targets(photo)
    clean = photo.load() if targets else None
    for target in targets:
        assert clean is not None
        pair = remove_object(clean, target, inpainter=recipe.inpainter, dilation=recipe.dilation)
        place = folder / "pictures" / f"{PairEntry(photo.id, target).name}.png"
        pair.corrupted.image.save(place.with_suffix(".part"), format="PNG")
        os.replace(place.with_suffix(".part"), place)
    return targets


@dataclass(frozen=True, eq=False)
class PairFolder:
    """Pairs on disk; they are read one at a time.

    Attributes:
        folder: where they are.
        photos: by id.
        entries: every pair, in the order of the photographs.
        recipe: how they were made.
        left_out: by photograph, why no pair could be made of it.
    """

    folder: Path
    photos: Mapping[str, Photo]
    entries: tuple[PairEntry, ...]
    recipe: PairRecipe
    left_out: Mapping[str, str] = field(default_factory=dict)

    def __len__(self) -> int:
        """Count the pairs."""
        return len(self.entries)

    def load(self, entry: PairEntry) -> Pair:
        """Read one pair, with its questions.

        Raises:
            StimulusError: when a picture is missing or unreadable.
        """
        clean = self.photos[entry.photo].load()
        image = read_picture(self.folder / "pictures" / f"{entry.name}.png")
        region = grow(clean.objects[entry.target].mask, self.recipe.dilation)
        pair = removed(clean, entry.target, image=image, region=region)
        return replace(pair, questions=self.recipe.wording.ask(clean, entry.target, classes=self.recipe.classes))

    def pairs(self, entries: Sequence[PairEntry] | None = None) -> Iterator[Pair]:
        """Read pairs one after the other; all of them when none are named."""
        for entry in self.entries if entries is None else entries:
            yield self.load(entry)

    def judge(self, name: str, ask: Ask, *, batch_size: int = 16) -> None:
        """Ask a model what is in both pictures of every pair, and keep its answers; answers already there are not asked again.

        Args:
            name: of the model and what else decides its answers; another name is another file.
            ask: the model.
            batch_size: pairs at once; each is two pictures.

        Raises:
            StimulusError: without classes in the recipe, or when the model gives another number of answers.
        """
        lines = _Lines(self._answers(name))
        done = {(line["photo"], line["target"]) for line in lines.read()}
        todo = [entry for entry in self.entries if (entry.photo, entry.target) not in done]
        for start in range(0, len(todo), batch_size):
            batch = todo[start : start + batch_size]
            pairs = [self.load(entry) for entry in batch]
            texts = [_listing_question(pair) for pair in pairs]
            answers = list(ask([*(pair.clean for pair in pairs), *(pair.corrupted for pair in pairs)], texts * 2))
            if len(answers) != 2 * len(batch):
                raise StimulusError(f"{2 * len(batch)} answers", f"{len(answers)} from {name!r}", "Answer every question once.")
            for k, entry in enumerate(batch):
                lines.append({"photo": entry.photo, "target": entry.target, "clean": answers[k], "corrupted": answers[k + len(batch)]})

    def kept(self, judges: Sequence[str], *, keep: Keep = named_then_gone) -> tuple[PairEntry, ...]:
        """Return the pairs that pass the rule for every one of several models.

        Raises:
            StimulusError: for a model that has not judged all pairs.
        """
        passed = set(self.entries)
        for name in judges:
            answers = {PairEntry(line["photo"], line["target"]): line for line in _Lines(self._answers(name)).read()}
            if missing := [entry.name for entry in self.entries if entry not in answers]:
                got = f"none about {listing(missing, limit=4)}"
                raise StimulusError(f"answers of {name!r} about all pairs", got, f"Call judge({name!r}, …) first.")
            passed &= {entry for entry in passed if keep(self._label(entry), answers[entry]["clean"], answers[entry]["corrupted"])}
        return tuple(entry for entry in self.entries if entry in passed)

    def _label(self, entry: PairEntry) -> str:
        return self.photos[entry.photo].objects[entry.target].label

    def _answers(self, name: str) -> Path:
        settings = json.dumps([name, self.recipe.wording.classification, self.recipe.classes])
        return self.folder / f"answers-{hashlib.sha256(settings.encode()).hexdigest()[:16]}.jsonl"


def _listing_question(pair: Pair) -> str:
    for question in pair.questions:
        if question.kind == "classification":
            return question.text
    raise StimulusError("classes to list in the question", "a recipe without classes", "Give PairRecipe(classes=…).")


class _Lines:
    """A file of JSON lines that is only appended to; a line cut off by a kill is dropped."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def read(self) -> list[dict[str, Any]]:
        """Return the complete lines, and cut off what follows them."""
        if not self._path.exists():
            return []
        whole, newline, _ = self._path.read_bytes().rpartition(b"\n")
        with self._path.open("r+b") as file:
            file.truncate(len(whole) + len(newline))
        return [json.loads(line) for line in whole.splitlines()]

    def append(self, line: Mapping[str, Any]) -> None:
        """Add a line and wait until it is on disk."""
        with self._path.open("ab") as file:
            file.write(json.dumps(line).encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())


def _write(path: Path, data: bytes) -> None:
    part = path.with_suffix(".part")
    part.write_bytes(data)
    os.replace(part, path)
