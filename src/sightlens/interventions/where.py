"""Positions as plain data inside an intervention: a selector, or a token set frozen with the layout it belongs to."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from sightlens.errors import InterventionError
from sightlens.layout import Layout, Selector, TokenSet, parse


@dataclass(frozen=True)
class Fixed:
    """The positions of a token set, valid for the one layout they were chosen on."""

    positions: tuple[int, ...]
    generated: bool
    name: str
    layout: str
    """Digest of the layout's structure."""

    def resolve(self, layout: Layout) -> TokenSet:
        """Return the token set on its own layout.

        Raises:
            InterventionError: on any other layout.
        """
        if layout.structure.digest != self.layout:
            raise InterventionError(
                f"the layout that {self.name!r} was chosen on",
                f"another one, {layout}",
                "Use a selector string, which fits any prompt, or choose the tokens on this prompt's layout.",
            )
        return replace(layout.at(list(self.positions), name=self.name), generated=self.generated)


Where = str | Selector | TokenSet | Fixed
"""What a user may write for positions; an intervention keeps a Selector or Fixed."""


def freeze_where(where: Where) -> Selector | Fixed:
    """Turn whatever a user calls positions into frozen, comparable data.

    Raises:
        SelectorError: when a selector string does not parse.
    """
    if isinstance(where, str):
        return parse(where)
    if isinstance(where, TokenSet):
        positions = tuple(sorted(where.positions.tolist()))
        return Fixed(positions, where.generated, where.name, where.structure.digest)
    return where


def resolve_where(where: Where, layout: Layout) -> TokenSet:
    """Return the positions on a layout."""
    frozen = freeze_where(where)
    return frozen.resolve(layout) if isinstance(frozen, Fixed) else layout.select(frozen)


def where_to_data(where: Selector | Fixed) -> str | dict[str, Any]:
    """Return JSON data: the selector's text, or the fixed positions."""
    if isinstance(where, Fixed):
        return {"positions": list(where.positions), "generated": where.generated, "name": where.name, "layout": where.layout}
    return str(where)


def where_from_data(data: object) -> Selector | Fixed:
    """Read what :func:`where_to_data` wrote.

    Raises:
        SelectorError: when a selector's text does not parse.
        InterventionError: when it is other data.
    """
    if isinstance(data, str):
        return parse(data)
    try:
        return Fixed(tuple(data["positions"]), data["generated"], data["name"], data["layout"])  # type: ignore[index]
    except (KeyError, TypeError) as problem:
        known = "positions, generated, name and layout"
        raise InterventionError(f"a selector's text, or {known}", repr(data), "Write positions as in `row[3]`.") from problem
