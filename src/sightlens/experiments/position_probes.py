"""Where does a model know where a visual token lies? Linear probes at every layer, beside an untrained copy."""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import pandas as pd
import torch

from sightlens.engine import read_states
from sightlens.errors import StudyError
from sightlens.experiments.probe_records import STUDY, records_of, reports_of
from sightlens.experiments.site_tokens import crops, site_tokens
from sightlens.experiments.study import provenance_of
from sightlens.families import ImageOptions
from sightlens.layout import ViewKind
from sightlens.model import HookedVLM
from sightlens.model.hooking import find_addresses
from sightlens.probes import PositionProbes, ProbeBatch, ProbeReport, ProbeSettings, ProbeShape, held_out
from sightlens.stimuli import Stimulus
from sightlens.store import Manifest, open_store

Grid = tuple[int, int]
SITES = ("vision_encoder.encoder_layers.*.hook_resid_post", "vision_projector.hook_out", "blocks.*.hook_resid_post")


@dataclass(frozen=True)
class Viewing:
    """How images are shown to the model while it is probed.

    Attributes:
        sites: hook names or patterns.
        view: whose tokens are probed: "global", or "tile" (each by its place in its own tile).
        question: after the image; the states of visual tokens do not depend on it in a causal model.
        batch_size: images at once.
        options: about views.
    """

    sites: tuple[str, ...] = SITES
    view: ViewKind = "global"
    question: str = "what is this ?"
    batch_size: int = 8
    options: ImageOptions = field(default_factory=ImageOptions)


@dataclass(frozen=True, eq=False)
class ProbeOutcome:
    """What probes of a model, and of its untrained copy, found.

    Attributes:
        reports: by "trained" and "untrained", then by hook name, in the model's order.
        provenance: model, settings, and how many images each side of the split had.
    """

    reports: Mapping[str, Mapping[str, ProbeReport]]
    provenance: Mapping[str, Any]

    def to_pandas(self) -> pd.DataFrame:
        """Return one row per model, site and axis: accuracy, shuffled-label control, chance, tokens."""
        rows = []
        for model, reports in self.reports.items():
            for order, (site, report) in enumerate(reports.items()):
                for axis, scores in report.axes.items():
                    numbers = {"accuracy": scores.accuracy, "control": scores.control_accuracy, "chance": scores.chance}
                    rows.append({"model": model, "order": order, "site": site, "axis": axis, **numbers, "tokens": int(scores.tokens.sum())})
        return pd.DataFrame(rows)

    def best(self, *, axis: str = "both", model: str = "trained") -> ProbeReport:
        """Return the site whose probe is most accurate; its ``accuracy_map()`` shows where in the picture."""
        return max(self.reports[model].values(), key=lambda report: report.axes[axis].accuracy)

    def to_json(self) -> str:
        """Return everything, maps included, as JSON."""
        reports = {model: [report.to_dict() for report in found.values()] for model, found in self.reports.items()}
        return json.dumps({"provenance": dict(self.provenance), "reports": reports})


def position_probes(
    model: HookedVLM,
    images: Iterable[Stimulus],
    *,
    viewing: Viewing | None = None,
    settings: ProbeSettings | None = None,
    store: str | Path | None = None,
) -> ProbeOutcome:
    """Train and test linear probes of row and column at every site, on a model and on an untrained copy of it.

    Every epoch runs the model over the images once, for all sites together; nothing is kept of an image, so that time and not
    memory grows with their number. Schaumlöffel et al. 2026 (arXiv 2605.19792), position probes: 50,000 + 10,000 ImageNet
    images, 10 epochs. The copy has the same configuration and random weights: what its probes read is there without learning.

    Args:
        model: that is probed.
        images: that can be iterated again and again, such as `sightlens.stimuli.folder_images`; ids decide the split.
        viewing: sites, view and batch size.
        settings: of the probes.
        store: a folder of the counts, of the trained probes (``trained.safetensors``, ``untrained.safetensors``) and
            ``outcome.json``; a model that was probed there, trained or untrained, is not probed again.

    Raises:
        StudyError: when the images can be iterated only once, no image has the view, or a side of the split is empty.
        StoreError: when the folder belongs to another model, other images or settings.
    """
    view, chosen = viewing or Viewing(), settings or ProbeSettings()
    if iter(images) is images:
        raise StudyError("images that can be iterated again", "an iterator", "Give a list, or stimuli.folder_images(path).")
    split = _split(images, chosen)
    about = {"model": model.name, "viewing": asdict(view), "settings": asdict(chosen), "images": split, "attention": model.attention}
    first = model.prepare(next(iter(images)).image, view.question, options=view.options).layout
    provenance = provenance_of(model, seed=chosen.seed, layout_hash=first.hash)
    with open_store(store, Manifest.of(STUDY, about, provenance=provenance)) as records:
        for name, subject in SUBJECTS.items():
            if reports_of(records.read(), name):
                continue
            probes = _fit(subject(model, seed=chosen.seed), images, view, chosen)
            if store is not None:
                probes.save(Path(store) / f"{name}.safetensors")
            records.append(records_of(probes.reports(), name, provenance))
        outcome = ProbeOutcome({name: reports_of(records.read(), name) for name in SUBJECTS}, about)
    if store is not None:
        (Path(store) / "outcome.json").write_text(outcome.to_json(), encoding="utf-8")
    return outcome


def _itself(model: HookedVLM, *, seed: int) -> HookedVLM:
    return model


def untrained(model: HookedVLM, *, seed: int = 0) -> HookedVLM:
    """Return a model of the same configuration and processing with HF's random initial weights."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        hf = type(model.hf)(copy.deepcopy(model.hf.config))
    hf = hf.to(device=model.device, dtype=model.hf.dtype).eval()  # pyright: ignore[reportCallIssue]  # HF's decorator hides the signature
    return HookedVLM(hf, model.processing, name=f"{model.name} (untrained)", box_format=model.box_format)


SUBJECTS: Mapping[str, Callable[..., HookedVLM]] = {"trained": _itself, "untrained": untrained}


def _split(images: Iterable[Stimulus], settings: ProbeSettings) -> dict[str, int | str]:
    """Count the images of each side, and say by a hash of ids and sizes which they are."""
    sides, digest = [], hashlib.sha256()
    for stimulus in images:
        sides.append(held_out(stimulus.id, settings))
        digest.update(repr((stimulus.id, stimulus.size)).encode())
    train, test = sides.count(False), sides.count(True)
    if not train or not test:
        raise StudyError(
            "images on both sides of the split", f"{train} for training, {test} for testing", "Give more images, or another test_share."
        )
    return {"train": train, "test": test, "digest": digest.hexdigest()[:16]}


def _fit(model: HookedVLM, images: Iterable[Stimulus], viewing: Viewing, settings: ProbeSettings) -> PositionProbes:
    names = tuple(dict.fromkeys(address.name for address in find_addresses(model.sites, list(viewing.sites))))
    grids = _largest(model, images, viewing)
    probes: PositionProbes | None = None
    for _ in range(settings.epochs):
        for batch in _batches(model, _side(images, settings, test=False), viewing, names):
            probes = probes or PositionProbes(_shapes(model, batch, grids), settings, device=model.device)
            probes.learn(batch)
    if probes is None:
        raise StudyError(f"images with a {viewing.view} view", "none", 'Probe view="global".')
    for batch in _batches(model, _side(images, settings, test=True), viewing, names):
        probes.judge(batch)
    return probes


def _side(images: Iterable[Stimulus], settings: ProbeSettings, *, test: bool) -> Iterator[Stimulus]:
    return (stimulus for stimulus in images if held_out(stimulus.id, settings) == test)


def _largest(model: HookedVLM, images: Iterable[Stimulus], viewing: Viewing) -> tuple[Grid, Grid]:
    """Return the largest grids of patches and of visual tokens; where pictures decide, all are prepared once to see."""
    fixed = model.processing.grid
    if fixed.count and viewing.view == "global":
        return (fixed.rows * fixed.merge, fixed.columns * fixed.merge), (fixed.rows, fixed.columns)
    patches, tokens = (0, 0), (0, 0)
    for stimulus in images:
        layout = model.prepare(stimulus.image, viewing.question, options=viewing.options).layout
        sizes = [(crop.rows, crop.columns) for crop in crops(layout) if crop.kind == viewing.view]
        patches = _larger([patches, *sizes])
        tokens = _larger([tokens, *(view.grid for view in layout.views if view.kind == viewing.view)])
    return patches, tokens


def _larger(grids: list[Grid]) -> Grid:
    return max(rows for rows, _ in grids), max(columns for _, columns in grids)


def _shapes(model: HookedVLM, batch: ProbeBatch, grids: tuple[Grid, Grid]) -> dict[str, ProbeShape]:
    patches, tokens = grids
    return {
        site: ProbeShape(found.states.shape[1], *(patches if "patch" in model.hook_dict[site].site.dims else tokens))
        for site, found in batch.sites.items()
    }


def _batches(model: HookedVLM, images: Iterator[Stimulus], viewing: Viewing, names: tuple[str, ...]) -> Iterator[ProbeBatch]:
    """Run the model over the images, and yield what the probes see; images without the view are passed over."""
    while group := list(islice(images, viewing.batch_size)):
        texts = [viewing.question] * len(group)
        prompt = model.prepare([stimulus.image for stimulus in group], texts, options=viewing.options)
        if not any(view.kind == viewing.view for layout in prompt.layouts for view in layout.views):
            continue
        cache = read_states(model, prompt, names)
        ids = tuple(stimulus.id for stimulus in group)
        yield ProbeBatch(ids, {name: site_tokens(cache, name, prompt, view=viewing.view) for name in names})
