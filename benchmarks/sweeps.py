"""What a sweep costs: the engine against a plain loop on TransformerBridge and on HF with hooks, in one run.

    PYTHONPATH=. python benchmarks/sweeps.py [--rounds 3] [--sample 4] [--subject random|tiny]

Random LLaVA: 8 layers, width 512, 32,000 tokens of vocabulary, 576 visual and 64 text tokens. A loop spends the same on every
cell, so each round times a sample of its cells, spread over the sweep, and scales to all of them; the engine runs the whole
sweep. Rounds are interleaved; medians are printed. ``bound`` is what the plan's operations would take at the speed of HF's
plain forward pass; ``planned`` is the ratio that the plan's operations allow, whatever the machine, against a loop that runs
at that speed. ``bar`` is what the ratio to the bridge should reach on the random model; a model so small that a pass costs no
more than starting it stays below. ``difference`` is the largest between the engine's logits and those of HF with hooks, on the
sampled cells (for generation: the number of sampled texts that differ). Last, one epoch of position probes at every layer, of
the model and of its untrained copy, against HF's plain forward passes over the same images in the same batches.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from PIL import Image
from subjects import Subject, random_subject, tiny_subject
from torch import Tensor, nn

from sightlens.engine import Engine
from sightlens.experiments.position_probes import Viewing, position_probes
from sightlens.experiments.windows import layer_windows
from sightlens.families.compat import cached_length
from sightlens.interventions import Ablate, Intervention, Knockout, PatchIn
from sightlens.model import Cache
from sightlens.probes import ProbeSettings
from sightlens.stimuli import Stimulus

NEW_TOKENS = 12
KEYS = ("object", "background", "random(object, 0)", "image & border")


@dataclass(frozen=True)
class Sweep:
    """Cells, the ratio to the loop on TransformerBridge that the engine is to reach, and whether texts are generated."""

    name: str
    cells: Sequence[Intervention]
    bar: float
    new_tokens: int = 0


def sweeps(subject: Subject) -> list[Sweep]:
    """List the sweeps for a model."""
    layers, heads = range(subject.vlm.cfg.n_layers), range(subject.vlm.sites.n_heads)
    windows = [w for width in (1, 4, 6) for w in layer_windows(len(layers), width=width, stride=1)] + [tuple(layers)]
    groups = ("pre_image", "object", "background", "post_image & ~last", "question", "last")
    visual = subject.prompt.layout.visual_tokens()["position"]
    tokens = [f"position[{visual[k * len(visual) // 20]}]" for k in range(20)]
    return [
        Sweep("knockout, 17 windows × 4 key sets", [Knockout("post_image", keys, layers=w) for keys in KEYS for w in windows], 15),
        Sweep("head patching, all positions", [PatchIn(f"blocks.{k}.attn.hook_z", heads=(h,)) for k in layers for h in heads], 3.5),
        Sweep(
            "head patching, post-image positions",
            [PatchIn(f"blocks.{k}.attn.hook_z", at="post_image", heads=(h,)) for k in layers for h in heads],
            15,
        ),
        Sweep("residual patching, layers × 6 groups", [PatchIn(f"blocks.{k}.hook_resid_post", at=g) for k in layers for g in groups], 6),
        Sweep(f"20 token ablations, {NEW_TOKENS} tokens generated", [Ablate(token, "zero") for token in tokens], 2.5, NEW_TOKENS),
    ]


def positions(subject: Subject, where: Any) -> Tensor:
    """Return the positions a selector names."""
    return torch.tensor(subject.prompt.layout.select(where).positions)


def bridge_hooks(subject: Subject, cell: Intervention, donor: Cache) -> list[tuple[str, Callable[..., Tensor | None]]]:
    """Write a cell as TransformerLens users would."""
    if isinstance(cell, Knockout):
        queries, keys = (positions(subject, where) for where in (cell.queries, cell.keys))

        def cut(scores: Tensor, hook: Any) -> Tensor:
            scores[:, :, queries[:, None], keys] = torch.finfo(scores.dtype).min
            return scores

        return [(f"blocks.{layer}.attn.hook_attn_scores", cut) for layer in cell.layers or ()]
    at = positions(subject, cell.at)
    if isinstance(cell, Ablate):

        def zero(value: Tensor, hook: Any) -> Tensor | None:
            if value.shape[1] == 1:
                return None
            value[:, at] = 0
            return value

        return [("blocks.0.hook_in", zero)]

    def put(value: Tensor, hook: Any) -> Tensor:
        new, given = value.clone(), donor[cell.site]
        if cell.heads is None:
            new[:, at] = given[:, at]
        else:
            new[:, at, cell.heads[0]] = given[:, at, cell.heads[0]]
        return new

    return [(cell.site, put)]


@contextmanager
def hf_hooks(hf: Any, subject: Subject, cell: Intervention, donor: Cache) -> Iterator[None]:
    """Write a cell as plain torch hooks."""
    layers = hf.model.language_model.layers
    with ExitStack() as stack:

        def add(module: nn.Module, hook: Callable[..., Any], *, before: bool = True) -> None:
            handle = module.register_forward_pre_hook(hook, with_kwargs=True) if before else module.register_forward_hook(hook)
            stack.callback(handle.remove)

        if isinstance(cell, Knockout):
            queries, keys = (positions(subject, where) for where in (cell.queries, cell.keys))
            length = subject.prompt.layout.length
            mask = torch.full((length, length), torch.finfo(torch.float32).min).triu(1)
            mask[queries[:, None], keys] = torch.finfo(torch.float32).min

            def cut(module: nn.Module, args: Any, kwargs: Any) -> Any:
                return args, {**kwargs, "attention_mask": mask[None, None]}

            for layer in cell.layers or ():
                add(layers[layer].self_attn, cut)
            yield
            return
        at = positions(subject, cell.at)
        if isinstance(cell, Ablate):

            def zero(module: nn.Module, args: Any, kwargs: Any) -> Any:
                if cached_length(kwargs):
                    return None
                embeds = kwargs["inputs_embeds"].clone()
                embeds[:, at] = 0
                return args, {**kwargs, "inputs_embeds": embeds}

            add(hf.model.language_model, zero)
            yield
            return
        layer = int(cell.site.split(".")[1])
        if cell.heads is None:

            def residual(module: nn.Module, args: Any, output: Tensor) -> Tensor:
                output[:, at] = donor[cell.site][:, at]
                return output

            add(layers[layer], residual, before=False)
        else:

            def z(module: nn.Module, args: Any, kwargs: Any) -> Any:
                new = args[0].unflatten(-1, (len(donor[cell.site][0, 0]), -1)).clone()
                new[:, at, cell.heads[0]] = donor[cell.site][:, at, cell.heads[0]]
                return (new.flatten(-2),), kwargs

            add(layers[layer].self_attn.o_proj, z)
        yield


@dataclass(frozen=True)
class Contest:
    """One sweep by three means."""

    subject: Subject
    sweep: Sweep
    donor: Cache
    sample: Sequence[int]

    def engine(self) -> list[Any]:
        """Run the whole sweep."""
        plan = Engine(self.subject.vlm).plan(self.subject.prompt, [[cell] for cell in self.sweep.cells], donors={"clean": self.donor})
        if self.sweep.new_tokens:
            return plan.generate(max_new_tokens=self.sweep.new_tokens, options=self._options)
        return plan.logits()

    def bridge(self) -> None:
        """Run the sampled cells on TransformerBridge."""
        tensors = self._tensors
        for index in self.sample:
            hooks = bridge_hooks(self.subject, self.sweep.cells[index], self.donor)
            if not self.sweep.new_tokens:
                self.subject.bridge.run_with_hooks(tensors["input_ids"], fwd_hooks=hooks, pixel_values=tensors["pixel_values"])
                continue
            with self.subject.bridge.hooks(fwd_hooks=hooks):  # its own generate is wrong under this transformers
                self.subject.bridge.original_model.generate(**tensors, **self._settings)

    def hf(self) -> list[Any]:
        """Run the sampled cells on HF."""
        hf, found = self.subject.hf, []
        for index in self.sample:
            with hf_hooks(hf, self.subject, self.sweep.cells[index], self.donor):
                if self.sweep.new_tokens:
                    found.append(hf.generate(**self._tensors, **self._settings)[:, self.subject.prompt.layout.length :])
                else:
                    found.append(hf(**self._tensors, use_cache=False).logits[:, -1:])
        return found

    @property
    def _tensors(self) -> dict[str, Tensor]:
        return self.subject.prompt.generation_inputs()

    @property
    def _options(self) -> dict[str, Any]:
        return {"min_new_tokens": self.sweep.new_tokens, "pad_token_id": 0}

    @property
    def _settings(self) -> dict[str, Any]:
        return {"max_new_tokens": self.sweep.new_tokens, "do_sample": False, **self._options}

    def difference(self, engine: list[Any], hf: list[Any]) -> float:
        """Compare the engine with HF on the sampled cells."""
        if self.sweep.new_tokens:
            texts = [self.subject.vlm.tokenizer.batch_decode(ids, skip_special_tokens=True) for ids in hf]
            return sum(engine[index] != text for index, text in zip(self.sample, texts, strict=True))
        return max(float((engine[index] - logits).abs().max()) for index, logits in zip(self.sample, hf, strict=True))


def timed(run: Callable[[], Any]) -> tuple[float, Any]:
    """Return seconds and the result."""
    gc.collect()
    started = time.perf_counter()
    result = run()
    return time.perf_counter() - started, result


def compare(contest: Contest, rounds: int, plain: Callable[[], float]) -> None:
    """Time one sweep and print its line."""
    sweep, scale = contest.sweep, len(contest.sweep.cells) / len(contest.sample)
    plan = Engine(contest.subject.vlm).plan(contest.subject.prompt, [[cell] for cell in sweep.cells], donors={"clean": contest.donor})
    explained = plan.explain(new_tokens=sweep.new_tokens)
    bridge, hf, engine, forward = [], [], [], []
    for _ in range(rounds):
        bridge.append(scale * timed(contest.bridge)[0])
        seconds, expected = timed(contest.hf)
        hf.append(scale * seconds)
        seconds, found = timed(contest.engine)
        engine.append(seconds)
        forward.append(plain())
    own, per_forward, loop = (statistics.median(times) for times in (engine, forward, bridge))
    one = Engine(contest.subject.vlm).plan(contest.subject.prompt, [[]]).explain()
    bound = explained.flops * per_forward / one.loop_flops
    print(
        f"{sweep.name:42s} {len(sweep.cells):4d} {own:8.2f} s {loop / own:7.1f}× {sweep.bar:5.1f}× {statistics.median(hf) / own:7.1f}×"
        f" {bound:8.2f} s {own / bound:6.2f} {explained.ratio:7.1f}× {contest.difference(found, expected):11.1e}",
        flush=True,
    )


def time_probes(subject: Subject, rounds: int, images: int = 32) -> None:
    """Time an epoch of position probes, images prepared anew, against forward passes over images that are prepared already."""
    side = subject.prompt.layout.image_sizes[0][0]
    pictures = np.random.default_rng(1).integers(0, 256, (images, side, side, 3), dtype=np.uint8)
    stimuli = [Stimulus(str(k), Image.fromarray(picture)) for k, picture in enumerate(pictures)]
    viewing = Viewing()
    groups = [stimuli[k : k + viewing.batch_size] for k in range(0, images, viewing.batch_size)]
    batches = [subject.vlm.prepare([one.image for one in group], [viewing.question] * len(group)).tensors for group in groups]

    @torch.no_grad()
    def plain() -> None:
        for tensors in batches * 2:  # the model and its untrained copy
            subject.hf(**tensors, use_cache=False)

    forward, probes = [], []
    for _ in range(rounds):
        forward.append(timed(plain)[0])
        probes.append(timed(lambda: position_probes(subject.vlm, stimuli, viewing=viewing, settings=ProbeSettings(epochs=1)))[0])
    own, loop = statistics.median(probes), statistics.median(forward)
    print(f"position probes, one epoch, {images} images × 2 models: {own:.2f} s, plain forward passes {loop:.2f} s, ratio {own / loop:.2f}")


def main() -> None:
    """Time what the command line names."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--sample", type=int, default=4)
    parser.add_argument("--subject", choices=["random", "tiny"], default="random")
    parser.add_argument("--only", type=int, nargs="*", help="numbers of the sweeps, from 1; 6 are the probes")
    options = parser.parse_args()
    torch.set_num_threads(1)
    subject = random_subject(words=60) if options.subject == "random" else tiny_subject()
    time_sweeps(subject, options)
    if not options.only or 6 in options.only:
        time_probes(subject, options.rounds)


@torch.no_grad()
def time_sweeps(subject: Subject, options: argparse.Namespace) -> None:
    """Time the sweeps over cells and print a table."""
    _, donor = subject.vlm.run_with_cache(subject.other, names_filter=["blocks.*.attn.hook_z", "blocks.*.hook_resid_post"])
    tensors = subject.prompt.generation_inputs()
    print(f"{subject.name}, {subject.prompt.layout}, 1 thread, medians of {options.rounds} rounds")
    print(f"{'':42s} cells    engine  ÷ bridge    bar    ÷ HF      bound  ÷bound  planned  difference")
    for number, sweep in enumerate(sweeps(subject), 1):
        if options.only and number not in options.only:
            continue
        count = len(sweep.cells)
        sample = [round(k * (count - 1) / (options.sample - 1)) for k in range(options.sample)]
        compare(Contest(subject, sweep, donor, sample), options.rounds, lambda: timed(lambda: subject.hf(**tensors, use_cache=False))[0])


if __name__ == "__main__":
    main()
