"""A study described in a TOML file: the user's own pictures, masks, questions and interventions."""

from __future__ import annotations

import glob
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import numpy as np

from sightlens._types import PixelMask
from sightlens.errors import StudyError, one_line
from sightlens.experiments.ablation import ablate_tokens
from sightlens.experiments.entries import CELL, TOP, TRIAL, check_table, numbers
from sightlens.experiments.measures import AnswerLikelihood, GeneratedAnswer, Measure
from sightlens.experiments.study import Cell, Study
from sightlens.experiments.trial import Trial
from sightlens.experiments.windows import knockout_windows
from sightlens.families import open_image
from sightlens.interventions import Intervention, from_dict
from sightlens.stimuli import Question
from sightlens.stimuli.stimulus import Task

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # pyright: ignore[reportMissingImports]

RECIPES = {"ablate_tokens": ablate_tokens, "knockout_windows": knockout_windows}


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
            InterventionError: for an intervention that cannot be read.
        """
        arguments = {name: value for name, value in self.study.items() if name not in ("kind", "measure")}
        measure = _measure(str(self.study.get("measure", "generated")))
        kind = self.study.get("kind")
        if kind == "cells":
            check_table(arguments, {}, where="[study] of kind cells")
            cells = tuple(Cell(cell.get("at", {}), tuple(map(_intervention, cell.get("do", ())))) for cell in self.cells)
            return Study("cells", cells, self.trials, measure)
        if not isinstance(kind, str) or kind not in RECIPES:
            raise StudyError(f"[study] kind among {', '.join([*RECIPES, 'cells'])}", repr(kind), 'Write kind = "…".')
        try:
            return RECIPES[kind](self.trials, **arguments).measured_by(measure)
        except TypeError as problem:
            raise StudyError(f"arguments of {kind}", one_line(problem), "See `help(sightlens.experiments)`.") from problem


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
    check_table(data, TOP, where="the file", needed={"model", "study", "trial"})
    for index, cell in enumerate(data.get("cell", ())):
        check_table(cell, CELL, where=f"cell {index}")
        for entry in cell.get("do", ()):
            if not isinstance(entry, dict):
                raise StudyError("interventions as tables", f"{entry!r} in cell {index}", 'Write do = [{kind = "ablate", at = "object"}].')
    base = path.parent
    return Plan(
        model=str(base / data["model"]) if (base / data["model"]).is_dir() else data["model"],
        trials=tuple(_trial(entry, base, index=k) for k, entry in enumerate(data["trial"])),
        study=data["study"],
        cells=tuple(data.get("cell", ())),
        store=base / data.get("store", f"{path.stem}-results"),
        batch_size=data.get("batch_size", 8),
        mean_images=_pictures(data["mean_images"], base) if "mean_images" in data else (),
    )


def _intervention(data: Mapping[str, Any]) -> Intervention:
    found = from_dict(data)
    if other := [name for name in found.donors if name != "mean"]:
        raise StudyError("interventions that take the mean or nothing from outside", f"the donor {other[0]!r}", "Give donors in Python.")
    return found


def _pictures(pattern: str, base: Path) -> tuple[Path, ...]:
    found = tuple(sorted(base / name for name in glob.glob(pattern, root_dir=base, recursive=True)))
    if not found:
        raise StudyError("mean_images that match some pictures", repr(pattern), "Check the pattern; it is relative to the file.")
    return found


def _measure(name: str) -> Measure:
    known: dict[str, Measure] = {"generated": GeneratedAnswer(max_new_tokens=32), "likelihood": AnswerLikelihood()}
    if name not in known:
        raise StudyError(f"a measure among {', '.join(known)}", repr(name), "Check the spelling.")
    return known[name]


def _trial(entry: Mapping[str, Any], base: Path, *, index: int) -> Trial:
    check_table(entry, TRIAL, where=f"trial {index}", needed={"image", "question", "kind"})
    image = open_image(base / entry["image"])
    box = entry.get("box")
    _check_kind(entry["kind"], index)
    question = Question(
        entry["kind"],
        entry["question"],
        str(entry.get("answer", entry.get("number", ""))),
        box=None if box is None else numbers(box, where=f"trial {index}"),
        number=entry.get("number"),
    )
    _check_truth(question, index)
    mask = read_mask(base / entry["mask"], (image.height, image.width)) if "mask" in entry else None
    return Trial(entry.get("id", f"{index}-{Path(entry['image']).stem}"), image, question, mask)


def _check_kind(kind: str, index: int) -> None:
    if kind not in get_args(Task):
        raise StudyError(f"a kind among {', '.join(get_args(Task))}", repr(kind), f"Mend trial {index}.")


def _check_truth(question: Question, index: int) -> None:
    needs = {
        "existence": question.answer in ("yes", "no"),
        "localization": question.box is not None,
        "counting": question.number is not None,
        "classification": question.answer != "",
    }
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
