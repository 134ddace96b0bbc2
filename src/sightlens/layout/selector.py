"""Selectors: which positions are meant, as frozen data that prints back to the string it was read from."""

from __future__ import annotations

import abc
import difflib
import math
from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Literal, get_args

from sightlens.errors import SelectorError
from sightlens.layout.indices import Index
from sightlens.layout.words import WORDS

Reshaping = Literal["dilate", "erode", "ring"]
RESHAPINGS: tuple[str, ...] = get_args(Reshaping)
FUNCTIONS = ("random", "translate", "register", "top")
MOST_NESTED = 100  # finding, printing and hashing a selector recurse into it


class Selector(abc.ABC):
    """A description of positions, independent of any layout; ``str`` gives its canonical text."""

    binding: int = 4
    """How tightly the outermost sign holds: 1 ``|``, 2 ``&``, 3 ``~``, 4 everything else."""
    depth: int = 1
    """How many selectors are inside one another."""

    def _nest(self, *parts: Selector) -> None:
        """Count the depth, refusing one that recursion could not follow."""
        depth = 1 + max(part.depth for part in parts)
        if depth > MOST_NESTED:
            raise too_deep(MOST_NESTED)
        object.__setattr__(self, "depth", depth)

    @abc.abstractmethod
    def __str__(self) -> str:
        """Print as text that `parse` reads back to an equal selector."""

    def __or__(self, other: Selector) -> Selector:
        """Describe the positions of either."""
        return Either(self, other)

    def __and__(self, other: Selector) -> Selector:
        """Describe the positions of both."""
        return Both(self, other)

    def __invert__(self) -> Selector:
        """Describe all other positions."""
        return Not(self)


@dataclass(frozen=True)
class Word(Selector):
    """A word of the language with its indices, such as ``tile[0,1]``; ``tile`` alone prints as ``tile[*]``."""

    name: str
    indices: tuple[Index, ...] = ()

    def __post_init__(self) -> None:
        """Refuse an unknown word, and a wrong number or kind of indices."""
        if self.name not in WORDS:
            raise unknown_name(self.name)
        arities = WORDS[self.name].arities
        named = any(isinstance(index, str) for index in self.indices)
        if len(self.indices) not in arities or (named and self.name not in ("separator", "special")):
            count = " or ".join(map(str, arities))
            raise SelectorError(
                f"{count} {'indices' if arities != (1,) else 'index'} after `{self.name}`",
                f"`{self}`",
                "Write them as in `tile[0,1]`, `row[3]`, `row[1:3]`; names only as in `separator[newline]`.",
            )

    def __str__(self) -> str:
        """Print the word and its indices."""
        if self.name == "tile" and not self.indices:
            return "tile[*]"
        return f"{self.name}[{','.join(map(str, self.indices))}]" if self.indices else self.name


@dataclass(frozen=True)
class Not(Selector):
    """All positions but those of another selector; padding belongs to neither."""

    of: Selector
    binding = 3

    def __post_init__(self) -> None:
        """Refuse to nest too deep."""
        self._nest(self.of)

    def __str__(self) -> str:
        """Print with a prefix ``~``."""
        return f"~{_within(self.of, 3)}"


@dataclass(frozen=True)
class Both(Selector):
    """The positions of two selectors at once."""

    left: Selector
    right: Selector
    binding = 2

    def __post_init__(self) -> None:
        """Refuse to nest too deep."""
        self._nest(self.left, self.right)

    def __str__(self) -> str:
        """Print with an infix ``&``."""
        return f"{_within(self.left, 2)} & {_within(self.right, 3)}"


@dataclass(frozen=True)
class Either(Selector):
    """The positions of any of two selectors."""

    left: Selector
    right: Selector
    binding = 1

    def __post_init__(self) -> None:
        """Refuse to nest too deep."""
        self._nest(self.left, self.right)

    def __str__(self) -> str:
        """Print with an infix ``|``."""
        return f"{_within(self.left, 1)} | {_within(self.right, 2)}"


@dataclass(frozen=True)
class Reshape(Selector):
    """Another selector, grown (``dilate``), shrunk (``erode``), or the cells that growing adds (``ring``)."""

    of: Selector
    how: Reshaping
    p: int

    def __post_init__(self) -> None:
        """Refuse an empty ring, and to nest too deep."""
        self._nest(self.of)
        if self.how == "ring" and self.p < 1:
            raise SelectorError("a ring of at least one cell", str(self.p), "Use `.erode(1)` to shrink a set.")

    def __str__(self) -> str:
        """Print as a method call."""
        return f"{_within(self.of, 4)}.{self.how}({self.p})"


@dataclass(frozen=True)
class Random(Selector):
    """Tokens drawn uniformly from a pool (all visual tokens unless given).

    ``size`` is a number, a share of the pool between 0 and 1, or a selector that has as many tokens.
    """

    size: int | float | Selector
    seed: int
    pool: Selector | None = None

    def __post_init__(self) -> None:
        """Refuse a size or seed out of range, and to nest too deep."""
        if parts := [part for part in (self.size, self.pool) if isinstance(part, Selector)]:
            self._nest(*parts)
        _check_seed(self.seed)
        _check_size(self.size)

    def __str__(self) -> str:
        """Print as a function call."""
        return f"random({_joined(self.size, self.seed, self.pool)})"


@dataclass(frozen=True)
class Translate(Selector):
    """The shape of another selector, moved to a random other place in the pool (the picture unless given)."""

    of: Selector
    seed: int
    pool: Selector | None = None

    def __post_init__(self) -> None:
        """Refuse a negative seed, and to nest too deep."""
        self._nest(self.of, *([] if self.pool is None else [self.pool]))
        _check_seed(self.seed)

    def __str__(self) -> str:
        """Print as a function call."""
        return f"translate({_joined(self.of, self.seed, self.pool)})"


@dataclass(frozen=True)
class Register(Selector):
    """Visual tokens whose norm exceeds the mean of their image by more than ``deviations`` sample standard deviations.

    Source: the register control of Schaumlöffel et al. 2026 (arXiv 2605.19792), there with 2.0.
    """

    deviations: float | int

    def __post_init__(self) -> None:
        """Refuse what is no number."""
        object.__setattr__(self, "deviations", float(self.deviations))
        if not math.isfinite(self.deviations):
            raise SelectorError("a finite number of standard deviations", str(self.deviations), "Write `register(2.0)`.")

    def __str__(self) -> str:
        """Print as a function call."""
        return f"register({self.deviations!r})"


@dataclass(frozen=True)
class Top(Selector):
    """The visual tokens with the highest scores of those that the layout was given; ties go to the earlier position.

    ``size`` is a number, a share of the visual tokens between 0 and 1, or a selector that has as many tokens.
    Source: the integrated-gradients selector of Schaumlöffel et al. 2026 (arXiv 2605.19792).
    """

    size: int | float | Selector

    def __post_init__(self) -> None:
        """Refuse a size out of range, and to nest too deep."""
        if isinstance(self.size, Selector):
            self._nest(self.size)
        _check_size(self.size)

    def __str__(self) -> str:
        """Print as a function call."""
        return f"top({self.size})"


def walk(selector: Selector) -> Iterator[Selector]:
    """Yield a selector and all those inside it."""
    yield selector
    for field in fields(selector):  # type: ignore[arg-type]  # every selector is a dataclass
        inner = getattr(selector, field.name)
        if isinstance(inner, Selector):
            yield from walk(inner)


def unknown_name(name: str) -> SelectorError:
    """Return the error for a word or function that does not exist, with the nearest one that does."""
    known = [*WORDS, *FUNCTIONS]
    near = difflib.get_close_matches(name, known, n=1)
    hint = f"Did you mean `{near[0]}`?" if near else "Use one of them."
    return SelectorError(f"a selector word ({', '.join(known)})", repr(name), hint)


def too_deep(most: int) -> SelectorError:
    """Return the error for selectors inside one another that recursion could not follow."""
    do = "Use slices such as `row[1:3]`, or a set of positions, `layout.at([…])`."
    return SelectorError(f"at most {most} selectors inside one another", "more", do)


def _within(selector: Selector, binding: int) -> str:
    return str(selector) if selector.binding >= binding else f"({selector})"


def _joined(*arguments: object) -> str:
    return ", ".join(str(argument) for argument in arguments if argument is not None)


def _check_size(size: int | float | Selector) -> None:
    if (isinstance(size, int) and size < 0) or (isinstance(size, float) and not 0 < size < 1):
        raise SelectorError("a count of 0 or more, or a share between 0 and 1", str(size), "Write 12 or 0.08.")


def _check_seed(seed: int) -> None:
    if seed < 0:
        raise SelectorError("a seed of 0 or more", str(seed), "Choose another seed.")
