"""Which visual tokens does an answer's probability come from? Integrated gradients, and tokens of unusual norm."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from sightlens.errors import ExtraError, InterventionError, StudyError
from sightlens.experiments.measures import counted_tokens
from sightlens.experiments.norms import bind_norms
from sightlens.experiments.trial import Trial
from sightlens.families import Prompt
from sightlens.interventions import MERGED, Mean
from sightlens.layout import Layout, TokenSet
from sightlens.metrics import answer_logprobs
from sightlens.model import HookedVLM


@dataclass(frozen=True)
class Integration:
    """How gradients are integrated; the paper states 50 steps and the mean baseline (arXiv 2605.19792, selectors).

    Attributes:
        steps: between the baseline and the input.
        method: captum's rule; "riemann_middle" averages over evenly spaced steps, as the paper does but for half a step;
            "gausslegendre" closes the completeness gap with fewer.
        baseline: "mean", the donor that the model was given, or "zero", at visual positions; text stays as it is.
        channels: whether a token's score is the sum of absolute contributions of its channels ("abs_then_sum", as public code of
            the paper's ancestors) or the absolute value of their sum ("sum_then_abs"); they rank tokens differently.
        rows: steps run at once.
    """

    steps: int = 50
    method: Literal["riemann_middle", "gausslegendre"] = "riemann_middle"
    baseline: Literal["mean", "zero"] = "mean"
    channels: Literal["abs_then_sum", "sum_then_abs"] = "abs_then_sum"
    rows: int = 8

    def __post_init__(self) -> None:
        """Refuse too few steps or rows."""
        if self.steps < 2 or self.rows < 1:
            raise StudyError("at least 2 steps and 1 row", f"{self.steps} and {self.rows}", "Use 50 steps.")


@dataclass(frozen=True, eq=False)
class Attribution:
    """A score for every visual token of one example.

    Attributes:
        scores: not negative, in the order of positions.
        positions: of the visual tokens.
        layout: of the prompt without its answer.
        value: log-probability of the answer's counted tokens, in nats.
        baseline: the same with the baseline at all visual positions.
        gap: sum of all signed contributions minus ``value - baseline``; 0 if the integration were exact.
    """

    scores: Float[np.ndarray, " token"]
    positions: Int[np.ndarray, " token"]
    layout: Layout
    value: float
    baseline: float
    gap: float

    @property
    def relative_gap(self) -> float:
        """The gap as a share of ``value - baseline``; report it beside the scores. NaN where nothing changed."""
        change = self.value - self.baseline
        return abs(self.gap / change) if change else float("nan")

    def select(self, count: int) -> TokenSet:
        """Return the tokens of the highest scores, for the prompt that was scored; ties go to the earlier position.

        Raises:
            StudyError: when there are not so many tokens.
        """
        if not 0 < count <= len(self.scores):
            raise StudyError(f"1 to {len(self.scores)} tokens", str(count), "Take as many as the object has.")
        order = np.argsort(-self.scores, kind="stable")[:count]
        return self.layout.at(self.positions[order], name=f"integrated_gradients({count})")


def integrated_gradients(model: HookedVLM, trial: Trial, *, settings: Integration | None = None) -> Attribution:
    """Score each visual token by how much of the right answer's log-probability it brings, with captum.

    ``IG = (x − b) · ∫ ∂F/∂x`` at the merged embedding (Sundararajan et al. 2017, arXiv 1703.01365), F the log-probability of the
    answer under teacher forcing; of a box, of its coordinates only.

    Raises:
        ExtraError: without captum.
        InterventionError: when the baseline is "mean" and the model has no dataset mean, or the model adds visual features
            again after the merged embedding.
    """
    chosen = settings or Integration()
    if again := model.sites.point(MERGED).site.companions:
        do = "Ablate token by token with token_effects."
        raise InterventionError(f"a model whose image content comes in at {MERGED} alone", f"one that adds it again at {again[0]}", do)
    bare = model.prepare(trial.image, trial.question.text)
    prompt = model.with_answers(bare, trial.answer(model.box_format))
    positions = bare.layout.visual_tokens()["position"]
    score, visual = _score(model, trial, prompt, positions)
    baseline = _baseline(model, chosen, visual)
    contributions = _integrate(score, visual, baseline, chosen)
    with torch.no_grad():
        value, reference = float(score(visual)), float(score(baseline))
    channels = contributions[0].double()
    scores = channels.abs().sum(-1) if chosen.channels == "abs_then_sum" else channels.sum(-1).abs()
    gap = float(channels.sum()) - (value - reference)
    return Attribution(scores.cpu().numpy(), positions.astype(np.int64), bare.layout, value, reference, gap)


def register_tokens(model: HookedVLM, prompt: Prompt, *, deviations: float = 2.0) -> tuple[TokenSet, ...]:
    """Return each example's visual tokens whose merged embedding has an unusually large norm: the selector ``register(…)``.

    Schaumlöffel et al. 2026 (arXiv 2605.19792), register tokens: above the mean by two (sample) standard deviations.
    """
    return tuple(layout.select(f"register({deviations})") for layout in bind_norms(model, prompt).layouts)


Score = Callable[[Float[Tensor, "row token d_model"]], Float[Tensor, " row"]]


def _score(model: HookedVLM, trial: Trial, prompt: Prompt, positions: np.ndarray) -> tuple[Score, Tensor]:
    """Return F as a function of the visual tokens' merged embeddings, and those of the prompt."""
    with torch.no_grad():
        _, cache = model.run_with_cache(prompt, names_filter=MERGED)
    merged, where = cache[MERGED].detach(), torch.as_tensor(positions, device=model.device)
    start = prompt.layout.prompt_stop
    answer = prompt.tensors["input_ids"][:, start:]
    keep = counted_tokens(model, trial, answer[0].tolist()).to(model.device)

    def score(visual: Tensor) -> Tensor:
        rows = len(visual)
        embeds = merged.expand(rows, -1, -1).index_copy(1, where, visual.to(merged.dtype))
        masks = {name: prompt.tensors[name].expand(rows, -1) for name in ("attention_mask", "position_ids")}
        logits = model.hf(inputs_embeds=embeds, **masks, use_cache=False).logits
        return (answer_logprobs(logits, answer.expand(rows, -1), prompt_len=start) * keep).sum(-1)

    return score, merged[:, where].float()


def _baseline(model: HookedVLM, settings: Integration, visual: Tensor) -> Tensor:
    if settings.baseline == "zero":
        return torch.zeros_like(visual)
    mean = model.donors.get("mean")
    if not isinstance(mean, Mean) or mean.site != MERGED:
        got = "none" if mean is None else f"{type(mean).__name__} of another site"
        raise InterventionError(f"the donor 'mean', measured at {MERGED}", got, "Call model.fit_mean(prompts, source=…) first.")
    return mean.vector.to(visual).expand_as(visual)


def _integrate(score: Score, visual: Tensor, baseline: Tensor, settings: Integration) -> Tensor:
    method: Any = _captum_gradients()(score)
    return method.attribute(
        visual, baselines=baseline, n_steps=settings.steps, method=settings.method, internal_batch_size=settings.rows
    ).detach()


def _captum_gradients() -> Any:
    try:
        from captum.attr import IntegratedGradients
    except ImportError as problem:
        raise ExtraError.missing("captum", "attribution") from problem
    return IntegratedGradients
