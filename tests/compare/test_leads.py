"""Who is ahead, by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from rlcompute.compare.leads import leads, paired
from rlcompute.compare.points import Point
from tests.compare.measured import make_point

HIT, MISS = 0, 3


def hits(count: int, of: int = 20) -> dict[str, list[int]]:
    """The first ``count`` image queries and all text queries are right."""
    return {"image": [HIT] * count + [MISS] * (of - count), "text": [HIT] * of}


def gates(name: str, saved: float, count: int, spec: str = "gates:path=g*", **changed: Any) -> Point:
    return make_point(f"gates:path={name}", saved, hits(count), spec=spec, **changed)


FULL = make_point("full", 0.0, hits(20))


def test_paired_differences_are_those_of_the_mean_member() -> None:
    ours = [
        make_point("gates:path=a", 0.5, {"image": [HIT, HIT, MISS]}),
        make_point("gates:path=b", 0.5, {"image": [HIT, MISS, MISS]}),
    ]
    other = make_point("uniform_topk:k=1", 0.5, {"image": [MISS, HIT, MISS]})
    (difference_P,) = paired(ours, other)
    np.testing.assert_array_equal(difference_P, [100.0, -50.0, 0.0])


def test_the_lead_is_over_the_best_rule_that_reaches_the_budget() -> None:
    points = [
        FULL,
        make_point("uniform_topk:k=1", 0.45, hits(18)),  # better, but saves too little
        make_point("beta_skip:share=0.9", 0.545, hits(10)),
        make_point("modes:skip=0.5", 0.60, hits(12)),
        gates("g0", 0.56, 16),
        gates("g1", 0.56, 14),
    ]
    (lead,) = leads(points, [0.55], samples=500, seed=0)
    assert (lead.budget, lead.group, lead.members) == (0.55, "gates:path=g*", 2)
    assert (lead.rule, lead.rule_saved) == ("modes:skip=0.5", pytest.approx(0.60))
    assert lead.saved == pytest.approx(0.56)
    # Image: 15 of 20 on average against 12, text: equal; the mean over both modalities halves it.
    assert lead.lead == pytest.approx(100 * (15 - 12) / 20 / 2)
    assert lead.recall_at_1 - lead.rule_recall_at_1 == pytest.approx(lead.lead)
    assert lead.low < lead.lead < lead.high
    assert lead.verdict == "ahead"


@pytest.mark.parametrize(("learned", "verdict"), [(20, "ahead"), (12, "level"), (4, "behind")])
def test_verdicts(learned: int, verdict: str) -> None:
    points = [FULL, make_point("uniform_topk:k=1", 0.5, hits(12)), gates("g", 0.5, learned)]
    (lead,) = leads(points, [0.5], samples=500, seed=0)
    assert lead.verdict == verdict


def test_every_group_stands_at_the_largest_budget_it_reaches_and_empty_budgets_borrow_the_nearest() -> None:
    points = [
        FULL,
        make_point("modes:skip=1.0", 0.9, hits(10)),
        gates("a", 0.46, 18, "gates:path=a"),
        gates("b", 0.56, 17, "gates:path=b"),
        gates("c", 0.57, 16, "gates:path=c"),
    ]
    found = [(x.budget, x.group) for x in leads(points, [0.55, 0.3, 0.45, 0.65], samples=10, seed=0)]
    assert found == [
        (0.3, "gates:path=a"),
        (0.45, "gates:path=a"),
        (0.55, "gates:path=b"),
        (0.55, "gates:path=c"),
    ]


def test_methods_are_judged_side_by_side_also_where_one_entry_stands_for_both() -> None:
    points = [
        FULL,
        make_point("modes:skip=1.0", 0.9, hits(10)),
        gates("a", 0.46, 18),
        gates("b", 0.45, 16, method="straight-through"),
        gates("c", 0.46, 20),
        gates("d", 0.56, 17, "gates:path=d", method="straight-through"),
    ]
    found = leads(points, [0.45, 0.55, 0.3], samples=10, seed=0)
    assert [(x.budget, x.method, x.group, x.members) for x in found] == [
        # Nobody was trained for 30 %: of each method the nearest group stands in.
        (0.3, "GRPO", "gates:path=g*", 2),
        (0.3, "straight-through", "gates:path=g*", 1),
        (0.45, "GRPO", "gates:path=g*", 2),
        (0.45, "straight-through", "gates:path=g*", 1),
        (0.55, "straight-through", "gates:path=d", 1),
    ]
    assert [x.recall_at_1 for x in found[2:4]] == pytest.approx([(95 + 100) / 2, (80 + 100) / 2])


def test_gates_shifted_to_a_budget_are_a_group_of_that_budget() -> None:
    spec = "gates:path=g*,shift=*"
    at = [
        gates(f"{name},shift={shift}", saved, 16, spec, budget=saved, knob=shift)
        for name in "ab"
        for saved, shift in ((0.3, 0.0), (0.45, 1.5))
    ]
    points = [FULL, make_point("modes:skip=1.0", 0.9, hits(10)), *at]
    found = leads(points, [0.3, 0.45], samples=10, seed=0)
    assert [(x.budget, x.group, x.members) for x in found] == [
        (0.3, f"{spec} at 30 %", 2),
        (0.45, f"{spec} at 45 %", 2),
    ]


def test_no_rule_and_no_group_mean_no_lead() -> None:
    assert leads([FULL, gates("g", 0.5, 20)], [0.5], samples=10, seed=0) == []
    assert leads([FULL, make_point("uniform_topk:k=1", 0.5, hits(9))], [0.5], samples=10, seed=0) == []
