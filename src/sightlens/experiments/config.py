"""A study described in a TOML file: the user's own pictures, masks, questions and interventions."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from sightlens._types import PixelMask
from sightlens.errors import StudyError, listing
from sightlens.experiments.ablation import ablate_tokens
from sightlens.experiments.measures import AnswerLikelihood, GeneratedAnswer, Measure
from sightlens.experiments.study import Cell, Study
from sightlens.experiments.trial import Trial
from sightlens.experiments.windows import knockout_windows
from sightlens.families import open_image
from sightlens.interventions import from_dict
from sightlens.stimuli import Question

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # pyright: ignore[reportMissingImports]

RECIPES = {"ablate_tokens": ablate_tokens, "knockout_windows": knockout_windows}
TOP = {"model", "store", "report", "batch_size", "mean_images", "study", "trial", "cell"}


@dataclass(frozen=True)
class Plan:
    """What a configuration file asks for; paths are relative to the file.

    Attributes:
        model: name or folder.
        trials: the pictures and questions.
        study: the table ``[study]``: ``kind`` and that experiment's arguments.
        cells: the tables ``[[cell]]``, for ``kind = "cells"``.
        store: folder of the results.
        batch_size: trials at once.
        mean_images: pictures whose mean replaces ablated tokens, when the model ships none.
    """

    model: str
    trials: tuple[Trial, ...]
    study: Mapping[str, Any]
    cells: tuple[Mapping[str, Any], ...]
    store: Path
    batch_size: int
    mean_images: tuple[Path, ...]

    def build(self) -> Study:
        """Return the study.

        Raises:
            StudyError: for an unknown kind or argument.
        """
        arguments = {name: value for name, value in self.study.items() if name not in ("kind", "measure")}
        measure = _measure(str(self.study.get("measure", "generated")))
        kind = self.study.get("kind")
        if kind == "cells":
            cells = tuple(Cell(cell.get("at", {}), tuple(map(from_dict, cell.get("do", ())))) for cell in self.cells)
            return Study("cells", cells, self.trials, measure)
        if kind not in RECIPES:
            raise StudyError(f"[study] kind among {', '.join([*RECIPES, 'cells'])}", repr(kind), 'Write kind = "…".')
        try:
            return RECIPES[kind](self.trials, **arguments).measured_by(measure)
        except TypeError as problem:
            raise StudyError(f"arguments of {kind}", str(problem), "See `help(sightlens.experiments)`.") from problem


def read_plan(path: Path) -> Plan:
    """Read a configuration file.

    Raises:
        StudyError: when it is missing, no TOML, or holds unknown or missing entries.
    """
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as problem:
        raise StudyError("a TOML file", f"{path}: {problem.strerror}", "Check the path.") from problem
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as problem:
        raise StudyError("valid TOML", f"{path}: {problem}", "Mend the file.") from problem
    if unknown := set(data) - TOP:
        raise StudyError(f"entries among {listing(sorted(TOP))}", listing(sorted(unknown)), "Check the spelling.")
    if missing := {"model", "study", "trial"} - set(data):
        raise StudyError("model, [study] and [[trial]]", f"no {listing(sorted(missing))}", "Add them.")
    base = path.parent
    pattern = data.get("mean_images")
    return Plan(
        model=str(base / data["model"]) if (base / data["model"]).is_dir() else data["model"],
        trials=tuple(_trial(entry, base, index=k) for k, entry in enumerate(data["trial"])),
        study=data["study"],
        cells=tuple(data.get("cell", ())),
        store=base / data.get("store", f"{path.stem}-results"),
        batch_size=int(data.get("batch_size", 8)),
        mean_images=tuple(sorted(base.glob(pattern))) if pattern else (),
    )


def _measure(name: str) -> Measure:
    known: dict[str, Measure] = {"generated": GeneratedAnswer(max_new_tokens=32), "likelihood": AnswerLikelihood()}
    if name not in known:
        raise StudyError(f"a measure among {', '.join(known)}", repr(name), "Check the spelling.")
    return known[name]


def _trial(entry: Mapping[str, Any], base: Path, *, index: int) -> Trial:
    known = {"id", "image", "question", "kind", "answer", "box", "number", "mask"}
    if unknown := set(entry) - known:
        raise StudyError(f"trial entries among {listing(sorted(known))}", listing(sorted(unknown)), "Check the spelling.")
    if missing := {"image", "question", "kind"} - set(entry):
        raise StudyError("image, question and kind in every trial", f"no {listing(sorted(missing))} in trial {index}", "Add them.")
    image = open_image(base / entry["image"])
    box = entry.get("box")
    question = Question(
        entry["kind"],
        entry["question"],
        str(entry.get("answer", entry.get("number", ""))),
        box=None if box is None else _box(box),
        number=entry.get("number"),
    )
    _check_truth(question, index)
    mask = read_mask(base / entry["mask"], (image.height, image.width)) if "mask" in entry else None
    return Trial(entry.get("id", f"{index}-{Path(entry['image']).stem}"), image, question, mask)


def _box(values: Sequence[float]) -> tuple[float, float, float, float]:
    if len(values) != 4:
        raise StudyError("box = [x0, y0, x1, y1] in pixels", f"{list(values)}", "Give four numbers.")
    x0, y0, x1, y1 = map(float, values)
    return x0, y0, x1, y1


def _check_truth(question: Question, index: int) -> None:
    needs = {
        "existence": question.answer in ("yes", "no"),
        "localization": question.box is not None,
        "counting": question.number is not None,
        "classification": question.answer != "",
    }
    if question.kind not in needs:
        raise StudyError(f"a kind among {', '.join(needs)}", repr(question.kind), f"Mend trial {index}.")
    if not needs[question.kind]:
        what = {
            "existence": 'answer = "yes" or "no"',
            "localization": "box = [x0, y0, x1, y1]",
            "counting": "number = …",
            "classification": 'answer = "the class"',
        }[question.kind]
        raise StudyError(f"{what} for kind {question.kind!r}", f"none in trial {index}", "Add it.")


def read_mask(path: Path, size: tuple[int, int]) -> PixelMask:
    """Read a mask picture: pixels that are not black belong to the object.

    Raises:
        ImageError: when it is no picture.
        StudyError: when it has another size than its image.
    """
    mask: PixelMask = np.any(np.asarray(open_image(path)), axis=-1)
    if mask.shape != size:
        raise StudyError(
            f"a mask of {size[1]}×{size[0]} pixels", f"{path.name} of {mask.shape[1]}×{mask.shape[0]}", "Scale the mask without smoothing."
        )
    return mask
