"""How much memory a schedule needs, how many rows that lets run at once, and what all of it costs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from sightlens.engine.cost import ModelCost
from sightlens.engine.explanation import Explanation, in_bytes
from sightlens.engine.prefix import Keep
from sightlens.engine.schedule import Job, Pass, Schedule
from sightlens.engine.start import Point, Stage
from sightlens.errors import EngineError
from sightlens.interventions import Knockout
from sightlens.layout import Layout

WHOLE = Point(0, Stage.WHOLE_LAYER)


@dataclass(frozen=True)
class Resources:
    """What passes may use: the memory beside the model in bytes, how the clean run is kept, and what passes cost."""

    memory: int
    keep: Keep
    cost: ModelCost


@dataclass(frozen=True)
class Reading:
    """Which positions' logits are read, how many tokens are generated after the prompt, and whether gradients are wanted."""

    positions: tuple[int, ...]
    new_tokens: int = 0
    gradients: bool = False


@dataclass(frozen=True)
class Budget:
    """The memory and the operations of one way of running a schedule.

    Attributes:
        schedule: for this way of running.
        layouts: of the prompt's examples.
        reading: what is wanted.
        resources: what may be used.
    """

    schedule: Schedule
    layouts: Sequence[Layout]
    reading: Reading
    resources: Resources

    @property
    def length(self) -> int:
        """Positions of the prompt."""
        return self.layouts[0].length

    @property
    def kept(self) -> int:
        """What the clean run leaves on the model's device, bytes; nothing where none is needed."""
        cost, keep = self.resources.cost, self.resources.keep
        if not self.schedule.needs_clean:
            return 0
        per_position = cost.layers * cost.kv + len(self.schedule.names) * max(cost.width, cost.pair // 4)  # z may be the wider
        beside = keep.device is None or torch.device(keep.device).type == cost.device
        size = (keep.dtype.itemsize if keep.dtype else cost.itemsize) if beside else 0
        masks = 2 * self.length**2 * (cost.itemsize if cost.eager else 1) if cost.bidirectional else 0
        logits = len(self.reading.positions) * cost.vocabulary * cost.itemsize
        return len(self.layouts) * (self.length * (per_position * size + 5 * 8) + logits + masks)

    @property
    def clean(self) -> int:
        """The most that the clean run needs while it is made, bytes: all examples at once."""
        if not self.schedule.needs_clean:
            return 0
        return self.kept + sum(self._whole(layout, stays=0, pixels=False) for layout in self.layouts)

    def row(self, one: Pass) -> int:
        """Return what one row of a pass needs at most, bytes."""
        cost, queries, keys = self.resources.cost, max(1, self.length - one.position), self.length + self.reading.new_tokens
        by_head = _by_head(one.jobs)
        needed = cost.row_bytes(queries, keys, read=len(self.reading.positions), by_head=by_head)
        if self.reading.new_tokens:
            needed += cost.stay_bytes(keys)
        return needed + (cost.graph_bytes(cost.layers - one.point.layer, queries, keys, by_head=by_head) if self.reading.gradients else 0)

    @property
    def whole(self) -> int:
        """What one row that runs whole needs at most, bytes."""
        jobs = [job for job, _ in self.schedule.whole]
        layouts = [self.layouts[k] for k in {job.row.example for job in jobs}]
        stays = self.resources.cost.stay_bytes(self.length + self.reading.new_tokens) if self.reading.new_tokens else 0
        return max((self._whole(layout, stays=stays, pixels=True, by_head=_by_head(jobs)) for layout in layouts), default=0)

    def _whole(self, layout: Layout, *, stays: int, pixels: bool, by_head: bool = False) -> int:
        cost, reading = self.resources.cost, self.reading
        keys = self.length + reading.new_tokens
        decoder = cost.row_bytes(self.length, keys, read=len(reading.positions), by_head=by_head) + stays
        vision = cost.encoding_bytes(layout)
        graph = cost.graph_bytes(cost.layers, self.length, keys, by_head=by_head) + 4 * vision if reading.gradients and pixels else 0
        return decoder + vision + graph

    def rows(self, one: Pass) -> int:
        """Return how many rows of a pass run at once; 0 when not even one fits."""
        fast = self.resources.cost.fast_rows(max(1, self.length - one.position))
        return self._fitting(self.row(one), len(one.jobs), fast)

    @property
    def whole_rows(self) -> int:
        """How many rows that run whole do so at once; 0 when not even one fits."""
        fast = self.resources.cost.fast_rows(self.length)
        return self._fitting(self.whole, len(self.schedule.whole), fast)

    @property
    def generating_rows(self) -> int:
        """How many rows, of whichever passes, generate at once; 0 when not even one fits."""
        passes = self.schedule.with_clean(self.length - 1)
        return self._fitting(max(map(self.row, passes), default=0), sum(len(one.jobs) for one in passes), None)

    def _fitting(self, size: int, count: int, fast: int | None) -> int:
        room = (self.resources.memory - self.kept) // max(size, 1)
        fast = None if self.reading.new_tokens else fast  # decoding steps are short
        return max(0, min(count, room if fast is None else min(room, fast)))

    @property
    def needed(self) -> int:
        """The least memory with which it runs, bytes."""
        passes = self.schedule.with_clean(self.length - 1) if self.reading.new_tokens else self.schedule.passes
        return max(self.clean, self.kept + max([*map(self.row, passes), self.whole]))

    def check(self) -> None:
        """Refuse a budget that holds not even the clean run and one row.

        Raises:
            EngineError: saying what it takes.
        """
        if self.needed > self.resources.memory:
            expected = f"memory={in_bytes(self.needed)} or more, for the clean run and one row"
            do = "Raise it, shorten the prompt, take fewer examples at once, or keep the clean run smaller: Engine(keep=Keep(…))."
            raise EngineError(expected, f"memory={in_bytes(self.resources.memory)}", do)

    @property
    def batch(self) -> int:
        """The most that one batch of rows needs, bytes; of one row where not even that fits."""
        sizes = [max(1, self.whole_rows) * self.whole]
        if self.reading.new_tokens:
            sizes += [max(1, self.generating_rows) * self.row(one) for one in self.schedule.with_clean(self.length - 1)]
        else:
            sizes += [max(1, self.rows(one)) * self.row(one) for one in self.schedule.passes]
        return max(sizes)

    @property
    def at_once(self) -> int:
        """The most rows that run at once."""
        counts = [self.generating_rows] if self.reading.new_tokens else [self.rows(one) for one in self.schedule.passes]
        return max([*counts, self.whole_rows])

    @property
    def results(self) -> int:
        """What holding all results takes, bytes: logits, and with gradients what the rows keep for the backward pass."""
        cost, reading = self.resources.cost, self.reading
        if reading.new_tokens:
            return 0
        graphs = sum(len(one.jobs) * self.row(one) for one in self.schedule.passes) + len(self.schedule.whole) * self.whole
        logits = len(self.schedule.jobs) * len(reading.positions) * cost.vocabulary * cost.itemsize
        return logits + (graphs if reading.gradients else 0)

    def explain(self) -> Explanation:
        """Count everything."""
        schedule = self.schedule
        return Explanation(
            cells=len({job.cell for job in schedule.jobs}),
            examples=len(self.layouts),
            positions=self.length,
            passes=len(schedule.passes),
            rows=len(schedule.jobs),
            rows_at_once=self.at_once,
            clean_rows=len(schedule.clean),
            full_runs=dict(Counter(reason for _, reason in schedule.whole)),
            flops=self.operations(),
            loop_flops=self.loop_operations(),
            kept_bytes=self.kept,
            clean_bytes=self.clean,
            batch_bytes=self.batch,
            result_bytes=self.results,
            needed_bytes=self.needed,
            memory=self.resources.memory,
        )

    def operations(self) -> int:
        """Return the floating-point operations of the schedule."""
        return sum(self._operations())

    def _operations(self) -> Iterator[int]:
        cost, read, new = self.resources.cost, len(self.reading.positions), self.reading.new_tokens
        if self.schedule.needs_clean:
            yield sum(self._forward(k, read) for k in range(len(self.layouts)))
        for job, _ in self.schedule.whole:
            yield self._forward(job.row.example, 1 if new else read) + self._steps(new - 1)
        if new:
            yield len(self.schedule.clean) * self._steps(new)
        stop = self.length - 1 if new else self.length
        for one in self.schedule.passes:
            own = 0 if new else sum(position >= one.position for position in self.reading.positions)
            work = cost.decoder(one.point, max(0, stop - one.position), stop, read=None if one.late else own)
            yield len(one.jobs) * (work + cost.unembedding(own) + self._steps(new))

    def loop_operations(self) -> int:
        """Return the operations of one full pass per row, which reads the logits of every position, or generates."""
        new = self.reading.new_tokens
        return sum(self._forward(job.row.example, 1 if new else self.length) + self._steps(new - 1) for job in self.schedule.jobs)

    def _forward(self, example: int, read: int) -> int:
        cost = self.resources.cost
        return cost.encoding(self.layouts[example]) + cost.decoder(WHOLE, self.length, self.length) + cost.unembedding(read)

    def _steps(self, count: int) -> int:
        """Return the operations of decoding so many last tokens one by one."""
        cost, new = self.resources.cost, self.reading.new_tokens
        keys = self.length + new - 1 - (count - 1) / 2
        return round(max(0, count) * (cost.decoder(WHOLE, 1, 0) + cost.layers * cost.pair * keys + cost.unembedding(1)))


def _by_head(jobs: Sequence[Job]) -> bool:
    return any(isinstance(one, Knockout) and one.heads is not None for job in jobs for one in job.row.interventions)
