"""The six things a position can be: padding, special token, text, item of a list, visual token, separator."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from sightlens.errors import LayoutError

Role = Literal["system", "context", "question", "answer", "template"]
"""What a text is for. ``system``: the system sentence; ``question``: the user's own words; ``context``: of them, those
around a list of items; ``answer``: the teacher-forced or generated reply at the end; ``template``: what the chat template or
the processor adds."""

ROLES: tuple[str, ...] = get_args(Role)


@dataclass(frozen=True)
class Padding:
    """Positions ``start..stop`` that a batch added on the left or the right and that nothing attends to."""

    start: int
    stop: int


@dataclass(frozen=True)
class Special:
    """A control token outside every image, such as ``bos``; ``name`` is its name in selectors (``special[bos]``)."""

    start: int
    stop: int
    name: str


@dataclass(frozen=True)
class Text:
    """Words, with the role they play in the prompt."""

    start: int
    stop: int
    role: Role = "template"

    def __post_init__(self) -> None:
        """Refuse an unknown role."""
        if self.role not in ROLES:
            raise LayoutError(f"one of the text roles {', '.join(ROLES)}", repr(self.role), "Use `template` for other text.")


@dataclass(frozen=True)
class Visual:
    """A run of visual tokens: the cells ``first, first + 1, …`` of one view, counted in raster order."""

    start: int
    stop: int
    view: int
    first: int = 0


@dataclass(frozen=True)
class Item:
    """The tokens of one item of a list in the text; ``item[k]`` is the last of them, where the whole item has been read."""

    start: int
    stop: int


@dataclass(frozen=True)
class Separator:
    """A marker in an image's span, named ``start``, ``end``, ``newline``, ``row`` or ``column``, or between items, named ``list``."""

    start: int
    stop: int
    name: str


Segment = Padding | Special | Text | Item | Visual | Separator
