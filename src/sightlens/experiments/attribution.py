"""Attribution patching: the effect of many patches from one backward pass, as a first screen before true patching.

First-order estimate of Nanda 2023 and Syed et al. 2023 (arXiv 2310.10348): the change that an intervention makes to an
activation, times the gradient of the metric there. It is exact where the metric depends linearly on the activation.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float
from torch import Tensor

from sightlens.engine import Engine
from sightlens.engine.start import site_point
from sightlens.errors import InterventionError, StudyError
from sightlens.families import Prompt
from sightlens.interventions import MERGED, Intervention
from sightlens.model import HookedVLM
from sightlens.model.apply import Donor, Values, changes
from sightlens.model.rows import Row
from sightlens.model.taps import LiveSite

Metric = Callable[[Float[Tensor, "example 1 vocab"]], Float[Tensor, " example"]]
"""From logits at the last position to one number per example."""


@dataclass(frozen=True, eq=False)
class Screen:
    """True effects of some cells beside their estimates.

    Attributes:
        measured: by cell, the true change of the metric per example, from the engine.
        rank_correlation: Spearman's ρ between estimated and true mean effects over the measured cells; NaN where either is
            the same for all of them.
    """

    measured: Mapping[int, Float[np.ndarray, " example"]]
    rank_correlation: float


@dataclass(frozen=True, eq=False)
class Estimates:
    """How each cell, alone, should change a metric.

    Attributes:
        effects: ``[cell, example]``.
        engine, prompt, cells, metric, donors: what `attribute` was given.
    """

    effects: Float[np.ndarray, "cell example"]
    engine: Engine
    prompt: Prompt
    cells: Sequence[Intervention]
    metric: Metric
    donors: Mapping[str, Donor]

    def check(self, count: int = 16) -> Screen:
        """Measure some cells truly: those spread evenly over the ranking of mean effects, its two ends among them.

        Raises:
            StudyError: when there are fewer than two cells to measure.
        """
        count = min(count, len(self.cells))
        if count < 2:
            raise StudyError("two or more cells to measure", f"{count}", "A rank correlation needs two.")
        estimated = self.effects.mean(1)
        chosen = [int(cell) for cell in estimated.argsort()[np.linspace(0, len(self.cells) - 1, count).round().astype(int)]]
        plan = self.engine.plan(self.prompt, [[], *([self.cells[cell]] for cell in chosen)], donors=self.donors)
        clean, *found = (self.metric(logits).double().numpy(force=True) for logits in plan.logits())
        measured = {cell: effect - clean for cell, effect in zip(chosen, found, strict=True)}
        table = pd.DataFrame({"true": [effect.mean() for effect in measured.values()], "estimated": estimated[chosen]})
        return Screen(measured, float(table.corr(method="spearman").loc["true", "estimated"]))


def attribute(engine: Engine, prompt: Prompt, cells: Sequence[Intervention], metric: Metric, *, donors: Mapping[str, Donor]) -> Estimates:
    """Estimate how each cell, alone, changes a metric: one forward and one backward pass for all of them.

    Args:
        engine: with the model.
        prompt: one example or a batch.
        cells: interventions that write values at the merged embedding or later (Ablate, PatchIn, AblateHeads).
        metric: of the last position's logits, per example.
        donors: values that cells take by name, beside ``model.donors``.

    Raises:
        InterventionError: for another kind of intervention, or one that acts before the merged embedding.
        StudyError: for a metric that does not give one number per example.
    """
    model, effects = engine.model, np.zeros((len(cells), len(prompt)))
    window, examples = model.sites.window, range(len(prompt))
    with window.showing(prompt.layouts, examples):
        writes = [_writes(model, cell, [Row(example, (cell,)) for example in examples], donors) for cell in cells]
        names = sorted({name for found in writes for name, _ in found})
        values, gradients = _gradients(model, prompt, names, metric)
        for index, found in enumerate(writes):
            for name, write in found:
                for example in examples:
                    delta = write.delta(values[name], model.sites.point(name).site, window, example)
                    effects[index, example] += (delta * gradients[name]).sum().item()
    return Estimates(effects, engine, prompt, cells, metric, donors)


def _writes(model: HookedVLM, cell: Intervention, rows: Sequence[Row], donors: Mapping[str, Donor]) -> list[tuple[str, Values]]:
    writes = list(changes(model.sites, rows, {**model.donors, **donors}))
    early = [name for name, _ in writes if site_point(name, model.sites) is None]
    if early or not writes:
        got = f"{cell}" if not writes else f"{cell}, which acts at {early[0]}"
        raise InterventionError("an intervention that writes values at hook_merged_embed or later", got, "Measure it with the engine.")
    return writes


def _gradients(model: HookedVLM, prompt: Prompt, names: Sequence[str], metric: Metric) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return activations and the gradient of the metric's sum over examples; the vision tower is left out of the graph."""
    kept: dict[str, Tensor] = {}

    def leaf(value: Tensor, hook: object) -> Tensor:
        return value.detach().requires_grad_()

    def keep(value: Tensor, hook: LiveSite) -> Tensor:
        # a tensor of its own, since a hook may see a view (split into heads) that the model does not go on with
        kept[hook.site.name] = value.clone()
        return kept[hook.site.name]

    leaves = (MERGED, *model.sites.point(MERGED).site.companions)
    hooks = [*((name, leaf) for name in leaves), *((name, keep) for name in names)]
    with torch.enable_grad(), model.hooks(fwd_hooks=hooks):
        numbers = metric(model.hf(**prompt.tensors, use_cache=False, logits_to_keep=1).logits)
        if numbers.shape != (len(prompt),):
            got = f"shape {list(numbers.shape)}"
            raise StudyError(f"a metric of one number per example ({len(prompt)})", got, "Do not average over examples.")
        total = numbers.sum()
    found = torch.autograd.grad(total, [kept[name] for name in names], allow_unused=True)
    gradients = {name: torch.zeros_like(kept[name]) if g is None else g for name, g in zip(names, found, strict=True)}
    return {name: value.detach() for name, value in kept.items()}, gradients
