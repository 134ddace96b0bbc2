"""The experiments of the localization paper in their order, on drawn scenes or COCO, beside the published numbers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pandas as pd

from sightlens.errors import StudyError
from sightlens.experiments.ablation import ablate_tokens
from sightlens.experiments.containers import container_matrix, containerize_objects
from sightlens.experiments.cumulative import ablate_cumulatively, head_curves
from sightlens.experiments.mediation import HeadMediation, mediate_heads
from sightlens.experiments.outcome import Outcome
from sightlens.experiments.published import published_numbers
from sightlens.experiments.shuffles import shuffle_tokens
from sightlens.experiments.study import Study
from sightlens.experiments.trial import Trial, pair_trials
from sightlens.experiments.views import ablate_views, split_by_tiles
from sightlens.experiments.windows import knockout_windows
from sightlens.model import HookedVLM
from sightlens.stimuli import Pair, PairRecipe, build_pairs, edits, read_coco

SEED = 900_001


@dataclass(frozen=True, eq=False)
class Section:
    """One experiment: what was measured, and what the paper reports of its models (on other data, when scenes are drawn)."""

    name: str
    measured: pd.DataFrame
    published: pd.DataFrame


@dataclass(frozen=True)
class Reproduction:
    """How the experiments run.

    Attributes:
        store: folder of all results; a stopped run goes on there. None keeps them in memory.
        batch_size: trials at once.
        progress: whether to show progress bars.
    """

    store: Path | None = None
    batch_size: int = 16
    progress: bool = True

    def run(self, model: HookedVLM, pairs: Sequence[Pair]) -> Iterator[Section]:
        """Yield the sections in the paper's order, each as soon as it is measured.

        A model without a dataset mean gets one of the clean pictures. View ablation is left out for a model without tiles.

        Raises:
            StudyError: without pairs.
            MetricError: when no pair's answer depends on its object, so that there is nothing to mediate.
        """
        if not pairs:
            raise StudyError("at least one pair", "none", "Ask for more trials, or check the folder.")
        if "mean" not in model.donors:
            prompts = [model.prepare(pair.clean.image, "what is this ?") for pair in pairs]
            model.fit_mean(prompts, source=f"the {len(pairs)} clean pictures of these pairs")
        trials = pair_trials(pairs)
        yield self._section("ablate_tokens", model, ablate_tokens(trials))
        containers = self._outcome(model, containerize_objects(trials), "containerize")
        yield _beside("containerize", container_matrix(containers).reset_index())
        yield self._section("shuffle", model, shuffle_tokens(trials))
        if tiled := split_by_tiles(model, trials)[0]:
            yield self._section("ablate_views", model, ablate_views(tiled))
        yield self._section("knockout_windows", model, knockout_windows(trials, width=min(4, model.cfg.n_layers)))
        yield from self._heads(model, pairs, trials)

    def _heads(self, model: HookedVLM, pairs: Sequence[Pair], trials: Sequence[Trial]) -> Iterator[Section]:
        outcome = self._outcome(model, mediate_heads(model, pairs), "mediation")
        found = HeadMediation.of(outcome)
        top = [{"layer": layer, "head": head, "fraction": found.average.fraction[layer, head]} for layer, head in found.ranking()[:10]]
        yield _beside("mediation", pd.DataFrame(top).assign(used=found.average.used, excluded=found.average.excluded))
        boxes = [trial for trial in trials if trial.question.kind == "localization"]
        study = ablate_cumulatively(boxes, {"loc": found.ranking(), "near_zero": found.near_zero()})
        curves = head_curves(self._outcome(model, study, "ablate_heads"), metric="iou")
        rows = [{"order": name, "nauc": curve.nauc, "grid": ", ".join(f"{x:.3g}" for x in curve.x)} for name, curve in curves.items()]
        yield _beside("ablate_heads", pd.DataFrame(rows))

    def _outcome(self, model: HookedVLM, study: Study, name: str) -> Outcome:
        store = None if self.store is None else self.store / name
        return study.run(model, store=store, batch_size=self.batch_size, progress=self.progress)

    def _section(self, name: str, model: HookedVLM, study: Study) -> Section:
        outcome = self._outcome(model, study, name)
        return _beside(name, pd.concat([outcome.table(metric) for metric in outcome.metrics], ignore_index=True))


def _beside(name: str, measured: pd.DataFrame) -> Section:
    return Section(name, measured, published_numbers(name))


def drawn_pairs(count: int) -> list[Pair]:
    """Return held-out drawn scenes, each with and without one object."""
    return edits.pairs(count, seed=SEED)


def coco_pairs(folder: Path, count: int, *, cache: Path) -> list[Pair]:
    """Return pairs of COCO's validation photographs, the object taken out by the default inpainter.

    The paper's rule on what models answer is not applied: call `PairFolder.judge` for it.

    Args:
        folder: with ``annotations/instances_val2017.json`` and ``val2017/``.
        count: of photographs to take, in order of their ids; one pair each.
        cache: folder in which the pairs are kept.

    Raises:
        StimulusError: when a file is missing.
        ExtraError: when decoding or inpainting needs a package that is not installed.
    """
    photos = read_coco(folder / "annotations" / "instances_val2017.json", folder / "val2017")
    recipe = replace(PairRecipe(), classes=tuple(sorted({item.label for photo in photos for item in photo.objects})))
    chosen = []
    for photo in photos:
        if len(chosen) == count:
            break
        if recipe.filters.targets(photo):
            chosen.append(photo)
    made = build_pairs(chosen, cache, recipe=recipe)
    first = {entry.photo: entry for entry in reversed(made.entries)}
    return [made.load(first[photo.id]) for photo in chosen]
