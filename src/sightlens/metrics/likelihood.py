"""What a model's logits say about an answer: log-probabilities, perplexity, probability of a number."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from sightlens.errors import MetricError


def answer_logprobs(
    logits: Float[Tensor, "*batch position vocab"], answer_ids: Int[Tensor, "*batch answer"], *, prompt_len: int
) -> Float[Tensor, "*batch answer"]:
    """Return the log-probability of each answer token under teacher forcing.

    Answer token t is predicted at position ``prompt_len - 1 + t``. Computed in float32 or better.

    Args:
        logits: of the whole sequence, prompt and answer (the last answer token's own logits are not read).
        answer_ids: the answer's tokens.
        prompt_len: positions before the answer, padding included; the same for each row.

    Raises:
        MetricError: for an empty answer, an empty prompt, too few positions, or an id outside the vocabulary.
    """
    count, start = answer_ids.shape[-1], prompt_len - 1
    if count == 0 or start < 0 or start + count > logits.shape[-2]:
        got = f"{count} answer tokens after {prompt_len} prompt positions in {logits.shape[-2]} positions"
        raise MetricError("logits at every position before an answer token", got, "Run prompt and answer together.")
    _check_ids(answer_ids, logits.shape[-1])
    rows = _wide(logits[..., start : start + count, :])
    return rows.gather(-1, answer_ids.long().unsqueeze(-1)).squeeze(-1) - rows.logsumexp(-1)


def mean_nll(logprobs: Float[Tensor, "*batch answer"], keep: Bool[Tensor, " answer"] | None = None) -> Float[Tensor, "*batch"]:
    """Return the mean negative log-likelihood over the kept answer tokens, in nats.

    Left-out tokens stay in the prefix, so the kept ones are still conditioned on them.

    Args:
        logprobs: from `answer_logprobs`.
        keep: True for tokens that count; None keeps all. ``~format.format_mask(pieces)`` keeps coordinates only.

    Raises:
        MetricError: when nothing is kept or the mask has another length.
    """
    keep = torch.ones(logprobs.shape[-1], dtype=torch.bool) if keep is None else keep
    if keep.shape[-1] != logprobs.shape[-1] or not bool(keep.any()):
        got = f"{int(keep.sum())} kept of a mask of {keep.shape[-1]} for {logprobs.shape[-1]} tokens"
        raise MetricError("at least one kept answer token", got, "Check that the answer holds more than format tokens.")
    return -logprobs[..., keep.to(logprobs.device)].mean(-1)


def perplexity(logprobs: Float[Tensor, "*batch answer"], keep: Bool[Tensor, " answer"] | None = None) -> Float[Tensor, "*batch"]:
    """Return ``exp(mean negative log-likelihood)`` over the kept answer tokens (P5, arXiv:2605.19792, mediation).

    Raises:
        MetricError: when nothing is kept or the mask has another length.
    """
    return mean_nll(logprobs, keep).exp()


def answer_probability(logprobs: Float[Tensor, "*batch answer"]) -> Float[Tensor, "*batch"]:
    """Return the probability of a whole answer, the product over its tokens."""
    return logprobs.sum(-1).exp()


def form_probability(
    logits: Float[Tensor, "*batch vocab"], forms: Sequence[Sequence[int]], *, restrict: bool = False
) -> Float[Tensor, "*batch form"]:
    """Return the probability of each answer at one position, summed over the tokens that spell it.

    A number is spelled by several tokens ("3", " 3", "three", " three"). Numbers of several tokens need
    `answer_logprobs` instead.

    Args:
        logits: at the position that predicts the first answer token.
        forms: per answer, the ids of the tokens that spell it.
        restrict: whether to divide by the mass of all given answers (P1, arXiv:2511.17699, does not say; default no).

    Raises:
        MetricError: when an answer has no token, an id is out of range, or two answers share one.
    """
    ids = [token for form in forms for token in form]
    if not forms or any(len(form) == 0 for form in forms) or len(set(ids)) != len(ids):
        got = f"{[list(form) for form in forms][:8]}"
        raise MetricError("one or more token ids per answer, each used once", got, "List the single-token spellings.")
    _check_ids(torch.tensor(ids), logits.shape[-1])
    probabilities = _wide(logits).softmax(-1)
    mass = torch.stack([probabilities[..., list(form)].sum(-1) for form in forms], dim=-1)
    return mass / mass.sum(-1, keepdim=True) if restrict else mass


def logit_difference(logits: Float[Tensor, "*batch vocab"], *, right: int, wrong: int) -> Float[Tensor, "*batch"]:
    """Return ``logit(right) - logit(wrong)`` (P2, arXiv:2603.18523, visual activation patching).

    Raises:
        MetricError: when both are the same token or one is out of range.
    """
    if right == wrong:
        raise MetricError("two different tokens", f"{right} twice", "Their difference is always 0; choose another pair.")
    _check_ids(torch.tensor([right, wrong]), logits.shape[-1])
    wide = _wide(logits)
    return wide[..., right] - wide[..., wrong]


def _wide(logits: Float[Tensor, "*batch vocab"]) -> Float[Tensor, "*batch vocab"]:
    """Raise half precision to float32, in which a log-sum over a large vocabulary keeps its digits."""
    return logits if logits.dtype == torch.float64 else logits.float()


def _check_ids(ids: Int[Tensor, "..."], vocab: int) -> None:
    if bool(((ids < 0) | (ids >= vocab)).any()):
        got = f"ids from {int(ids.min())} to {int(ids.max())}"
        raise MetricError(f"token ids within 0..{vocab - 1}", got, "Encode the answer with this model's tokenizer.")
