"""Which rows run from where, and what that costs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from sightlens.engine.start import FullRun, Point, Stage, find_start
from sightlens.errors import EngineError
from sightlens.interventions import MERGED, Intervention, Rearrangement
from sightlens.layout import Layout
from sightlens.model.rows import Row
from sightlens.model.sites import Sites

Cells = Sequence[Sequence[Intervention]]


@dataclass(frozen=True)
class Job:
    """One example under one cell."""

    cell: int
    row: Row


@dataclass(frozen=True)
class Pass:
    """Jobs that start at the same place; some may start a few positions later than they run.

    ``late`` says that the last MLP runs at every position, not only where it is read.
    """

    point: Point
    position: int
    jobs: tuple[Job, ...]
    late: bool = False

    @property
    def names(self) -> tuple[str, ...]:
        """The kept states that the pass starts from."""
        layer = self.point.layer
        if self.point.stage is Stage.AFTER_LAYER:
            return (f"blocks.{layer}.hook_resid_post",)
        if self.point.stage is Stage.AFTER_ATTENTION:
            return (f"blocks.{layer}.hook_resid_pre", f"blocks.{layer}.attn.hook_z")
        return ("hook_merged_embed",) if layer == 0 else (f"blocks.{layer}.hook_resid_pre",)


@dataclass(frozen=True)
class Schedule:
    """All jobs of a plan, sorted by what they need.

    Attributes:
        passes: from the clean run on.
        clean: jobs that touch nothing of the prompt.
        whole: jobs that run whole, with the reason.
        reinjected: sites of visual features that some pass adds again.
    """

    passes: tuple[Pass, ...]
    clean: tuple[Job, ...]
    whole: tuple[tuple[Job, str], ...]
    reinjected: tuple[str, ...] = ()

    @property
    def jobs(self) -> tuple[Job, ...]:
        """All of them."""
        return (*self.clean, *(job for job, _ in self.whole), *(job for one in self.passes for job in one.jobs))

    @property
    def needs_clean(self) -> bool:
        """Whether anything is taken from a clean run."""
        return bool(self.passes or self.clean)

    def with_clean(self, last: int) -> tuple[Pass, ...]:
        """Return the passes, and for rows that need none one that starts with the last position."""
        return (*self.passes, Pass(Point(0, Stage.WHOLE_LAYER), last, self.clean)) if self.clean else self.passes

    def for_generation(self, layouts: Sequence[Layout]) -> Schedule:
        """Return the schedule of a run in which the prompt's last position is computed apart from the others.

        Jobs that carry activations between it and others run whole.
        """
        passes, whole = [], list(self.whole)
        for one in self.passes:
            bound = [job for job in one.jobs if _moves_last(job, layouts[job.row.example])]
            whole += [(job, "the last position's activation is carried to or from others") for job in bound]
            passes.append(replace(one, jobs=tuple(job for job in one.jobs if job not in bound)))
        return replace(self, passes=tuple(one for one in passes if one.jobs), whole=tuple(whole))

    @property
    def names(self) -> tuple[str, ...]:
        """Every state to keep of the clean run."""
        return (*dict.fromkeys(name for one in self.passes for name in one.names), *self.reinjected)


def _moves_last(job: Job, layout: Layout) -> bool:
    moves = [intervention.moves(layout) for intervention in job.row.interventions if isinstance(intervention, Rearrangement)]
    return any(layout.length - 1 in places for move in moves for places in (move.targets, move.sources))


def schedule(cells: Cells, examples: Sequence[Sequence[int]], layouts: Sequence[Layout], sites: Sites, *, free: int) -> Schedule:
    """Sort jobs into passes.

    Args:
        cells: the interventions of each cell.
        examples: which examples of the prompt each cell runs on.
        layouts: of the prompt's examples.
        sites: of the model.
        free: jobs whose first positions are no further apart share a pass.

    Raises:
        EngineError: without cells, or with an example that the prompt does not have.
        InterventionError, HookError, SelectorError: when an intervention does not fit.
    """
    _check(cells, examples, len(layouts))
    starts: dict[tuple[Point, bool], list[tuple[int, Job]]] = {}
    clean: list[Job] = []
    whole: list[tuple[Job, str]] = []
    for cell, (interventions, chosen) in enumerate(zip(cells, examples, strict=True)):
        for example in chosen:
            job = Job(cell, Row(example, tuple(interventions)))
            start = find_start(interventions, layouts[example], sites)
            if start is None:
                clean.append(job)
            elif isinstance(start, FullRun):
                whole.append((job, start.reason))
            else:
                starts.setdefault((start.point, start.late), []).append((start.position, job))
    passes = [replace(one, late=late) for point, late in sorted(starts) for one in _grouped(point, starts[point, late], free)]
    again = sites.point(MERGED).site.companions if any(layout.views for layout in layouts) else ()
    early = any(one.point.layer < len(again) for one in passes)
    return Schedule(tuple(passes), tuple(clean), tuple(whole), again if early else ())


def _check(cells: Cells, examples: Sequence[Sequence[int]], count: int) -> None:
    if not cells:
        raise EngineError("at least one cell", "none", "Give a list of lists of interventions; [] is the untouched run.")
    fit = all(len(chosen) > 0 and len(set(chosen)) == len(chosen) and set(chosen) <= set(range(count)) for chosen in examples)
    if len(examples) != len(cells) or not fit:
        expected = f"for each of {len(cells)} cells, one or more examples below {count}, none twice"
        raise EngineError(expected, f"{examples}", "Leave examples= out for all of them.")


def _grouped(point: Point, starts: Sequence[tuple[int, Job]], free: int) -> list[Pass]:
    """Join jobs that start at nearly the same position."""
    passes: list[Pass] = []
    for position, job in sorted(starts, key=lambda start: start[0]):
        if passes and position - passes[-1].position <= free:
            last = passes.pop()
            passes.append(Pass(point, last.position, (*last.jobs, job)))
        else:
            passes.append(Pass(point, position, (job,)))
    return passes
