"""A plan: cells over a prompt, sorted into passes and ready to run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers.cache_utils import Cache as KeyValueCache

from sightlens.engine.batches import in_batches, refusing_to_run_out
from sightlens.engine.budget import Budget, Reading, Resources
from sightlens.engine.explanation import Explanation
from sightlens.engine.prefix import Prefix, run_clean, window_arguments
from sightlens.engine.reinjection import reinjected
from sightlens.engine.replay import stepping_over
from sightlens.engine.rowcache import finish, joined, row_cache
from sightlens.engine.schedule import Job, Pass, Schedule
from sightlens.engine.unhooked import check_unhooked
from sightlens.errors import EngineError
from sightlens.families import Prompt
from sightlens.families.compat import cache_keyword
from sightlens.model import HookedVLM
from sightlens.model.apply import Donor, applied
from sightlens.model.generation import generation_settings
from sightlens.model.rows import Row, Touched


@dataclass(frozen=True, eq=False)
class Plan:
    """Cells over a prompt, sorted; made by :meth:`Engine.plan`.

    Attributes:
        model: that runs.
        prompt: one example or a batch.
        schedule: the jobs.
        reads: positions whose logits are read.
        donors: values that interventions take by name.
        resources: memory.
    """

    model: HookedVLM
    prompt: Prompt
    schedule: Schedule
    reads: tuple[int, ...]
    donors: Mapping[str, Donor]
    resources: Resources

    def explain(self, *, new_tokens: int = 0, gradients: bool = False) -> Explanation:
        """Count what the plan costs, and what a loop of full passes would.

        Args:
            new_tokens: generated after the prompt, when :meth:`generate` will run.
            gradients: whether ``logits(gradients=True)`` will run.
        """
        return self._budget(new_tokens=new_tokens, gradients=gradients).explain()

    def _budget(self, *, new_tokens: int = 0, gradients: bool = False) -> Budget:
        schedule = self.schedule.for_generation(self.prompt.layouts) if new_tokens else self.schedule
        return Budget(schedule, self.prompt.layouts, Reading(self.reads, new_tokens, gradients), self.resources)

    @cached_property
    def prefix(self) -> Prefix:
        """The clean run of all examples, made on first use and kept as long as the plan lives.

        Raises:
            EngineError: when memory runs out.
        """
        check_unhooked(self.model)
        read = torch.tensor(self.reads, device=self.model.device)
        do = "Take fewer examples at once, shorten the prompt, or keep the clean run elsewhere: Engine(keep=Keep(device='cpu'))."
        with torch.no_grad(), refusing_to_run_out("the clean run", do=do):
            return run_clean(self.model, self.prompt, self.schedule.names, keep=self.resources.keep, read=read)

    def logits(self, *, gradients: bool = False) -> list[Float[Tensor, "example read vocab"]]:
        """Return the logits of every cell, at the positions that are read.

        All of them are held at once (``explain().result_bytes``); :meth:`stream_logits` gives them out one by one.

        Args:
            gradients: whether they flow back to donors through the rows; the clean run is constant. Each row then keeps what its
                backward pass needs, for as long as its logits live: ``explain(gradients=True)`` counts it.

        Raises:
            InterventionError: when an intervention touched nothing.
            EngineError: when not even one row fits the memory.
        """
        found = dict(self.stream_logits(gradients=gradients))
        return [found[cell] for cell in sorted(found)]

    def stream_logits(self, *, gradients: bool = False) -> Iterator[tuple[int, Float[Tensor, "example read vocab"]]]:
        """Yield each cell and its logits as soon as all its examples are done, in any order; see :meth:`logits`.

        Only the rows of unfinished cells are held.
        """
        check_unhooked(self.model)
        budget = self._budget(gradients=gradients)
        budget.check()
        gathered = _Gathered(self.schedule.jobs)
        for job in self.schedule.clean:
            Touched().check([job.row])
            yield from _stacked(gathered.add([job], [self.prefix.logits[job.row.example]]))
        runs = [(one.jobs, budget.rows(one), partial(self._logits, one)) for one in self.schedule.passes]
        whole = [job for job, _ in self.schedule.whole]
        for jobs, rows, run in [*runs, (whole, budget.whole_rows, self._whole_logits)]:
            for batch, logits in in_batches(jobs, rows, torch.set_grad_enabled(gradients)(run)):
                yield from _stacked(gathered.add(batch, logits))

    def generate(self, *, max_new_tokens: int = 64, options: Mapping[str, Any] | None = None) -> list[list[str]]:
        """Generate greedily under every cell: the same tokens as ``model.generate``, prefill shared, many rows per step.

        A row that has ended is padded until every row of its batch has; the batch stops with the last one.

        Args:
            max_new_tokens: at most so many.
            options: more of HF's generation options; sampling is refused, since draws depend on the batch.

        Returns:
            For each cell one text per example, special tokens left out.

        Raises:
            EngineError: for sampling, beams, or too little memory.
            InterventionError: when an intervention touched nothing.
        """
        found = dict(self.stream_texts(max_new_tokens=max_new_tokens, options=options))
        return [found[cell] for cell in sorted(found)]

    def stream_texts(self, *, max_new_tokens: int = 64, options: Mapping[str, Any] | None = None) -> Iterator[tuple[int, list[str]]]:
        """Yield each cell and its texts as soon as all its examples are done, in any order; see :meth:`generate`."""
        settings = generation_settings(options, max_new_tokens=max_new_tokens, tokenizer=self.model.tokenizer)
        if settings["do_sample"] or not settings["use_cache"]:
            raise EngineError("greedy generation with a cache", f"{dict(options or {})}", "Use model.generate, one cell at a time.")
        check_unhooked(self.model)
        budget = self._budget(new_tokens=settings["max_new_tokens"])
        budget.check()
        gathered, schedule = _Gathered(self.schedule.jobs), budget.schedule
        jobs = [(one, job) for one in schedule.with_clean(self.prompt.layouts[0].length - 1) for job in one.jobs]
        for batch, texts in in_batches(jobs, budget.generating_rows, partial(self._texts, settings=settings)):
            yield from gathered.add([job for _, job in batch], texts)
        for batch, texts in in_batches(
            [job for job, _ in schedule.whole], budget.whole_rows, partial(self._whole_texts, settings=settings)
        ):
            yield from gathered.add(batch, texts)

    def _examples(self, jobs: Sequence[Job]) -> Int[Tensor, " row"]:
        return torch.tensor([job.row.example for job in jobs], device=self.model.device)

    @contextmanager
    def _applied(self, rows: Sequence[Row], touched: Touched) -> Iterator[None]:
        layouts, examples = [self.prompt.layouts[row.example] for row in rows], [row.example for row in rows]
        with self.model.sites.window.showing(layouts, examples), applied(self.model.sites, rows, self.donors, touched=touched):
            yield

    @contextmanager
    def _whole(self, jobs: Sequence[Job]) -> Iterator[Prompt]:
        """Apply each row's interventions to its example of the whole prompt, images included."""
        rows, touched = [job.row for job in jobs], Touched()
        with self._applied(rows, touched):
            yield self.model.processing.select(self.prompt, [row.example for row in rows])
        touched.check(rows)

    def _whole_logits(self, jobs: Sequence[Job]) -> Float[Tensor, "row read vocab"]:
        read = torch.tensor(self.reads, device=self.model.device)
        with self._whole(jobs) as prompt:
            return self.model.hf(**prompt.tensors, use_cache=False, logits_to_keep=read).logits

    def _whole_texts(self, jobs: Sequence[Job], *, settings: Mapping[str, Any]) -> list[str]:
        with self._whole(jobs) as prompt:
            return self._decode(prompt.generation_inputs(), settings)

    def _run(self, one: Pass, jobs: Sequence[Job], *, stop: int, cache: KeyValueCache) -> Float[Tensor, "row position d_model"]:
        """Return the last hidden states of the positions from the pass's own up to ``stop``."""
        examples, sites = self._examples(jobs), self.model.sites
        like = next(sites.decoder.parameters())
        span = slice(one.position, stop)
        hidden, *z = (self.prefix.state(name, examples, span=span, like=like) for name in one.names)
        arguments = window_arguments(self.prefix.arguments, examples, start=one.position, stop=stop)
        arguments |= reinjected(sites, self.prefix.states, self.prompt.layouts, skipped=one.point.skipped, span=span)
        reads = self.reads if stop == self.prompt.layouts[0].length else ()  # nothing is read where a cache is filled
        read = [position - one.position for position in reads if position >= one.position]
        with stepping_over(sites, one.point, z[0].flatten(2) if z else None, read=None if one.late else read):
            return sites.decoder(inputs_embeds=hidden, **arguments, **{cache_keyword(): cache}, use_cache=True).last_hidden_state

    def _logits(self, one: Pass, jobs: Sequence[Job]) -> Float[Tensor, "row read vocab"]:
        rows, examples, touched = [job.row for job in jobs], self._examples(jobs), Touched()
        cache = row_cache(self.prefix.keys_values, examples, prefix=one.position)
        with self._applied(rows, touched):
            states = self._run(one, jobs, stop=self.prompt.layouts[0].length, cache=cache)
        touched.check(rows)
        own = [position - one.position for position in self.reads if position >= one.position]
        logits = self.model.unembedding(states[:, own])
        before = self.prefix.logits[examples][:, : len(self.reads) - len(own)]
        return torch.cat([before, logits], dim=1)

    @torch.no_grad()
    def _texts(self, batch: Sequence[tuple[Pass, Job]], *, settings: Mapping[str, Any]) -> list[str]:
        """Generate for some rows: each pass fills its rows' caches up to the last position of the prompt, then all decode."""
        touched, caches, room = Touched(), [], settings["max_new_tokens"] + 1
        for one in dict.fromkeys(one for one, _ in batch):
            jobs = [job for other, job in batch if other is one]
            fast = self.resources.cost.fast_rows(self.prompt.layouts[0].length - one.position)
            caches += [self._filled(one, jobs[k : k + fast], touched, room=room) for k in range(0, len(jobs), fast)]
        rows = [job.row for _, job in batch]
        given, examples = self.prompt.generation_inputs(pixels=False), self._examples([job for _, job in batch])
        inputs = {name: tensor[..., examples, :] for name, tensor in given.items()}
        with self._applied(rows, touched):
            texts = self._decode({**inputs, cache_keyword(): joined(caches)}, settings)
        touched.check(rows)
        return texts

    def _filled(self, one: Pass, jobs: Sequence[Job], touched: Touched, *, room: int) -> KeyValueCache:
        last = self.prompt.layouts[0].length - 1
        cache = row_cache(self.prefix.keys_values, self._examples(jobs), prefix=min(one.position, last), room=room)
        if one.position < last:
            with self._applied([job.row for job in jobs], touched):
                self._run(one, jobs, stop=last, cache=cache)
        finish(cache, last, next(self.model.sites.decoder.parameters()))
        return cache

    @torch.no_grad()
    def _decode(self, inputs: Mapping[str, Any], settings: Mapping[str, Any]) -> list[str]:
        ids = self.model.hf.generate(**inputs, **settings)  # pyright: ignore[reportCallIssue]  # not every PreTrainedModel has it
        return self.model.tokenizer.batch_decode(ids[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)


class _Gathered:
    """Collects results per job, and gives out a cell when its last example is in."""

    def __init__(self, jobs: Sequence[Job]) -> None:
        self._wanted: dict[int, list[int]] = {}
        for job in jobs:
            self._wanted.setdefault(job.cell, []).append(job.row.example)
        self._found: dict[int, dict[int, Any]] = {}

    def add(self, jobs: Sequence[Job], results: Sequence[Any] | Tensor) -> Iterator[tuple[int, list[Any]]]:
        """Take results of some jobs; yield the cells that are complete, examples in ascending order."""
        for job, result in zip(jobs, results, strict=True):
            found = self._found.setdefault(job.cell, {})
            found[job.row.example] = result
            if len(found) == len(self._wanted[job.cell]):
                yield job.cell, [found[example] for example in sorted(found)]
                del self._found[job.cell]


def _stacked(cells: Iterator[tuple[int, list[Tensor]]]) -> Iterator[tuple[int, Tensor]]:
    for cell, rows in cells:
        yield cell, torch.stack(rows)
