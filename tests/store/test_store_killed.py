"""A process killed at any moment loses no finished part and repeats nothing."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import random
import signal
import time
from pathlib import Path

import pytest
from tests.store.store_cases import MANIFEST, record

from sightlens.errors import StoreError
from sightlens.store import FolderStore, parts, read_store

CELLS = 6
processes = multiprocessing.get_context("forkserver")
processes.set_forkserver_preload(["sightlens.store", "tests.store.store_cases"])


def measure(folder: Path, pause: float) -> None:
    """Measure what is not done yet, one part per cell, and log each cell that is measured."""
    with FolderStore(folder, MANIFEST) as store, (folder / "log.txt").open("a") as log:
        for layer in range(CELLS):
            if record(layer).cell not in store.done():
                time.sleep(pause)
                store.append([record(layer)])
                log.write(f"{layer}\n")
                log.flush()


class Fuse:
    """Kills the process at its n-th operation on the file system, halfway through when it is a write."""

    def __init__(self, left: int) -> None:
        self.left = left

    def burns(self) -> bool:
        self.left -= 1
        return self.left == 0

    def guard(self, operation):
        def guarded(*args):
            if self.burns():
                os.kill(os.getpid(), signal.SIGKILL)
            return operation(*args)

        return guarded


class FusedOs:
    """The operating system, with a fuse in front of what changes files."""

    def __init__(self, fuse: Fuse) -> None:
        self.fsync, self.replace = fuse.guard(os.fsync), fuse.guard(os.replace)
        self.open, self.close, self.name, self.O_RDONLY = fuse.guard(os.open), os.close, os.name, os.O_RDONLY


def measure_with_fuse(folder: Path, left: int) -> None:
    """Measure everything unless the fuse burns down first."""
    fuse = Fuse(left)
    parts.os = FusedOs(fuse)
    whole = parts.write_whole

    def write_whole(path: Path, data: bytes) -> None:
        if fuse.burns():
            path.with_name(path.name + parts.TEMPORARY).write_bytes(data[: len(data) // 2])
            os.kill(os.getpid(), signal.SIGKILL)
        whole(path, data)

    parts.write_whole = write_whole
    measure(folder, 0.0)


def run(target, *args) -> int:
    process = processes.Process(target=target, args=args)
    process.start()
    process.join(60)
    return process.exitcode


def check_complete(folder: Path) -> None:
    result = read_store(folder)
    assert sorted(found.coordinates["layer"] for found in result.records) == list(range(CELLS))
    assert all(repr(found) == repr(record(found.coordinates["layer"])) for found in result.records)  # repr: NaN == NaN
    assert not list(folder.glob(f"*{parts.TEMPORARY}"))


def test_killed_at_every_step_it_goes_on(tmp_path: Path) -> None:
    """Each attempt dies one step later than the one before; the folder is one and the same."""
    deaths = 0
    for left in range(1, 60):
        code = run(measure_with_fuse, tmp_path, left)
        assert code in (0, -signal.SIGKILL)
        deaths += code != 0
        if code == 0:
            break
    assert deaths > 5
    check_complete(tmp_path)


@pytest.mark.parametrize("left", range(1, 11))
def test_killed_once_at_a_step_of_a_new_store(tmp_path: Path, left: int) -> None:
    assert run(measure_with_fuse, tmp_path, left) == -signal.SIGKILL
    finished = len(parts.part_paths(tmp_path))
    assert finished == (0 if left < 9 else 1)  # 5 steps for the manifest, then 3 up to a part's rename
    assert run(measure, tmp_path, 0.0) == 0
    check_complete(tmp_path)
    logged = (tmp_path / "log.txt").read_text().split()
    assert len(logged) == len(set(logged)) == CELLS - finished


def test_killed_at_random_moments_it_goes_on(tmp_path: Path) -> None:
    moments = random.Random(0)
    for _ in range(5):
        process = processes.Process(target=measure, args=(tmp_path, 0.03))
        process.start()
        time.sleep(moments.uniform(0.05, 0.2))
        with contextlib.suppress(ProcessLookupError):  # on a quick machine it may be done
            os.kill(process.pid, signal.SIGKILL)
        process.join(60)
    assert run(measure, tmp_path, 0.0) == 0
    check_complete(tmp_path)
    logged = (tmp_path / "log.txt").read_text().split()
    assert len(logged) == len(set(logged))


def hold(folder: Path, ready) -> None:
    with FolderStore(folder, MANIFEST):
        ready.set()
        time.sleep(60)


def test_a_living_writer_is_respected_and_a_dead_one_is_not(tmp_path: Path) -> None:
    ready = processes.Event()
    process = processes.Process(target=hold, args=(tmp_path, ready))
    process.start()
    assert ready.wait(60)
    with pytest.raises(StoreError, match=f"process {process.pid}"):
        FolderStore(tmp_path, MANIFEST)
    assert read_store(tmp_path).records == ()  # reading needs no lock
    os.kill(process.pid, signal.SIGKILL)
    process.join(60)
    with FolderStore(tmp_path, MANIFEST) as store:
        store.append([record(0)])
