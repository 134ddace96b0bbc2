"""A list of items in the text whose items and separators keep their names, as studies of counting need it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from sightlens.errors import PromptError
from sightlens.layout import Item, Segment, Separator, Text

Offsets = Sequence[tuple[int, int]]
Span = tuple[int, int, str]
"""First character, the one after the last, and what the text between them is: a role, ``item`` or ``separator``."""


@dataclass(frozen=True)
class ItemList:
    """A list and a question about it, in place of a plain text.

    ``item[k]`` selects the last sub-token of an item, ``separator[k]`` what stands between two, ``context`` the list with the
    words around it, ``question`` the question. The templates of "Understanding Counting Mechanisms in Large Language and
    Vision-Language Models" (arXiv 2511.17699) are not published; the words around the list are yours to choose.

    >>> ItemList(("apple", "apple", "plum"), "How many items are there?", opening="List: ").text
    'List: apple, apple, plum. How many items are there?'
    """

    items: tuple[str, ...]
    question: str
    separator: str = ", "
    opening: str = ""
    closing: str = "."
    order: Literal["list_first", "question_first"] = "list_first"

    def __post_init__(self) -> None:
        """Refuse items without letters and an unknown order.

        Raises:
            PromptError: saying which.
        """
        object.__setattr__(self, "items", tuple(self.items))
        if not self.items or any(not item.strip() or item != item.strip() for item in self.items) or not self.separator:
            raise PromptError("items without spaces around them, and a separator", f"{self.items}, {self.separator!r}", "Strip them.")
        if self.order not in ("list_first", "question_first"):
            raise PromptError("order list_first or question_first", repr(self.order), "Check the spelling.")

    @property
    def text(self) -> str:
        """The words as the model reads them."""
        return self._parts()[0]

    def spans(self) -> list[Span]:
        """Return what each stretch of the text is, roles first."""
        return self._parts()[1]

    def _parts(self) -> tuple[str, list[Span]]:
        listing = self.opening + self.separator.join(self.items) + self.closing
        asked = self.question.strip()
        whole = f"{listing} {asked}" if self.order == "list_first" else f"{asked} {listing}"
        start = 0 if self.order == "list_first" else len(asked) + 1
        question = (
            len(listing) + 1 if self.order == "list_first" else 0,
            len(whole) if self.order == "list_first" else len(asked),
            "question",
        )
        spans: list[Span] = [question, (start, start + len(listing), "context")]
        place = start + len(self.opening)
        for index, item in enumerate(self.items):
            if index:
                spans.append((place, place + len(self.separator), "separator"))
                place += len(self.separator)
            spans.append((place, place + len(item), "item"))
            place += len(item)
        if whole != whole.strip():
            raise PromptError("a list without spaces around it", repr(whole), "Strip opening and closing.")
        return whole, spans


def mark_text(offsets: Offsets, text: str, spans: Sequence[Span]) -> list[Segment]:
    """Return the segments that spans of characters became.

    Args:
        offsets: first character and the one after the last of every token; equal for tokens that stand for no text.
        text: that was tokenized.
        spans: in characters of the text.

    Raises:
        PromptError: when one token holds parts of an item and of a separator.
    """
    found: list[Segment] = []
    owner: dict[int, Span] = {}
    for span in spans:
        inside = _tokens(offsets, text, span)
        if span[2] in ("item", "separator"):
            for k in inside:
                if k in owner or _beyond(offsets[k], text, span):
                    raise PromptError(
                        "items and separators of tokens of their own",
                        f"{text[offsets[k][0] : offsets[k][1]]!r} in one token",
                        "Choose another separator, such as ' , ' or a line break.",
                    )
                owner[k] = span
            if not inside:
                raise PromptError("a token for every item and separator", repr(text[span[0] : span[1]]), "Choose another separator.")
        if inside:
            found.append(_segment(inside[0], inside[-1] + 1, span[2]))
    return found


def _tokens(offsets: Offsets, text: str, span: Span) -> list[int]:
    """Return the tokens of a span; spaces at its ends belong to it only if it is nothing else."""
    start, stop, _ = span
    words = text[start:stop]
    if words.strip():
        start, stop = start + len(words) - len(words.lstrip()), stop - len(words) + len(words.rstrip())
    return [k for k, (a, b) in enumerate(offsets) if a < stop and b > start and b > a]


def _beyond(token: tuple[int, int], text: str, span: Span) -> bool:
    """Say whether a token holds more than spaces outside of a span."""
    return bool((text[token[0] : max(token[0], span[0])] + text[min(span[1], token[1]) : token[1]]).strip())


def _segment(start: int, stop: int, what: str) -> Segment:
    if what == "item":
        return Item(start, stop)
    return Separator(start, stop, "list") if what == "separator" else Text(start, stop, what)  # type: ignore[arg-type]
