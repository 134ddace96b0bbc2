"""Stores: what goes in comes out, and what does not belong is refused by name."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jaxtyping import TypeCheckError
from tests.store.store_cases import MANIFEST, PROVENANCE, record

from sightlens.errors import StoreError
from sightlens.store import (
    FolderStore,
    Manifest,
    MemoryStore,
    Provenance,
    Record,
    cell_key,
    open_store,
    parts,
    read_store,
)


@pytest.fixture(params=["folder", "memory"])
def store(request, tmp_path):
    with open_store(tmp_path / "runs" / "one" if request.param == "folder" else None, MANIFEST) as opened:
        yield opened


def test_records_come_back(store):
    store.append([record(0), record(1)])
    store.append([record(0, "random")])
    store.append([])
    assert {cell: set(examples) for cell, examples in store.done().items()} == {
        made.cell: {"a", "b", "c"} for made in (record(0), record(1), record(0, "random"))
    }
    expected = [record(0), record(1), record(0, "random")]
    assert [repr(found) for found in store.read().records] == [repr(made) for made in expected]


def test_a_cell_is_kept_once(store):
    store.append([record(0)])
    for batch in ([record(0)], [record(1), record(1)], [record(2), record(0)]):
        with pytest.raises(StoreError, match="layer"):
            store.append(batch)
    assert set(store.done()) == {record(0).cell}  # a refused batch leaves nothing behind


@pytest.mark.parametrize(
    "stranger",
    [record(0, study="other"), record(0, provenance=dataclasses.replace(PROVENANCE, content_hash="ffff"))],
)
def test_records_of_another_study_or_model_are_refused(store, stranger):
    with pytest.raises(StoreError, match=r"other|ffff"):
        store.append([stranger])


def test_versions_may_change_between_sittings(store):
    newer = dataclasses.replace(PROVENANCE, versions=(("torch", "2.14"),), device="cuda")
    store.append([record(0), record(1, provenance=newer)])
    assert store.read().provenance == (PROVENANCE, newer)


def test_a_reopened_folder_goes_on(tmp_path):
    with FolderStore(tmp_path, MANIFEST) as store:
        store.append([record(0)])
    with FolderStore(tmp_path, MANIFEST) as store:
        assert set(store.done()) == {record(0).cell}
        store.append([record(1)])
    assert [found.coordinates["layer"] for found in read_store(tmp_path).records] == [0, 1]


@pytest.mark.parametrize(
    ("other", "names"),
    [
        (dataclasses.replace(MANIFEST, study="probe"), ["'probe'", "'knockout'"]),
        (
            dataclasses.replace(MANIFEST, definition={**MANIFEST.definition, "layer": [9]}),
            ["layer=[9]", "layer=[0, 1, 2]"],
        ),
        (
            dataclasses.replace(MANIFEST, identity={**MANIFEST.identity, "model_id": "big"}),
            ['"big"', '"sightlens/tiny-llava"'],
        ),
        (dataclasses.replace(MANIFEST, identity={**MANIFEST.identity, "layout_hash": "99"}), ['"99"', '"0f0f"']),
    ],
)
def test_a_folder_of_another_study_model_or_layout_is_refused_naming_both(tmp_path, other, names):
    FolderStore(tmp_path, MANIFEST).close()
    with pytest.raises(StoreError) as caught:
        FolderStore(tmp_path, other)
    assert all(name in str(caught.value) for name in [*names, str(tmp_path)])
    FolderStore(tmp_path, MANIFEST).close()  # the refusal left no lock behind


def test_two_writers_in_one_process_are_refused(tmp_path):
    with FolderStore(tmp_path, MANIFEST), pytest.raises(StoreError, match="only writer"):
        FolderStore(tmp_path, MANIFEST)
    FolderStore(tmp_path, MANIFEST).close()


@given(place=st.floats(0, 1), how=st.sampled_from(["cut", "flip", "empty", "text"]))
@settings(max_examples=60, deadline=None)
def test_a_damaged_part_is_named(tmp_path_factory, place, how):
    folder = tmp_path_factory.mktemp("store")
    with FolderStore(folder, MANIFEST) as store:
        store.append([record(0)])
    path = parts.part_paths(folder)[0]
    data = path.read_bytes()
    index = min(int(place * len(data)), len(data) - 1)
    damaged = {"cut": data[:index], "flip": data[:index] + bytes([data[index] ^ 1]) + data[index + 1 :], "empty": b""}
    path.write_bytes(damaged.get(how, b"hello"))
    try:
        found = read_store(folder).records
    except StoreError as error:
        message = str(error)
    else:
        message = f"Delete {path.name}"
        assert how == "flip"
        assert [repr(one) for one in found] == [repr(record(0))]
    assert f"Delete {path.name}" in message


def test_deleting_a_damaged_part_repeats_its_cells_only(tmp_path):
    with FolderStore(tmp_path, MANIFEST) as store:
        store.append([record(0)])
        store.append([record(1)])
    path = parts.part_paths(tmp_path)[0]
    path.write_bytes(path.read_bytes()[:200])
    with pytest.raises(StoreError, match=path.name):
        FolderStore(tmp_path, MANIFEST)
    path.unlink()
    with FolderStore(tmp_path, MANIFEST) as store:
        assert set(store.done()) == {record(1).cell}
        store.append([record(0)])
        assert len(store.read().records) == 2


def batch(examples, **changes):
    """Some examples of one cell."""
    values = {"iou": tuple(float(ord(name)) for name in examples)}
    notes = tuple({"text": name * 2} for name in examples)
    return record(0, examples=tuple(examples), values=values, notes=notes, **changes)


def test_a_cell_may_come_in_batches_of_examples(store):
    newer = dataclasses.replace(PROVENANCE, versions=(("torch", "2.14"),))
    store.append([batch("ab")])
    store.append([record(1)])
    store.append([batch("c", provenance=newer)])
    first, second = store.read().records
    assert (first.examples, first.values["iou"]) == (("a", "b", "c"), (97.0, 98.0, 99.0))
    assert [note["text"] for note in first.notes] == ["aa", "bb", "cc"]
    assert "2.14" in first.provenance.warnings[-1]
    assert repr(second) == repr(record(1))
    assert set(store.done()[first.cell]) == {"a", "b", "c"}
    with pytest.raises(StoreError, match="not measured before"):
        store.append([batch("bd")])


def test_notes_are_one_per_example():
    with pytest.raises(StoreError, match="one per example"):
        record(0, notes=({},))


def test_a_cell_in_two_parts_is_refused(tmp_path):
    with FolderStore(tmp_path, MANIFEST) as store:
        store.append([record(0)])
    parts.write_part(tmp_path, [record(0)], number=1)
    with pytest.raises(StoreError, match="each example of a cell once"):
        read_store(tmp_path)


def test_manifests_are_checked(tmp_path):
    with pytest.raises(StoreError, match=r"manifest\.json"):
        read_store(tmp_path)
    FolderStore(tmp_path, MANIFEST).close()
    path = tmp_path / "manifest.json"
    assert Manifest.read(path) == MANIFEST
    for text, words in (
        ("{", "readable"),
        ("[]", "readable"),
        (json.dumps({**json.loads(path.read_text()), "format": 9}), "format 9"),
    ):
        path.write_text(text)
        with pytest.raises(StoreError, match=words):
            FolderStore(tmp_path, MANIFEST)
    path.unlink()
    parts.write_part(tmp_path, [record(0)], number=0)
    with pytest.raises(StoreError, match=r"manifest\.json beside"):
        FolderStore(tmp_path, MANIFEST)
    with pytest.raises(StoreError, match="JSON"):
        Manifest.of("a", {"x": [object()]}, provenance=PROVENANCE)


def test_a_folder_that_is_a_file_is_refused(tmp_path):
    (tmp_path / "taken").write_text("")
    with pytest.raises(StoreError, match="taken"):
        FolderStore(tmp_path / "taken", MANIFEST)


numbers = st.floats(allow_nan=True, allow_infinity=True)
text = st.text(max_size=8)
places = st.one_of(text, st.integers(-(2**53), 2**53), st.floats(allow_nan=False, allow_infinity=False))


@given(
    coordinates=st.dictionaries(st.text(min_size=1, max_size=5).filter(lambda name: name not in ("n", "low")), places, max_size=3),
    values=st.lists(numbers, min_size=2, max_size=2),
    extras=st.dictionaries(text, st.one_of(st.none(), text, st.lists(st.integers(), max_size=3)), max_size=2),
)
@settings(max_examples=60, deadline=None)
def test_any_record_comes_back_exactly(tmp_path_factory, coordinates, values, extras):
    folder = tmp_path_factory.mktemp("part")
    made = Record(
        study="s",
        coordinates=coordinates,
        examples=("é\x00<", "b"),
        values={"m": tuple(values)},
        provenance=PROVENANCE,
        extras=extras,
    )
    found = parts.read_part(parts.write_part(folder, [made], number=0))[0]
    assert repr(found) == repr(made)
    assert found.cell == made.cell


def test_provenance_round_trip():
    assert Provenance.from_json(PROVENANCE.to_json()) == PROVENANCE
    assert dataclasses.replace(PROVENANCE, seed=1).digest != PROVENANCE.digest
    with pytest.raises(StoreError, match="seed"):
        Provenance.from_json(json.dumps({key: value for key, value in json.loads(PROVENANCE.to_json()).items() if key != "seed"}))


def test_equal_coordinates_have_one_key():
    assert cell_key({"b": 1, "a": "x"}) == cell_key({"a": "x", "b": 1.0})
    assert cell_key({"b": 1}) != cell_key({"b": "1"})


@pytest.mark.parametrize(
    "changes",
    [
        {"coordinates": {"layer": math.nan}},
        {"coordinates": {"layer": None}},
        {"coordinates": {"layer": True}},
        {"coordinates": {"value": 1}},
        {"values": {"iou": (1.0,)}},
        {"values": {}},
        {"examples": ("a", "a", "b")},
        {"extras": {"tensor": object()}},
    ],
)
def test_records_that_cannot_be_kept_are_refused(changes):
    with pytest.raises((StoreError, TypeCheckError)):
        record(0, **changes)


def test_memory_is_the_default():
    assert isinstance(open_store(None, MANIFEST), MemoryStore)


@pytest.mark.parametrize("name", [".lock", ".writer", "manifest.json", "part-000000-aa.parquet", "manifest.json.partial"])
def test_a_folder_where_a_file_should_be_is_refused(tmp_path, name):
    (tmp_path / name).mkdir()
    with pytest.raises(StoreError):
        FolderStore(tmp_path, MANIFEST)
    (tmp_path / name).rmdir()
    FolderStore(tmp_path, MANIFEST).close()  # nobody was left holding it


def test_a_path_that_no_system_has_is_refused():
    for make in (lambda: FolderStore(Path("a\0b"), MANIFEST), lambda: read_store(Path("a\0b"))):
        with pytest.raises(StoreError):
            make()


@pytest.mark.parametrize("place", ["mkdir", "filelock.FileLock.acquire", "sightlens.store.parts.write_whole"])
def test_a_folder_that_may_not_be_written_is_refused(tmp_path, monkeypatch, place):
    def refuse(*_, **__):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, place, refuse) if place == "mkdir" else monkeypatch.setattr(place, refuse)
    with pytest.raises(StoreError, match="Permission denied"):
        FolderStore(tmp_path / "new" if place == "mkdir" else tmp_path, MANIFEST)


def test_a_disk_that_fills_up_is_reported(tmp_path, monkeypatch):
    def refuse(*_):
        raise OSError(28, "No space left on device")

    with FolderStore(tmp_path, MANIFEST) as store:
        monkeypatch.setattr(parts, "write_whole", refuse)
        with pytest.raises(StoreError, match="No space left"):
            store.append([record(0)])
        assert store.done() == {}


@pytest.mark.parametrize(
    "change",
    [
        {"coordinates": "[1]"},
        {"coordinates": "{"},
        {"extras": "3"},
        {"notes": ["1", "2", "3"]},
        {"provenance": None},
        {"values": None},
        {"examples": None},
        {"cell": None},
        {"study": None},
        {"cell": '{"at":"object","layer":7}'},
    ],
    ids=str,
)
def test_a_part_with_a_record_of_wrong_types_is_named(tmp_path, change):
    FolderStore(tmp_path, MANIFEST).close()
    path = parts.write_part(tmp_path, [record(0)], number=0)
    row = {**pq.read_table(path).to_pylist()[0], **change}
    pq.write_table(pa.Table.from_pylist([row], parts.SCHEMA), path)
    with pytest.raises(StoreError, match=f"Delete {path.name}"):
        read_store(tmp_path)


def test_a_part_with_columns_of_wrong_types_is_named(tmp_path):
    FolderStore(tmp_path, MANIFEST).close()
    path = parts.write_part(tmp_path, [record(0)], number=0)
    table = pq.read_table(path)
    pq.write_table(table.set_column(table.schema.get_field_index("study"), "study", pa.array([1])), path)
    with pytest.raises(StoreError, match=f"Delete {path.name}"):
        read_store(tmp_path)
