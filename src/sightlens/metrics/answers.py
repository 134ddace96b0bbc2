"""Reading short answers: yes or no, a count, names in a list."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Literal

import numpy as np
from jaxtyping import Bool, Int

from sightlens.errors import MetricError

Match = Literal["substring", "word", "item"]

NUMBER_WORDS = (
    *("zero", "one", "two", "three", "four", "five", "six", "seven", "eight"),
    *("nine", "ten", "eleven", "twelve", "thirteen", "fourteen", "fifteen"),
)
_NUMBER = r"(?:(?<!\w)[-+])?[0-9]+(?:\.[0-9]+)?(?:e[-+]?[0-9]+)?"
_COUNT = re.compile(rf"{_NUMBER}|\b(?:{'|'.join(NUMBER_WORDS)})\b", re.IGNORECASE)
MOST_DIGITS = 18  # as many as fit an array of counts
_WORD = re.compile(r"[^\W\d_]+")


def yes_no(answer: str) -> bool | None:
    """Read yes or no from the first word of an answer; None for any other word.

    P5 (arXiv:2605.19792, tasks) asks for existence this way in its mediation experiment.

    >>> yes_no(" Yes, there is."), yes_no("no"), yes_no("Nothing there")
    (True, False, None)
    """
    first = _WORD.search(answer)
    return {"yes": True, "no": False}.get(first.group().lower()) if first else None


def existence_matches(answer: str, *, present: bool) -> bool:
    """Say whether an answer's first word is the right one of yes and no; an unreadable answer is wrong."""
    return yes_no(answer) is present


def parse_count(answer: str) -> int:
    """Read a count: the first number, as digits or as a word from zero to fifteen; -1 when there is none or it is no count.

    P3 (arXiv:2604.10039, evaluation) reads answers so, except that its pattern also matches inside words ("one" in
    "someone") and inside numbers ("3" in "3.5"); here a number word must stand alone, and a number with a sign, a fraction
    or an exponent is no count.

    >>> parse_count("There are three."), parse_count("12 circles"), parse_count("someone"), parse_count("3.5")
    (3, 12, -1, -1)
    """
    found = _COUNT.search(answer)
    if found is None:
        return -1
    word = found.group().lower()
    if word in NUMBER_WORDS:
        return NUMBER_WORDS.index(word)
    return int(word) if word.isdecimal() and len(word) <= MOST_DIGITS else -1


def names_object(answer: str, name: str, *, match: Match = "substring") -> bool:
    """Say whether a list answer names an object, ignoring case.

    Args:
        answer: the generated list.
        name: the class looked for.
        match: "substring" is P5's rule (arXiv:2605.19792, tasks), under which "carrot" names a car; "word" needs whole
            words, under which "hot dog" names a dog; "item" needs a whole item of the comma-separated list.

    Raises:
        MetricError: for an empty name.

    >>> [names_object("Hot dog, carrot", "dog", match=m) for m in ("substring", "word", "item")]
    [True, True, False]
    """
    answer, name = answer.lower(), name.strip().lower()
    if not name:
        raise MetricError("the name of a class", "an empty string", "Give the class that the answer should name.")
    if match == "substring":
        return name in answer
    if match == "word":
        return re.search(rf"(?<!\w){re.escape(name)}(?!\w)", answer) is not None
    return name in {item.strip(" \t.:;*-").removeprefix("and ") for item in re.split(r"[,\n]", answer)}


def count_hits(answers: Sequence[str], truth: Sequence[int]) -> Bool[np.ndarray, " example"]:
    """Say for each answer whether it states the true count.

    Raises:
        MetricError: when the lengths differ or there is no example.
    """
    _same_length(answers, truth)
    return np.array([parse_count(answer) == count for answer, count in zip(answers, truth, strict=True)], dtype=bool)


def count_accuracy(predicted: Int[np.ndarray, " example"], truth: Int[np.ndarray, " example"]) -> dict[int, float]:
    """Return the accuracy at each true count, in order of the count (P3, arXiv:2604.10039, evaluation).

    Raises:
        MetricError: when the lengths differ or there is no example.
    """
    _same_length(predicted, truth)
    return {int(count): float((predicted[truth == count] == count).mean()) for count in np.unique(truth)}


def number_avoidance(predicted: Int[np.ndarray, " example"], truth: Int[np.ndarray, " example"]) -> dict[int, float]:
    """Return for each true count n how often n is said relative to how often it is right to say it.

    ``P(predicted = n) / P(truth = n)``: 0 is a number never said, 1 is none avoided or favoured (P3, arXiv:2604.10039,
    number avoidance). Meaningful on counts that are equally frequent.

    Raises:
        MetricError: when the lengths differ or there is no example.
    """
    _same_length(predicted, truth)
    return {int(count): float((predicted == count).sum() / (truth == count).sum()) for count in np.unique(truth)}


def _same_length(predicted: Sequence[object] | np.ndarray, truth: Sequence[object] | np.ndarray) -> None:
    if len(predicted) != len(truth) or len(truth) == 0:
        got = f"{len(predicted)} and {len(truth)}"
        raise MetricError("as many answers as truths, and at least one", got, "Give both for the same examples.")
