"""Read a selector from text by precedence climbing: ``|`` below ``&`` below ``~`` below methods."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

from sightlens.errors import SelectorError
from sightlens.layout.indices import Index, Span
from sightlens.layout.selector import (
    FUNCTIONS,
    RESHAPINGS,
    Both,
    Either,
    Not,
    Random,
    Register,
    Reshape,
    Selector,
    Top,
    Translate,
    Word,
    too_deep,
    unknown_name,
)
from sightlens.layout.words import WORDS

MOST_OPEN = 40  # an open parenthesis takes six calls, and Python allows a thousand
TOKEN = re.compile(
    r"(?P<space>\s+)|(?P<float>-?\d+(?:\.\d+(?:[eE][+-]?\d+)?|[eE][+-]?\d+))|(?P<int>-?\d+)|(?P<name>[A-Za-z_]\w*)|(?P<sign>[|&~()\[\],.:*])"
)


@dataclass(frozen=True)
class _Token:
    kind: str
    text: str
    start: int


@lru_cache(maxsize=1024)
def parse(text: str) -> Selector:
    """Return the selector that a string describes.

    >>> str(parse("tile[0,1]&~(row[0]|border.dilate( 1 ))"))
    'tile[0,1] & ~(row[0] | border.dilate(1))'

    Raises:
        SelectorError: with the place of the mistake under a caret, the words that exist, and the nearest one.
    """
    reader = _Reader(text, _tokens(text))
    selector = reader.either()
    if reader.peek.kind != "end":
        raise reader.error("the end of the selector, `|` or `&`", "Join selectors with `|` or `&`.")
    return selector


def _tokens(text: str) -> list[_Token]:
    tokens, start = [], 0
    while start < len(text):
        match = TOKEN.match(text, start)
        if match is None or match.lastgroup is None:
            raise _mistake(text, start, SelectorError("a selector", repr(text[start]), "Remove this character."))
        if match.lastgroup != "space":
            tokens.append(_Token(match.lastgroup, match.group(), start))
        start = match.end()
    return [*tokens, _Token("end", "the end", len(text))]


def _mistake(text: str, start: int, error: SelectorError) -> SelectorError:
    return SelectorError(error.expected, error.got, f"{error.do}\n  {text}\n  {' ' * start}^")


class _Reader:
    """A place in a list of tokens, moved forward by each rule of the grammar."""

    def __init__(self, text: str, tokens: list[_Token]) -> None:
        self.text, self.tokens, self.place, self.open = text, tokens, 0, 0

    @property
    def peek(self) -> _Token:
        return self.tokens[self.place]

    def error(self, expected: str, do: str) -> SelectorError:
        return _mistake(self.text, self.peek.start, SelectorError(expected, f"`{self.peek.text}`", do))

    def take(self, sign: str) -> bool:
        """Move past a sign if it comes next."""
        found = self.peek.kind == "sign" and self.peek.text == sign
        self.place += found
        return found

    def need(self, sign: str) -> None:
        if not self.take(sign):
            raise self.error(f"`{sign}`", f"Add `{sign}` here.")

    def token(self, kind: str, expected: str) -> str:
        if self.peek.kind != kind:
            raise self.error(expected, f"Write {expected} here.")
        self.place += 1
        return self.tokens[self.place - 1].text

    def either(self) -> Selector:
        self.open += 1
        if self.open > MOST_OPEN:
            raise too_deep(MOST_OPEN)
        left = self.both()
        while self.take("|"):
            left = Either(left, self.both())
        self.open -= 1
        return left

    def both(self) -> Selector:
        left = self.negated()
        while self.take("&"):
            left = Both(left, self.negated())
        return left

    def negated(self) -> Selector:
        signs = 0
        while self.take("~"):
            signs += 1
        inner = self.reshaped()
        for _ in range(signs):
            inner = Not(inner)
        return inner

    def reshaped(self) -> Selector:
        inner = self.atom()
        while self.take("."):
            start = self.place
            if self.peek.text not in RESHAPINGS:
                raise self.error(f"one of the methods {', '.join(RESHAPINGS)}", "Check the spelling.")
            how = self.token("name", "a method")
            self.need("(")
            p = int(self.token("int", "a whole number of cells"))
            self.need(")")
            inner = self.built(start, Reshape, inner, how, p)
        return inner

    def atom(self) -> Selector:
        if self.take("("):
            inner = self.either()
            self.need(")")
            return inner
        start = self.place
        name = self.token("name", "a selector word")
        if name in FUNCTIONS:
            return self.function(name, start)
        name = {"visual": "image"}.get(name, name)
        if name not in WORDS:
            raise _mistake(self.text, self.tokens[start].start, unknown_name(name))
        indices = self.indices()
        return self.built(start, Word, name, () if name == "tile" and indices == (Span(),) else indices)

    def indices(self) -> tuple[Index, ...]:
        if not self.take("["):
            return ()
        found = [self.index()]
        while self.take(","):
            found.append(self.index())
        self.need("]")
        return tuple(found)

    def index(self) -> Index:
        if self.take("*"):
            return Span()
        if self.peek.kind == "name":
            return self.token("name", "a name")
        start = int(self.token("int", "a number")) if self.peek.kind == "int" else None
        if self.take(":"):
            return Span(start, int(self.token("int", "a number")) if self.peek.kind == "int" else None)
        if start is None:
            raise self.error("a number, a slice, a name or `*`", "Write the index as in `row[3]`, `row[1:3]` or `tile[*]`.")
        return start

    def function(self, name: str, start: int) -> Selector:
        self.need("(")
        counted = name in ("random", "top") and self.peek.kind in ("int", "float")
        first = self.number() if name == "register" or counted else self.either()
        if name in ("register", "top"):
            self.need(")")
            return self.built(start, Register if name == "register" else Top, first)
        self.need(",")
        seed = int(self.token("int", "a seed"))
        pool = self.either() if self.take(",") else None
        self.need(")")
        return self.built(start, Random if name == "random" else Translate, first, seed, pool)

    def number(self) -> int | float:
        if self.peek.kind == "float":
            return float(self.token("float", "a number"))
        return int(self.token("int", "a number"))

    def built(self, start: int, kind: Callable[..., Selector], *parts: object) -> Selector:
        """Make a node, and show where it began if it refuses its parts."""
        try:
            return kind(*parts)
        except SelectorError as error:
            raise _mistake(self.text, self.tokens[start].start, error) from None
