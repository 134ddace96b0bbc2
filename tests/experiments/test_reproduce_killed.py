"""A reproduction killed in the middle of a study goes on, and ends as one that was never stopped."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from sightlens.experiments import Reproduction, drawn_pairs
from sightlens.model import HookedVLM
from sightlens.store import parts, read_store

PROGRAM = """
import sys
from pathlib import Path
import torch
from sightlens.experiments import Reproduction, drawn_pairs, study
from sightlens.model import HookedVLM

torch.set_num_threads(1)
study.FLUSH_SECONDS = 0.0  # every record is a part of its own, so that a kill falls between two of a study
model = HookedVLM.from_pretrained("sightlens/tiny-llava", check=False)
for section in Reproduction(Path(sys.argv[1]), progress=False).run(model, drawn_pairs(1)):
    print(section.name, flush=True)
"""


def kill_within(store: Path, section: str) -> dict[Path, bytes]:
    """Start the program, kill it when it has written three parts of a section, and return the parts that are there."""
    with subprocess.Popen([sys.executable, "-c", PROGRAM, str(store)], stdout=subprocess.DEVNULL) as process:
        until = time.monotonic() + 240
        while len(parts.part_paths(store / section)) < 3:
            assert process.poll() is None, "it ended before it could be killed"
            assert time.monotonic() < until
            time.sleep(0.005)
        os.kill(process.pid, signal.SIGKILL)
        assert process.wait(60) == -signal.SIGKILL
    return {path: path.read_bytes() for path in store.rglob("part-*.parquet")}


def tables(sections):
    return {section.name: section.measured for section in sections}


@pytest.mark.skipif(sys.platform == "win32", reason="needs SIGKILL")
def test_no_record_is_lost_or_doubled(tmp_path):
    store = tmp_path / "killed"
    for section in ("containerize", "mediation-loc"):
        kept = kill_within(store, section)
        (manifest,) = (store / section).glob("manifest.json")
        assert manifest.exists()
    model = HookedVLM.from_pretrained("sightlens/tiny-llava", check=False)
    resumed = tables(Reproduction(store, progress=False).run(model, drawn_pairs(1)))
    whole = tables(Reproduction(tmp_path / "whole", progress=False).run(model, drawn_pairs(1)))
    assert all(path.read_bytes() == data for path, data in kept.items())
    folders = sorted(path.parent.relative_to(tmp_path / "whole") for path in (tmp_path / "whole").rglob("manifest.json"))
    assert len(folders) >= 10
    for folder in folders:
        measured = Counter(
            (cell, example)
            for part in parts.part_paths(store / folder)
            for cell, examples in parts.read_cells(part)
            for example in examples
        )
        assert set(measured.values()) == {1}, folder
        one, other = ({record.cell: record for record in read_store(root / folder).records} for root in (store, tmp_path / "whole"))
        assert one.keys() == other.keys(), folder
        for cell, record in one.items():
            assert record.examples == other[cell].examples
            assert [note.get("text") for note in record.notes] == [note.get("text") for note in other[cell].notes]
            for metric, values in record.values.items():
                assert np.allclose(values, other[cell].values[metric], atol=1e-4, rtol=1e-4, equal_nan=True), (folder, cell, metric)
    assert resumed.keys() == whole.keys()
    for name, table in whole.items():
        numbers = table.select_dtypes("number").to_numpy(dtype=float)
        assert np.allclose(resumed[name].select_dtypes("number").to_numpy(dtype=float), numbers, atol=1e-2, rtol=1e-3, equal_nan=True), name
