"""The files that a benchmark writes, on a tiny geometry; nothing here depends on how long anything took."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rlcompute.benchmark import TABLES, run
from rlcompute.benchmark.breakdown import COMPONENTS
from rlcompute.benchmark.geometry import GEOMETRIES, Geometry
from rlcompute.benchmark.pictures import fit
from rlcompute.benchmark.rows import Row, compared
from rlcompute.benchmark.timing import Timing
from rlcompute.errors import BackendError, ConfigError

KEYS = [
    "table",
    "row",
    "variant",
    "seconds_median",
    "seconds_iqr",
    "flops",
    "speedup",
    "flops_saved",
    "conversion",
]
MEASURED = ("i", "ii", "iii", "iv", "v")


@pytest.fixture(scope="module")
def folder(tiny: Geometry, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("benchmark") / "results"
    run(geometry=tiny, out=out, tables=MEASURED, threads=1, budget_s=0.0)
    return out


@pytest.fixture(scope="module")
def rows(folder: Path) -> list[dict[str, object]]:
    return json.loads((folder / "benchmark.json").read_text())


def test_rows_have_exactly_the_documented_keys_and_types(rows: list[dict[str, object]]) -> None:
    for row in rows:
        assert list(row) == KEYS
        assert all(isinstance(row[key], str) for key in KEYS[:3])
        assert all(isinstance(row[key], float) for key in KEYS[3:5])
        assert all(row[key] is None or isinstance(row[key], float) for key in KEYS[5:])
    assert list(dict.fromkeys(row["table"] for row in rows)) == list(MEASURED)


def test_flops_fall_with_what_is_kept(rows: list[dict[str, object]]) -> None:
    for table, variant in (("i", "packed"), ("ii", "ours"), ("ii", "grouped_mm"), ("ii", "eager loop")):
        flops = [row["flops"] for row in rows if row["table"] == table and row["variant"] == variant]
        assert len(flops) >= 4
        assert flops == sorted(flops, reverse=True)
    masked = [row["flops"] for row in rows if row["variant"] == "masked"]
    assert masked == [row["flops"] for row in rows if row["variant"] == "packed"]


def test_the_breakdown_names_every_component_of_every_policy(rows: list[dict[str, object]]) -> None:
    breakdown = [row for row in rows if row["table"] == "iv"]
    for variant in ("full", "greedy gates", "sampled gates"):
        mine = {row["row"]: row for row in breakdown if row["variant"] == variant}
        assert list(mine) == ["total", *COMPONENTS]
        assert (mine["score statistic"]["seconds_median"] > 0) == (variant == "sampled gates")
        if variant != "full":
            assert mine["total"]["flops_saved"] == pytest.approx(0.45, abs=0.15)


def test_the_report_has_every_table_and_picture(folder: Path) -> None:
    text = (folder / "benchmark.md").read_text()
    for number in MEASURED:
        assert f"## Table {number}\n" in text
    assert "three layers for tests" in text and "torch threads: 1" in text
    pictures = sorted(path.name for path in folder.glob("*.png"))
    assert len(pictures) == 5
    assert all(f"({name})" in text for name in pictures)


@pytest.mark.parametrize(
    ("change", "error", "match"),
    [
        ({"geometry": "huge"}, ConfigError, r"huge.*demo, bench, qwen3_5_35b_a3b"),
        ({"tables": ["i", "ix"]}, ConfigError, r"no table ix"),
        ({"tables": []}, ConfigError, r"no table asked for"),
        ({"dtype": "int8"}, ConfigError, r"int8"),
        ({"kernels": {"experts": "abacus"}}, BackendError, r"abacus"),
        ({"kernels": {"abacus": "torch"}}, BackendError, r"abacus"),
    ],
)
def test_bad_names_are_refused_before_anything_is_measured(
    tiny: Geometry, tmp_path: Path, change: dict[str, object], error: type[Exception], match: str
) -> None:
    with pytest.raises(error, match=match):
        run(**{"geometry": tiny, "out": tmp_path / "out", "tables": ["i"], **change})
    assert not (tmp_path / "out").exists()


def test_tables_are_registered_in_their_order() -> None:
    assert [number for number in TABLES if number in MEASURED] == list(MEASURED)


def test_geometries_keep_the_proportions_of_the_real_model() -> None:
    for name in ("bench", "qwen3_5_35b_a3b"):
        text = GEOMETRIES[name].text
        assert text is not None
        d = text["hidden_size"]
        assert text["moe_intermediate_size"] * 4 == d
        assert text["num_attention_heads"] * text["head_dim"] == 2 * d
        assert text["linear_num_value_heads"] * text["linear_value_head_dim"] == 2 * d
        assert text["linear_num_key_heads"] * text["linear_key_head_dim"] == d
        assert sum(text["rope_parameters"]["mrope_section"]) * 8 == text["head_dim"]
        assert text["num_experts"] >= 64 and text["num_experts_per_tok"] == 8


def test_conversion_is_time_saved_over_flops_saved() -> None:
    row = compared("i", "keep", "packed", Timing((0.6,)), 40.0, Timing((1.0,)), 100.0)
    assert row.flops_saved == pytest.approx(0.6)
    assert row.conversion == pytest.approx(0.4 / 0.6)
    assert row.speedup == pytest.approx(1 / 0.6)
    assert compared("i", "keep", "full", Timing((1.0,)), 100.0, Timing((1.0,)), 100.0).conversion is None


def test_the_regression_recovers_a_line() -> None:
    rows = [Row("i", "", "", 0.25 + 2e-12 * flops, 0.0, flops) for flops in (1e12, 2e12, 4e12)]
    assert fit(rows) == pytest.approx((2e-12, 0.25))
