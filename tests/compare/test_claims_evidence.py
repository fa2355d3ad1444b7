"""Contrasts of recall against sums done by hand, and which points are measured when."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlcompute.compare.claims_evidence import conversion, skip_share
from rlcompute.policies.checkpoint import METHODS, STRAIGHT_THROUGH
from tests.compare.claims_fakes import fake_evidence, fake_point


@given(st.integers(0, 2**31), st.lists(st.sampled_from([-1.0, 0.5, 1 / 3, 1.0]), min_size=1, max_size=4))
@settings(max_examples=25, deadline=None)
def test_a_contrast_is_the_weighted_sum_of_recalls(seed: int, weights: list[float]) -> None:
    rng = np.random.default_rng(seed)
    points = [
        fake_point(f"p{i}", {"image": rng.integers(0, 3, 40), "text": rng.integers(0, 3, 17)})
        for i in range(len(weights))
    ]
    figure = fake_evidence({}).contrast("x", *zip(weights, points, strict=True))
    expected = sum(weight * point.recall_at_1 for weight, point in zip(weights, points, strict=True))
    assert figure.value == pytest.approx(expected, abs=1e-6)
    assert figure.low <= figure.value + 1e-6 and figure.value <= figure.high + 1e-6


def test_a_contrast_is_paired() -> None:
    """Two policies that fail on the same queries differ by nothing for certain, whatever they lose."""
    ranks = {"image": np.arange(50) % 2}
    evidence = fake_evidence({"a": fake_point("a", ranks), "b": fake_point("b", ranks)})
    gap = evidence.lead("gap", [evidence.point("a")], evidence.point("b"))
    loss = evidence.loss("a", "a")
    assert (gap.value, gap.low, gap.high) == (0.0, 0.0, 0.0)
    assert loss.low < loss.value < loss.high


def test_the_mean_of_several_trainings_leads() -> None:
    evidence = fake_evidence({})
    two = [
        fake_point("a", {"image": np.array([0, 0, 1, 1])}),
        fake_point("a", {"image": np.array([0, 0, 0, 0])}),
    ]
    other = fake_point("b", {"image": np.array([0, 1, 1, 1])})
    assert evidence.lead("x", two, other).value == pytest.approx((50 + 100) / 2 - 25)


def test_policies_are_measured_once_and_together() -> None:
    calls: list[tuple[list[str], list[float]]] = []
    points = {name: fake_point(name, {"image": np.zeros(4, int)}) for name in ("full", "a", "b")}

    def measure(policies: Sequence[str], budgets: Sequence[float]) -> list[Any]:
        calls.append((list(policies), list(budgets)))
        return [points[name] for name in policies]

    evidence = fake_evidence({}, measure=measure)
    evidence.prefetch(["full", "a", "a"])
    evidence.prefetch(["a", "b"])
    evidence.point("a"), evidence.full
    assert calls == [(["full", "a"], []), (["b"], [])]


def test_trainings_of_one_entry_are_one_group() -> None:
    ranks = {"image": np.zeros(4, int)}
    seeds = [fake_point("gates:path=r*/export", ranks, resolved=f"gates:path=r{i}/export") for i in range(3)]
    other = fake_point("gates:path=q/export", ranks)
    # The claims are about GRPO.
    another = replace(fake_point("gates:path=s/export", ranks), method=METHODS[STRAIGHT_THROUGH])
    evidence = fake_evidence({}, measure=lambda policies, budgets: [*seeds, other, another], learned=["any"])
    assert {spec: len(group) for spec, group in evidence.learned.items()} == {
        "gates:path=r*/export": 3,
        "gates:path=q/export": 1,
    }
    assert not fake_evidence({}).learned


def test_shares_and_conversion() -> None:
    point = fake_point("a", {"image": np.zeros(4, int)}, saved=0.25)
    point = replace(point, rows_NG=np.array([[30], [10]]), survived_NG=np.array([[10], [10]]))
    assert skip_share(point, 4) == pytest.approx(0.5)
    timed = replace(point, speedup=1.25, speedup_low=1.0, speedup_high=2.0)
    figure = conversion("a", timed)
    saved = timed.executed_saved
    assert (figure.value, figure.low, figure.high) == pytest.approx((20 / saved, 0.0, 50 / saved))
