"""The entries that a table of a configuration file may hold, and of which kind each is."""

from __future__ import annotations

from collections.abc import Mapping, Set

from sightlens.errors import StudyError, listing

NAMES = {str: "text", int: "a whole number", list: "a list", dict: "a table"}
TOP: dict[str, type] = {"model": str, "store": str, "batch_size": int, "mean_images": str, "study": dict, "trial": list, "cell": list}
TRIAL: dict[str, type] = {
    **dict.fromkeys(("id", "image", "question", "kind", "answer", "mask"), str),
    "box": list,
    "number": int,
}
CELL: dict[str, type] = {"at": dict, "do": list}


def check_table(table: object, known: Mapping[str, type], *, where: str, needed: Set[str] = frozenset()) -> None:
    """Refuse a table with entries that are unknown, missing, or of another kind.

    Raises:
        StudyError: saying which, and where.
    """
    if not isinstance(table, dict):
        raise StudyError(f"a table in {where}", repr(table), "Write [[trial]] and [[cell]] with two brackets, `do` as a list of tables.")
    if unknown := set(table) - set(known):
        raise StudyError(f"entries of {where} among {listing(sorted(known))}", listing(sorted(unknown)), "Check the spelling.")
    if missing := needed - set(table):
        raise StudyError(f"{listing(sorted(needed))} in {where}", f"no {listing(sorted(missing))}", "Add them.")
    for name, value in table.items():
        if not isinstance(value, known[name]) or isinstance(value, bool):
            double = f" (write [[{name}]] with two brackets)" if known[name] is list and isinstance(value, dict) else ""
            raise StudyError(f"{name} in {where} to be {NAMES[known[name]]}", f"{value!r}{double}"[:200], "Mend the file.")


def numbers(values: list[object], *, where: str) -> tuple[float, float, float, float]:
    """Read ``[x0, y0, x1, y1]`` in pixels.

    Raises:
        StudyError: when they are not four numbers that span an area.
    """
    plain = [float(value) for value in values if isinstance(value, int | float) and not isinstance(value, bool)]
    if len(plain) != 4 or len(values) != 4 or not (plain[0] < plain[2] < float("inf") and plain[1] < plain[3] < float("inf")):
        raise StudyError("box = [x0, y0, x1, y1] in pixels, x0 < x1 and y0 < y1", f"{values} in {where}", "Give four numbers.")
    return plain[0], plain[1], plain[2], plain[3]
