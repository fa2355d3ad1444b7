"""Arithmetic of a point, and a measured one against encoding its inputs one by one."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pytest

from rlcompute.backbones import load_backbone
from rlcompute.compare.cache import Cache
from rlcompute.compare.points import Point, Speed, from_entry, to_entry
from rlcompute.compare.run import points
from rlcompute.data.schema import read_pairs
from rlcompute.decision import Full
from rlcompute.encoder import encode
from rlcompute.flops import FlopModel
from rlcompute.policies.expert_rules import UniformTopK
from tests.compare.measured import make_config, make_point

RANKS = {"image": [0, 0, 1, 20], "text": [0, 0, 0, 2]}


def test_figures_by_hand() -> None:
    point = make_point(
        "modes:skip=0.4",
        0.4,
        RANKS,
        speedup=1.25,
        decided_NG=np.array([[10, 8], [0, 4]]),
        survived_NG=np.array([[5, 8], [0, 4]]),
        rows_NG=np.array([[4, 16], [0, 0]]),
        entered_NG=np.array([[10, 8], [5, 8]]),
        bypassed_NG=np.array([[0, 0], [5, 0]]),
    )
    assert point.modalities == ("image", "text")
    assert point.recall_at_1 == pytest.approx((50 + 75) / 2)
    assert point.metrics["image"].recall_at_10 == 75.0
    assert point.lm_saved == pytest.approx(0.4)
    assert point.executed_saved == pytest.approx(40 / 150)
    assert point.logical_saved == pytest.approx(40 / 151)
    assert point.hardware_saved == pytest.approx(40 / 152)
    assert point.conversion == pytest.approx((1 - 1 / 1.25) / (40 / 150))
    assert point.experts_per_token == pytest.approx(20 / 17)
    assert point.layers_run == pytest.approx(31 / 36)
    np.testing.assert_allclose(point.drop_rate_NG, [[0.5, 0.0], [np.nan, 0.0]])
    np.testing.assert_allclose(point.skip_rate_NG, [[0.6, 0.0], [np.nan, 1.0]])


def test_hardly_any_saving_is_not_converted() -> None:
    assert make_point("prune_experts:experts=4", 0.001, RANKS).conversion is None
    assert make_point("full", 0.0, RANKS).conversion is None


@pytest.mark.parametrize(
    ("resolved", "learned", "full"),
    [("full", False, True), ("modes:skip=0.4", False, False), ("gates:path=a+modes:skip=0.4", True, False)],
)
def test_kinds(resolved: str, learned: bool, full: bool) -> None:
    point = make_point(resolved, 0.1, RANKS)
    assert (point.learned, point.is_full) == (learned, full)


def test_a_point_survives_the_cache(tmp_path: Path) -> None:
    point = make_point("modes:skip=0.4", 0.4, RANKS, knob=0.4, budget=0.35)
    Cache(tmp_path).store({}, to_entry(point))
    entry = Cache(tmp_path).load({})
    assert entry is not None
    again = from_entry(
        entry, Speed(point.speedup, point.speedup_low, point.speedup_high, point.inputs_per_second)
    )
    for field in fields(Point):
        before, after = getattr(point, field.name), getattr(again, field.name)
        if field.name == "ranks":
            assert list(before) == list(after)
            assert all(np.array_equal(before[name], after[name]) for name in before)
        else:
            assert np.array_equal(before, after) and type(before) is type(after)


def test_an_entry_from_before_layers_were_bypassed_still_counts() -> None:
    point = make_point("modes:skip=0.4", 0.4, RANKS)
    entry = to_entry(point)
    older = replace(entry, arrays={k: v for k, v in entry.arrays.items() if k != "bypassed_NG"})
    assert older.arrays.keys() < entry.arrays.keys()
    again = from_entry(older, Speed(1.0, 1.0, 1.0, 1.0))
    assert (again.experts_per_token, again.layers_run) == (2.0, 1.0)
    np.testing.assert_array_equal(again.bypassed_NG, point.bypassed_NG)


def test_a_measured_point_equals_encoding_one_by_one(suite_folder: Path, tmp_path: Path) -> None:
    full, half = points(make_config(suite_folder, tmp_path), ["full", "uniform_topk:k=1"], [])
    backbone = load_backbone(suite_folder / "tiny")
    flops = FlopModel(backbone)
    pairs = read_pairs(suite_folder / "test.parquet").pairs
    policies = {"full": (full, Full()), "half": (half, UniformTopK(1, backbone.top_k))}
    for g, modality in enumerate(("image", "text")):
        sides = [side for pair in pairs if pair.modality == modality for side in (pair.query, pair.target)]
        embedded = [backbone.embed_inputs([backbone.preprocessor(side)]) for side in sides]
        vision = sum(x.vision_flops for (x,) in embedded)
        for point, policy in policies.values():
            traces = [encode(backbone, *backbone.pack(x), policy).trace for x in embedded]
            assert point.executed_G[g] == pytest.approx(
                sum(float(flops.executed(t)) for t in traces), rel=1e-12
            )
            assert point.logical_G[g] == pytest.approx(
                sum(float(flops.logical(t)) for t in traces), rel=1e-12
            )
            assert point.vision_G[g] == point.full_vision_G[g] == vision
            for name in ("entered", "decided", "survived", "rows", "bypassed"):
                expected_N = sum(getattr(t, f"{name}_NS")[:, 0].numpy() for t in traces)
                np.testing.assert_array_equal(getattr(point, f"{name}_NG")[:, g], expected_N)
    np.testing.assert_array_equal(half.full_executed_G, full.executed_G)
    assert full.experts_per_token == backbone.top_k
    assert (half.experts_per_token, half.layers_run) == (1.0, 1.0)
    assert half.skip_rate_NG == pytest.approx(np.full((4, 2), 2 / 3))
    assert full.speedup == full.speedup_low == full.speedup_high == 1.0
    assert half.speedup_low <= half.speedup <= half.speedup_high
    assert full.lm_saved == 0.0 < half.executed_saved < half.lm_saved
