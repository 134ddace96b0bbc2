"""The demo: which visual tokens and which layers does a small trained model's answer depend on?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd

from sightlens.experiments.ablation import ablate_tokens, token_effects
from sightlens.experiments.outcome import Outcome
from sightlens.experiments.trial import Trial, pair_trials
from sightlens.experiments.windows import knockout_windows
from sightlens.metrics import bootstrap_difference
from sightlens.model import HookedVLM
from sightlens.render import Labels, Plot, Report, draw_values, plot_bars, plot_curves
from sightlens.stimuli import Pair, edits

HELD_OUT_SEED = 900_001
TASKS = {"existence": "correct", "localization": "iou"}
WORDS = {"correct": "share answered “yes” to an object that is there", "iou": "mean IoU of the answered box"}

INTRODUCTION = (
    "Held-out drawn scenes, greedy answers. Each number is a mean over pictures with a 95 % bootstrap interval; every set of "
    "object tokens has controls of the same size (random tokens) and of the same size and shape (the set moved elsewhere).\n\n"
    "A shipped model was trained with helper heads that read object features at given layers (see its model card), so which "
    "layers matter is partly a choice of its recipe. Read the layer curves as a demonstration of the method, not as a finding "
    "about vision-language models."
)


@dataclass(frozen=True)
class Findings:
    """What the demo measured."""

    ablation: Outcome
    knockout: Outcome
    effects: Outcome
    trial: Trial


def run_demo(model: HookedVLM, *, pairs: int = 40, store: Path | None = None, progress: bool = True) -> Findings:
    """Measure token ablations, knockout windows and per-token effects on held-out drawn scenes.

    Args:
        model: a shipped model, with its dataset mean.
        pairs: scenes; each gives an existence and a localization question about one object.
        store: folder to resume in, or None.
        progress: whether to show progress bars.
    """
    trials = pair_trials(edits.pairs(pairs, seed=HELD_OUT_SEED))
    if "mean" not in model.donors:
        model.fit_mean(
            [model.prepare(pair.clean.image, "how many objects ?") for pair in _other_scenes()], source="64 drawn scenes, seed 77"
        )
    places = {name: None if store is None else store / name for name in ("ablation", "knockout", "effects")}
    ablation = ablate_tokens(trials, seeds=(0, 1)).run(model, store=places["ablation"], batch_size=32, progress=progress)
    windows = knockout_windows(trials, keys=("object", "random(object, 0)", "translate(object, 0)"), width=2)
    knockout = windows.run(model, store=places["knockout"], batch_size=32, progress=progress)
    shown = _clearest(ablation, trials)
    prompt = model.prepare(shown.image, shown.question.text)
    single = token_effects(shown, positions=prompt.layout.visual_tokens()["position"].tolist())
    return Findings(ablation, knockout, single.run(model, store=places["effects"], progress=progress), shown)


def _other_scenes() -> list[Pair]:
    return edits.pairs(64, seed=77)


def _clearest(outcome: Outcome, trials: Sequence[Trial]) -> Trial:
    """Return the localization trial that the unhooked model answers best; the first of several."""
    record = outcome.where({"condition": "none"}).records[0]
    overlap = dict(zip(record.examples, record.values["iou"], strict=True))
    boxes = [trial for trial in trials if trial.question.kind == "localization"]
    return max(boxes, key=lambda trial: overlap[trial.id])


def demo_report(model: HookedVLM, findings: Findings) -> Report:
    """Lay out the findings as a page: pictures, tables, and sentences made from the numbers."""
    trial = findings.trial
    prompt = model.prepare(trial.image, trial.question.text)
    assert trial.mask is not None
    bound = prompt.with_objects(trial.mask)
    report = Report(f"What {model.name} looks at", provenance=findings.ablation.provenance)
    report = report.add("What this is", INTRODUCTION)
    report = report.add(
        "The picture and its tokens",
        f"The question is “{trial.question.text}” The sequence is {prompt.layout}. "
        f"Tinted: the {bound.layout.select('object').count} visual tokens that show the object asked for.",
        bound.show("object"),
    )
    for task, metric in TASKS.items():
        report = report.add(
            f"Object tokens ablated: {task}", _ablation_sentence(findings.ablation, metric), _ablation_plot(findings.ablation, metric)
        )
    for task, metric in TASKS.items():
        report = report.add(
            f"Attention to the object knocked out: {task}",
            _knockout_sentence(findings.knockout, metric),
            _knockout_plot(findings.knockout, metric),
        )
    return report.add(
        "One token at a time", _effects_sentence(findings, bound.layout.select("object").positions), _effects_plot(model, findings)
    )


def _ablation_table(outcome: Outcome, metric: str) -> pd.DataFrame:
    table = outcome.table(metric)
    return table.loc[table["condition"] != "none"]


def _ablation_plot(outcome: Outcome, metric: str) -> Plot:
    labels = Labels(title="Visual tokens replaced by the dataset mean", x="padding p around the object (cells)", y=WORDS[metric])
    return plot_bars(_ablation_table(outcome, metric), x="padding", group="condition", labels=labels)


def _ablation_sentence(outcome: Outcome, metric: str) -> str:
    table = outcome.table(metric).set_index(["condition", "padding"])
    base, hit = table.loc[("none", 0)], table.loc[("object", 0)]
    text = (
        f"Untouched, {WORDS[metric]} is {base['mean']:.2f} (n = {int(base['n'])}). With the object's own tokens (p = 0) replaced "
        f"by the mean it is {_interval(hit)}; with as many random tokens {_interval(table.loc[('random', 0)])}; "
        f"with the same shape elsewhere {_interval(table.loc[('translated', 0)])}."
    )
    paired = _difference(outcome, metric)
    note = "Negative p shrinks the set, and leaves out objects that vanish."
    return f"{text} Object minus translated control, paired by picture: {paired}. {note}"


def _difference(outcome: Outcome, metric: str) -> str:
    merged = outcome.average("seed")
    rows = {}
    for condition in ("object", "translated"):
        record = merged.where({"condition": condition, "padding": 0}).records[0]
        rows[condition] = dict(zip(record.examples, record.values[metric], strict=True))
    both = np.array([[rows["object"][name], rows["translated"][name]] for name in rows["object"]])
    found = bootstrap_difference(both[:, 0], both[:, 1])
    return f"{found.mean:+.2f} (95 % interval {found.low:+.2f} to {found.high:+.2f}, {found.n} pictures)"


def _knockout_plot(outcome: Outcome, metric: str) -> Plot:
    table = outcome.table(metric)
    labels = Labels(title="Post-image queries cut off from keys, by window of layers", x="layers", y=WORDS[metric])
    return plot_curves(table.loc[table["keys"] != "none"], x="layers", group="keys", labels=labels, apart=["all"])


def _knockout_sentence(outcome: Outcome, metric: str) -> str:
    table = outcome.table(metric)
    base = table[table["keys"] == "none"].iloc[0]
    windows = table.loc[(table["keys"] == "object") & (table["layers"] != "all")]
    lowest = windows.loc[windows["mean"].idxmin()]
    control = table[(table["keys"] == "random(object, 0)") & (table["layers"] == lowest["layers"])].iloc[0]
    every = table[(table["keys"] == "object") & (table["layers"] == "all")].iloc[0]
    return (
        f"Untouched: {base['mean']:.2f}. The window that matters most for reading the object is layers {lowest['layers']}: "
        f"{_interval(lowest)}, against {_interval(control)} for as many random tokens. In all layers, the last point on the axis: "
        f"{_interval(every)}."
    )


def _effects_plot(model: HookedVLM, findings: Findings) -> Plot:
    layout = model.prepare(findings.trial.image, findings.trial.question.text).layout
    labels = Labels(title="Change of the right answer's log-probability when one token is ablated", y="Δ log-probability (nats)")
    return draw_values(findings.trial.image, layout, values=_effects(findings), labels=labels)


def _effects(findings: Findings) -> np.ndarray:
    values = {record.coordinates["token"]: record.values["logprob"][0] for record in findings.effects.records}
    return np.array([value - values[-1] for token, value in values.items() if token != -1])


def _effects_sentence(findings: Findings, positions: np.ndarray) -> str:
    tokens = [record.coordinates["token"] for record in findings.effects.records if record.coordinates["token"] != -1]
    worst = np.argsort(_effects(findings))[: len(positions)]
    inside = sum(tokens[k] in set(positions.tolist()) for k in worst)
    total = len(positions)
    return f"The object has {total} tokens. Of the {total} tokens whose ablation lowers the right answer most, {inside} lie on it."


def _interval(row: pd.Series) -> str:
    return f"{row['mean']:.2f} (95 % interval {row['low']:.2f} to {row['high']:.2f})"
