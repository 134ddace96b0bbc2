"""Results: table, arrays and summary say the same."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
from tests.store.store_cases import PROVENANCE, record

from sightlens.errors import StoreError
from sightlens.store import Record, Result

RESULT = Result(tuple(record(layer, at) for layer in (2, 0, 1) for at in ("object", "random")))


def test_table_has_a_row_per_cell_metric_and_example():
    table = RESULT.to_pandas()
    assert list(table.columns) == ["layer", "at", "metric", "example", "value", "provenance"]
    assert len(table) == 6 * 2 * 3
    row = table[(table.layer == 1) & (table["at"] == "random") & (table.metric == "iou") & (table.example == "c")]
    assert row.value.tolist() == [1 / 3]
    assert row.provenance.tolist() == [PROVENANCE.digest]
    assert pd.api.types.is_integer_dtype(table.layer)


def test_arrays_agree_with_the_table():
    arrays, table = RESULT.to_xarray(), RESULT.to_pandas()
    assert arrays.iou.dims == ("layer", "at", "example")
    assert arrays.iou.shape == (3, 2, 3)
    assert arrays.layer.values.tolist() == [2, 0, 1]
    for row in table.itertuples():
        found = arrays[row.metric].sel({"layer": row.layer, "at": row.at, "example": row.example}).item()
        assert found == row.value or (np.isnan(found) and np.isnan(row.value))


def test_unmeasured_places_are_missing():
    partial = Result((record(0), record(1, "random")))
    assert np.isnan(partial.to_xarray().hit.sel(layer=0, at="random")).all()


def test_summary_by_hand():
    summary = RESULT.summary()
    assert list(summary.columns) == ["layer", "at", "metric", "mean", "low", "high", "n", "missing"]
    assert len(summary) == 12
    iou = summary[(summary.layer == 2) & (summary["at"] == "object") & (summary.metric == "iou")].iloc[0]
    assert iou["mean"] == pytest.approx((2.25 + 1 / 3) / 2)
    assert (iou.n, iou.missing) == (2, 1)
    assert iou.low == pytest.approx(1 / 3)
    assert iou.high == pytest.approx(2.25)
    assert pd.api.types.is_integer_dtype(summary.layer)


def test_examples_a_cell_lacks_are_missing():
    short = record(0, examples=("a", "b"), values={"hit": (1.0, 1.0)})
    summary = Result((short, record(1))).summary()
    assert summary[(summary.layer == 0) & (summary.metric == "hit")].missing.item() == 1
    assert summary[(summary.layer == 0) & (summary.metric == "iou")].n.item() == 0


def test_choosing_cells():
    assert [one.cell for one in RESULT.where({"layer": 1}).records] == [record(1).cell, record(1, "random").cell]
    assert len(RESULT.where({"layer": [0, 2], "at": "object"}).records) == 2
    for coordinates, words in (
        ({"depth": 1}, "layer, at"),
        ({"layer": 7}, "2, 0 and|2, 0, 1"),
        ({"at": "objekt"}, "'object'"),
    ):
        with pytest.raises(StoreError, match=words):
            RESULT.where(coordinates)
    with pytest.raises(StoreError, match="something was measured"):
        Result((record(0), record(1, "random"))).where({"layer": 0, "at": "random"})


def test_cells_on_different_axes():
    clean = record(0, coordinates={"condition": "clean"})
    mixed = Result((record(0), clean))
    assert mixed.to_pandas().condition.notna().sum() == 6
    assert len(mixed.summary()) == 4
    with pytest.raises(StoreError, match="where"):
        mixed.to_xarray()


def test_an_empty_result_has_its_columns():
    empty = Result(())
    assert len(empty.to_pandas()) == 0
    assert len(empty.summary()) == 0
    assert "nothing" in repr(empty)
    assert empty._repr_html_()


def test_a_study_without_axes_has_one_cell():
    alone = Result((record(0, coordinates={}),))
    assert alone.to_xarray().iou.dims == ("example",)
    assert len(alone.summary()) == 2
    assert "one cell" in repr(alone)


def test_infinite_values_stay_in_the_table_and_leave_the_mean():
    result = Result((record(0, values={"ppl": (1.0, float("inf"), 3.0)}),))
    assert np.isinf(result.to_pandas().value).sum() == 1
    row = result.summary().iloc[0]
    assert row["mean"] == 2.0
    assert row.missing == 1


def test_it_prints_itself():
    assert repr(RESULT) == "<Result knockout: 6 cells (layer[3] × at[2]), metrics iou, hit, 3 examples>"
    evil = Record(
        study="<script>",
        coordinates={"at": "<img src=x>"},
        examples=("a",),
        values={"<b>": (1.0,)},
        provenance=PROVENANCE,
    )
    page = Result((evil,))._repr_html_()
    assert "<script>" not in page
    assert "<img" not in page
    assert "<b>" not in page
    assert "&lt;img" in page
