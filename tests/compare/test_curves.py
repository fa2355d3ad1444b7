"""What the pictures of a comparison show of gates that different methods trained."""

from __future__ import annotations

from typing import Any

import pytest

from rlcompute.compare import curves
from rlcompute.compare.points import Point
from tests.compare.measured import make_point

RANKS = {"image": [0, 0, 0, 5], "text": [0, 0, 0, 0]}
ENTRY = {"delta_vs_full": {"ci95": [-1.0, 1.0]}}


def gates(name: str, method: str, correct: int, saved: float) -> Point:
    ranks = {"image": [0] * correct + [5] * (4 - correct), "text": [0] * 4}
    return make_point(f"gates:path=runs/{name}/export", saved, ranks, method=method)


def test_each_method_has_its_lines_and_its_firing_rates(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: dict[str, Any] = {}

    def draw_curves(points: Any, **told: Any) -> str:
        drawn["lines"] = [(point.policy, point.joined) for point in points]
        return "curves"

    def draw_rates(rates: Any, title: str) -> str:
        drawn["rates"] = list(dict.fromkeys(rate.policy for rate in rates))
        return "rates"

    monkeypatch.setattr(curves, "budget_curves", draw_curves)
    monkeypatch.setattr(curves, "firing_rates", draw_rates)
    points = [
        make_point("full", 0.0, RANKS),
        make_point("modes:skip=0.5+skip_layers:first=1", 0.5, RANKS),
        gates("a", "GRPO", 2, 0.5),
        gates("b", "GRPO", 3, 0.5),
        gates("c", "straight-through", 1, 0.5),
        gates("d", "straight-through", 4, 0.2),  # does not reach the budget
    ]
    found = curves.pictures(points, [ENTRY] * len(points), [0.45], "x")
    assert set(found.values()) == {"curves", "rates"}
    assert drawn["lines"][1:] == [
        ("gates a", False),
        ("gates b", False),
        ("gates c", False),
        ("gates d", False),
    ]
    assert drawn["rates"][1:] == ["GRPO gates b", "straight-through gates c"]
