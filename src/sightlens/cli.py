"""The command line: demo, layout, run, reproduce and check."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Optional

import torch
import transformers
import typer
from jaxtyping import TypeCheckError
from rich.console import Console
from rich.markup import escape

from sightlens.errors import SightLensError, StudyError, one_line
from sightlens.experiments.config import read_plan
from sightlens.experiments.demo import demo_report, run_demo
from sightlens.experiments.paper_data import drawn_pairs, photo_pairs
from sightlens.experiments.reproduce import Reproduction
from sightlens.families import ImageOptions
from sightlens.model import HookedVLM, hook_contract, verify_layout
from sightlens.render import draw_layout
from sightlens.stimuli import folder_images

app = typer.Typer(
    add_completion=False, no_args_is_help=True, help="TransformerLens for vision-language models.", pretty_exceptions_enable=False
)
console = Console()

Model = Annotated[str, typer.Option("--model", "-m", help="A shipped model, a folder, or a hub id.")]
Out = Annotated[Path, typer.Option("--out", "-o", help="Where to write.")]


@app.command()
def demo(
    model: Model = "sightlens/tiny-llava",
    out: Out = Path("sightlens-demo"),
    pairs: Annotated[int, typer.Option(min=2, help="Held-out scenes.")] = 40,
) -> None:
    """Find out which visual tokens and layers a small trained model's answers depend on, and write a report."""
    started = time.monotonic()
    vlm = _load(model)
    findings = run_demo(vlm, pairs=pairs, progress=console.is_terminal)
    page = demo_report(vlm, findings).save(out / "report.html")
    for outcome, metrics in ((findings.ablation, ("correct", "iou")), (findings.knockout, ("correct", "iou"))):
        for metric in metrics:
            console.print(f"\n[bold]{outcome.records[0].study}: {metric}[/bold]")
            console.print(outcome.table(metric).drop(columns=["metric", "missing"]).to_string(index=False, float_format="{:.2f}".format))
    console.print(f"\nReport: {page} ({time.monotonic() - started:.0f} s)")


@app.command()
def layout(
    image: Annotated[Path, typer.Argument(help="A picture.")],
    model: Model = "sightlens/tiny-llava",
    question: Annotated[str, typer.Option("--question", "-q")] = "what is this ?",
    select: Annotated[Optional[str], typer.Option("--select", "-s", help="A selector to tint.")] = None,  # noqa: UP045 - typer on 3.10
    image_mode: Annotated[Optional[str], typer.Option(help="LLaVA: pad or crop.")] = None,  # noqa: UP045
    max_tiles: Annotated[Optional[int], typer.Option(help="InternVL, Gemma-3: most tiles.")] = None,  # noqa: UP045
    min_pixels: Annotated[Optional[int], typer.Option(help="Qwen-VL: least area.")] = None,  # noqa: UP045
    max_pixels: Annotated[Optional[int], typer.Option(help="Qwen-VL: greatest area.")] = None,  # noqa: UP045
    pan_and_scan: Annotated[Optional[bool], typer.Option(help="Gemma-3: crops of elongated pictures.")] = None,  # noqa: UP045
    out: Out = Path("layout.png"),
) -> None:
    """Print and draw what each position of your picture's prompt is."""
    vlm = _load(model)
    prompt = vlm.prepare(image, question, options=ImageOptions(image_mode, max_tiles, min_pixels, max_pixels, pan_and_scan))
    tokens = prompt.layout.select(select) if select else None
    console.print(repr(prompt.layout), markup=False, highlight=False)
    for view in prompt.layout.views:
        x0, y0, x1, y1 = view.box
        console.print(f"{view.name}: {view.grid[0]}×{view.grid[1]} tokens, pixels x {x0:.1f}–{x1:.1f}, y {y0:.1f}–{y1:.1f}", markup=False)
    if tokens is not None:
        console.print(repr(tokens), markup=False)
    console.print(f"Drawn: {draw_layout(prompt.image, prompt.layout, tokens=tokens).save(out)}")


@app.command()
def run(config: Annotated[Path, typer.Argument(help="A TOML file; CONTRIBUTING.md shows one.")]) -> None:
    """Run the study that a file describes, on your own pictures and masks; a stopped run goes on where it was."""
    plan = read_plan(config)
    study = plan.build()
    vlm = _load(plan.model)
    if plan.mean_images:
        vlm.fit_mean(
            [vlm.prepare(path, "what is this ?") for path in plan.mean_images], source=f"{len(plan.mean_images)} images of {config.name}"
        )
    outcome = study.run(vlm, store=plan.store, batch_size=plan.batch_size, progress=console.is_terminal)
    summary = outcome.summary()
    summary[summary["n"] > 0].to_csv(plan.store / "summary.csv", index=False)
    console.print(summary[summary["n"] > 0].to_string(index=False), markup=False)
    console.print(f"Records: {plan.store}")


@app.command()
def reproduce(
    paper: Annotated[str, typer.Argument(help="p5: “Mechanisms of Object Localization in VLMs” (arXiv 2605.19792).")],
    model: Model = "sightlens/tiny-llava",
    data: Annotated[Optional[Path], typer.Option(help="COCO's or VOC's folder; drawn scenes without it.")] = None,  # noqa: UP045
    images: Annotated[Optional[Path], typer.Option(help="Folder of pictures for position probes, such as ImageNet's.")] = None,  # noqa: UP045
    trials: Annotated[int, typer.Option(min=1, help="Pairs of pictures; the model's answers decide which are kept of photographs.")] = 40,
    store: Annotated[Path, typer.Option(help="Folder of the results; a stopped run goes on there.")] = Path("sightlens-p5"),
) -> None:
    """Run a paper's experiments in order, and print each table beside the published numbers."""
    if paper != "p5":
        raise StudyError("p5", repr(paper), "It is the only paper so far.")
    vlm = _load(model)
    probed = None if images is None else folder_images(images)
    if data is None:
        pairs = drawn_pairs(trials)
    else:
        chosen = photo_pairs(data, vlm, count=trials, cache=store / "pairs")
        console.print(f"{chosen}", markup=False, soft_wrap=True)
        pairs = chosen.pairs
    for section in Reproduction(store, progress=console.is_terminal, probed=probed).run(vlm, pairs):
        for title, table in (("measured", section.measured), ("published", section.published)):
            console.print(f"\n[bold]{section.name}: {title}[/bold]")
            if title == "measured" and section.note:
                console.print(section.note, markup=False, soft_wrap=True)
            if len(table):
                console.print(table.to_string(index=False, float_format="{:.3g}".format), markup=False, soft_wrap=True)


@app.command()
def check(model: Annotated[str, typer.Argument(help="A shipped model, a folder, or a hub id.")] = "sightlens/tiny-llava") -> None:
    """Check a checkpoint: paths agree, the layout is true, every hook name has an effect."""
    vlm = _load(model)
    prompt = vlm.probe()
    failed, counts = 0, dict[str, int]()
    for title, checks in (("paths", vlm.self_check()), ("layout", verify_layout(vlm, prompt)), ("hooks", hook_contract(vlm, prompt))):
        for item in checks:
            counts[title] = counts.get(title, 0) + 1
            failed += not item.passed
            line = f"{'ok  ' if item.passed else 'FAIL'} {title}: {item.name} ({item.detail})"
            console.print(line, markup=False, highlight=False, soft_wrap=True)
    if failed:
        raise StudyError("every check to pass", f"{failed} failed", "Report the lines marked FAIL.")
    console.print(
        f"All {sum(counts.values())} checks passed: {', '.join(f'{n} of {title}' for title, n in counts.items())}.", soft_wrap=True
    )


def _load(name: str) -> HookedVLM:
    transformers.utils.logging.disable_progress_bar()
    if not torch.cuda.is_available():
        torch.set_num_threads(max(1, (os.cpu_count() or 2) // 2) if name.startswith("sightlens/") else torch.get_num_threads())
    return HookedVLM.from_pretrained(name, check=False)


@contextmanager
def _plain_errors() -> Iterator[None]:
    try:
        yield
    except SightLensError as problem:
        console.print(f"[red]error[/red]: {escape(str(problem))}", highlight=False, soft_wrap=True)
        sys.exit(2)
    except (OSError, TypeCheckError) as problem:  # a place that cannot be written to; a value of a wrong type from a file
        console.print(f"[red]error[/red]: {escape(one_line(problem))}", highlight=False, soft_wrap=True)
        sys.exit(2)
    except KeyboardInterrupt:
        console.print("stopped; run again to go on")
        sys.exit(130)


def main() -> None:
    """Run the command line; errors of ours are one line and exit code 2."""
    with _plain_errors():
        app()
