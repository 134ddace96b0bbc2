"""The experiments of the localization paper in their order, on drawn scenes or photographs, beside the published numbers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import numpy as np
import pandas as pd

from sightlens.errors import ExtraError, InterventionError, MetricError, StudyError
from sightlens.experiments.ablation import ablate_tokens
from sightlens.experiments.containers import EXPANSIONS, containerize_objects
from sightlens.experiments.cumulative import ablate_cumulatively, nauc_table
from sightlens.experiments.mediation import HeadMediation, mediate_heads
from sightlens.experiments.outcome import Outcome
from sightlens.experiments.paper_tables import intervals, score_table, sized_table, task_table
from sightlens.experiments.position_probes import Viewing, position_probes
from sightlens.experiments.published import published_numbers
from sightlens.experiments.scored_trials import score_trials
from sightlens.experiments.shuffles import shuffle_tokens
from sightlens.experiments.study import Cell, Study
from sightlens.experiments.trial import Trial, pair_trials
from sightlens.experiments.views import ablate_views, split_by_tiles
from sightlens.experiments.windows import knockout_windows
from sightlens.interventions.means import load_mean, save_mean
from sightlens.metrics import topk_overlap
from sightlens.model import HookedVLM
from sightlens.probes import ProbeSettings
from sightlens.stimuli import Pair, Stimulus, Task, shapes

MEDIATED: dict[str, Task] = {"cls": "existence", "loc": "localization"}
"""The paper mediates yes/no questions as its classification task."""
MOST_MEDIATED = 50
DRAWN_PROBES = ProbeSettings(epochs=4, learning_rate=1e-2, test_share=0.25)


@dataclass(frozen=True, eq=False)
class Section:
    """One experiment.

    Attributes:
        name: of the experiment, as `published_numbers` has it.
        measured: its table; empty where it cannot be run.
        published: what the paper reports of its models, on other data when scenes are drawn.
        note: what to know about the table, such as why it is empty.
    """

    name: str
    measured: pd.DataFrame
    published: pd.DataFrame
    note: str = ""


@dataclass(frozen=True)
class Reproduction:
    """How the experiments run.

    Attributes:
        store: folder of all results; a stopped run goes on there. None keeps them in memory.
        batch_size: trials at once.
        progress: whether to show progress bars.
        probed: pictures for the position probes, such as ImageNet's, with the paper's ten epochs; 24 drawn scenes and four
            epochs when None.
    """

    store: Path | None = None
    batch_size: int = 16
    progress: bool = True
    probed: Iterable[Stimulus] | None = None

    def run(self, model: HookedVLM, pairs: Sequence[Pair]) -> Iterator[Section]:
        """Yield the sections in the paper's order, each as soon as it is measured.

        A model without a dataset mean gets one of the clean pictures. The list task is left out of the tables for a model that
        names objects no more often with them than without. Heads are ranked on every other pair and ablated on the rest.

        Raises:
            StudyError: without pairs.
        """
        if not pairs:
            raise StudyError("at least one pair", "none", "Ask for more trials, or check the folder.")
        self._fit_mean(model, pairs)
        baseline, able = self._baseline(model, pairs)
        yield baseline
        trials = tuple(trial for trial in pair_trials(pairs) if able or trial.question.kind != "classification")
        yield _token_share(model, trials)
        yield self._ablation(model, trials)
        yield self._containers(model, trials)
        shuffled = self._outcome(model, shuffle_tokens(trials), "shuffle")
        yield _beside("shuffle", sized_table(shuffled, trials))
        yield self._views(model, trials)
        yield self._probes(model)
        yield self._knockout(model, trials)
        yield from self._heads(model, pairs)

    def _fit_mean(self, model: HookedVLM, pairs: Sequence[Pair]) -> None:
        """Give the model a mean of the clean pictures if it has none; a stopped run goes on with the one that it stored."""
        if "mean" in model.donors:
            return
        kept = None if self.store is None else self.store / "mean.safetensors"
        if kept is not None and kept.exists():
            model.donors["mean"] = load_mean(kept)
            return
        pictures = {pair.clean.id: pair.clean.image for pair in pairs}
        prompts = (model.prepare(picture, "what is this ?") for picture in pictures.values())
        mean = model.fit_mean(prompts, source=f"the {len(pictures)} clean pictures of these pairs")
        if kept is not None:
            kept.parent.mkdir(parents=True, exist_ok=True)
            save_mean(mean, kept)

    def _baseline(self, model: HookedVLM, pairs: Sequence[Pair]) -> tuple[Section, bool]:
        """Measure each task, and how often the model says an object is there that is not; and whether it can list objects."""
        asked = pair_trials(pairs)
        gone = {f"{trial.id} (removed)": trial for trial in asked if trial.question.kind != "localization"}
        pictures = {trial.id: pair.corrupted.image for pair in pairs for trial in pair_trials([pair])}
        absent = tuple(Trial(name, pictures[trial.id], trial.question) for name, trial in gone.items())
        study = Study("baseline", (Cell({"condition": "none"}),), (*asked, *absent))
        outcome = self._outcome(model, study, "baseline")
        columns = ["metric", "mean", "low", "high", "n"]
        present, false = (task_table(outcome, part)[columns] if part else pd.DataFrame() for part in (asked, absent))
        table = pd.concat([present.assign(object="present"), false.assign(object="removed")], ignore_index=True)
        published = pd.concat([published_numbers("baseline"), published_numbers("false_positives")], ignore_index=True)
        if not any(trial.question.kind == "classification" for trial in asked):
            return Section("baseline", table, published, "No list question was asked."), False
        hits, falses = (float(part.loc[part["metric"] == "cls", "mean"].iloc[0]) for part in (present, false))
        able = hits > falses
        note = f"The model's list names the object in {hits:.0f} % of the pictures with it and {falses:.0f} % of those without."
        unable = " It cannot do the list task, which is left out of the following tables."
        return Section("baseline", table, published, note if able else note + unable), able

    def _ablation(self, model: HookedVLM, trials: Sequence[Trial]) -> Section:
        table = sized_table(self._outcome(model, ablate_tokens(trials), "ablate_tokens"), trials)
        others, scored, notes = {"register": "register(2.0)"}, tuple(trials), []
        try:
            found = score_trials(model, trials, store=self._place("integrated_gradients"))
            scored, others = found.trials, {**others, "integrated_gradients": "top(object)"}
            gaps = found.result.records[0].values["relative_gap"]
            notes.append(f"Integrated gradients: median completeness gap {np.nanmedian(gaps):.1%} of the change.")
        except (ExtraError, InterventionError) as problem:
            notes.append(f"Without integrated gradients: {problem}")
        study = ablate_tokens(scored, paddings=(), others=others)
        more = sized_table(self._outcome(model, study, "ablate_selected"), scored)
        table = pd.concat([table, more.loc[more["condition"] != "none"]], ignore_index=True)
        if not more.loc[more["condition"] == "register", "n"].any():
            notes.append("No picture has a register token.")
        return _beside("ablate_tokens", table, " ".join(notes))

    def _containers(self, model: HookedVLM, trials: Sequence[Trial]) -> Section:
        outcome = self._outcome(model, containerize_objects(trials), "containerize")
        tables = [score_table(outcome, f"loc{suffix}", name="loc").assign(truth_padding=cells) for suffix, cells in EXPANSIONS.items()]
        return _beside("containerize", pd.concat(tables, ignore_index=True))

    def _views(self, model: HookedVLM, trials: Sequence[Trial]) -> Section:
        tiled, single = split_by_tiles(model, trials)
        if not tiled:
            return _beside("ablate_views", pd.DataFrame(), "This model cuts none of the pictures into tiles.")
        parts = {"tiled": tiled, "one tile": single}
        tables = [
            sized_table(self._outcome(model, ablate_views(part), f"ablate_views-{name.replace(' ', '_')}"), part).assign(pictures=name)
            for name, part in parts.items()
            if part
        ]
        note = "" if single else "Every picture is cut into tiles."
        return _beside("ablate_views", pd.concat(tables, ignore_index=True), note)

    def _probes(self, model: HookedVLM) -> Section:
        images, settings = self.probed, ProbeSettings()
        if images is None:
            images, settings = shapes.dataset(24, seed=31), DRAWN_PROBES
        viewing = Viewing(question="what is in the image ?")
        found = position_probes(model, images, viewing=viewing, settings=settings, store=self._place("position_probes"))
        table = found.to_pandas().pivot(index=["order", "site", "axis"], columns="model", values=["accuracy", "control", "chance"])
        plain = pd.DataFrame(
            {
                "accuracy": table["accuracy", "trained"],
                "shuffled labels": table["control", "trained"],
                "untrained model": table["accuracy", "untrained"],
                "chance": table["chance", "trained"],
            }
        )
        best = {axis: found.best(axis=axis).site for axis in ("row", "column", "both")}
        note = "Most accurate: " + ", ".join(f"{axis} at {site}" for axis, site in best.items()) + "."
        return _beside("position_probes", plain.reset_index().drop(columns="order"), note)

    def _knockout(self, model: HookedVLM, trials: Sequence[Trial]) -> Section:
        depth, tables = model.cfg.n_layers, []
        for width in dict.fromkeys(min(width, depth) for width in (4, 1, 6)):
            outcome = self._outcome(model, knockout_windows(trials, width=width), f"knockout_windows-{width}")
            tables.append(task_table(outcome, trials).assign(width=width))
        return _beside("knockout_windows", pd.concat(tables, ignore_index=True))

    def _heads(self, model: HookedVLM, pairs: Sequence[Pair]) -> Iterator[Section]:
        ranked, judged = pairs[::2][:MOST_MEDIATED], pairs[1::2] or pairs
        found: dict[str, HeadMediation] = {}
        tables, notes = [], []
        for name, task in MEDIATED.items():
            outcome = self._outcome(model, mediate_heads(model, ranked, task=task), f"mediation-{name}")
            try:
                found[name] = HeadMediation.of(outcome)
            except MetricError as problem:
                notes.append(f"{name}: {problem}")
                continue
            tables.append(_mediation_table(found[name]).assign(task=name))
        yield _beside("mediation", pd.concat(tables, ignore_index=True) if tables else pd.DataFrame(), " ".join(notes))
        if set(found) != set(MEDIATED):
            yield _beside("head_overlap", pd.DataFrame(), "Needs the mediation of both tasks.")
        else:
            yield _overlap(found["cls"], found["loc"])
        yield self._cumulative(model, [trial for trial in pair_trials(judged) if trial.question.kind == "localization"], found)

    def _cumulative(self, model: HookedVLM, trials: Sequence[Trial], found: dict[str, HeadMediation]) -> Section:
        orders = {name: mediation.ranking() for name, mediation in found.items()}
        if "loc" not in found:
            return _beside("ablate_heads", pd.DataFrame(), "Needs the mediation of localization.")
        outcome = self._outcome(model, ablate_cumulatively(trials, {**orders, "near_zero": found["loc"].near_zero()}), "ablate_heads")
        try:
            return _beside("ablate_heads", nauc_table(outcome, metric="loc"))
        except MetricError as problem:
            return _beside("ablate_heads", pd.DataFrame(), f"{problem}")

    def _place(self, name: str) -> Path | None:
        return None if self.store is None else self.store / name

    def _outcome(self, model: HookedVLM, study: Study, name: str) -> Outcome:
        return study.run(model, store=self._place(name), batch_size=self.batch_size, progress=self.progress)


def _beside(name: str, measured: pd.DataFrame, note: str = "") -> Section:
    return Section(name, measured, published_numbers(name), note)


def _token_share(model: HookedVLM, trials: Sequence[Trial]) -> Section:
    """Return which share of a view's tokens the object takes."""
    rows = []
    for trial in trials:
        if trial.question.kind == "localization" and trial.mask is not None:
            layout = model.prepare(trial.image, trial.question.text).layout
            kinds = dict.fromkeys(view.kind for view in layout.views)
            for padding, kind in product((-2, -1, 0, 1, 2), kinds):
                pool = layout.select("global" if kind == "global" else "tile[*]")
                share = (layout.object(trial.mask, padding) & pool).count / pool.count
                rows.append({"padding": padding, "view": kind, "share": share})
    if not rows:
        return _beside("token_share", pd.DataFrame(), "No trial asks for a box.")
    shares: dict[tuple[int, str], list[float]] = {}
    for row in rows:
        shares.setdefault((row["padding"], row["view"]), []).append(row["share"])
    found = [
        {"padding": padding, "view": view, **{name: column[0] for name, column in intervals(np.array(values)[:, None]).items()}}
        for (padding, view), values in shares.items()
    ]
    return _beside("token_share", pd.DataFrame(found))


def _mediation_table(found: HeadMediation) -> pd.DataFrame:
    """Return the ten heads that mediate most, with intervals over pairs."""
    spread = intervals(found.fractions.reshape(len(found.fractions), -1))
    width = found.fractions.shape[-1]
    rows = [
        {"rank": rank, "layer": layer, "head": head, **{name: column[layer * width + head] for name, column in spread.items()}}
        for rank, (layer, head) in enumerate(found.ranking()[:10], start=1)
    ]
    return pd.DataFrame(rows).assign(used=found.average.used, excluded=found.average.excluded)


def _overlap(cls: HeadMediation, loc: HeadMediation) -> Section:
    a, b = cls.average.fraction, loc.average.fraction
    rows = []
    for k in (10, 50):
        if k < a.size:
            found = topk_overlap(a, b, k=k)
            rows.append({"tasks": "cls, loc", "k": k, "count": found.count, "expected": found.expected, "jaccard": found.jaccard})
    note = "" if len(rows) == 2 else f"The model has {a.size} heads."
    return _beside("head_overlap", pd.DataFrame(rows), note)
