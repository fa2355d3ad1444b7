"""Verdict rules: every end of an interval on every side of its bound."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlcompute.compare.claims_model import (
    Figure,
    Judgement,
    above,
    all_of,
    at_least,
    at_most,
    costs_little,
    effect,
    exact,
    inside,
    no_better,
)


def figure(low: float, high: float) -> Figure:
    return Figure("x", (low + high) / 2, low, high, "points")


CASES = [
    (at_most(figure(0.1, 0.9), 1.0), "agrees"),
    (at_most(figure(0.1, 1.0), 1.0), "agrees"),
    (at_most(figure(0.9, 1.1), 1.0), "undecided"),
    (at_most(figure(1.1, 1.9), 1.0), "disagrees"),
    (at_least(figure(1.0, 1.9), 1.0), "agrees"),
    (at_least(figure(0.9, 1.9), 1.0), "undecided"),
    (at_least(figure(0.1, 0.9), 1.0), "disagrees"),
    (above(figure(0.0, 0.4)), "undecided"),
    (above(figure(0.1, 0.4)), "agrees"),
    (above(figure(-0.4, 0.0)), "undecided"),
    (above(figure(-0.4, -0.1)), "disagrees"),
    (above(exact("x", 0.0)), "undecided"),
    (inside(figure(-1.0, 1.0), -1.0, 1.0), "agrees"),
    (inside(figure(0.5, 1.5), -1.0, 1.0), "undecided"),
    (inside(figure(-3.0, -1.5), -1.0, 1.0), "disagrees"),
    # A small loss counts only where the control's shows.
    (costs_little(figure(0.1, 0.9), figure(3.0, 4.0), 1.0), "agrees"),
    (costs_little(figure(0.1, 0.9), figure(0.5, 4.0), 1.0), "undecided"),
    (costs_little(figure(2.1, 2.9), figure(0.5, 4.0), 1.0), "disagrees"),
    # A small gap says nothing near the ceiling, one of the wrong sign does.
    (effect(figure(3.1, 4.0), 3.0, True), "agrees"),
    (effect(figure(0.1, 1.0), 3.0, True), "undecided"),
    (effect(figure(0.1, 1.0), 3.0, False), "disagrees"),
    (effect(figure(-1.0, -0.1), 3.0, True), "disagrees"),
    # Better by however little is better; no better needs room for it.
    (no_better(figure(0.01, 0.2), figure(1.0, 2.0), 0.5), "disagrees"),
    (no_better(figure(-0.1, 0.2), figure(1.0, 2.0), 0.5), "agrees"),
    (no_better(figure(-0.1, 0.2), figure(0.1, 2.0), 0.5), "undecided"),
    (no_better(figure(-0.1, 0.6), figure(1.0, 2.0), 0.5), "undecided"),
]


@pytest.mark.parametrize(("judgement", "verdict"), CASES)
def test_an_interval_decides_only_where_it_does_not_hold_the_bound(
    judgement: Judgement, verdict: str
) -> None:
    assert judgement.verdict == verdict
    assert judgement.reason


@given(st.floats(-5, 5), st.floats(0, 3), st.floats(-5, 5))
def test_opposite_rules_never_both_agree(middle: float, half: float, bound: float) -> None:
    x = figure(middle - half, middle + half)
    verdicts = {at_most(x, bound).verdict, above(x, bound).verdict}
    assert verdicts in (
        {"agrees", "disagrees"},
        {"undecided"},
        {"undecided", "agrees"},
        {"undecided", "disagrees"},
    )


def test_what_is_not_defined_is_undecided() -> None:
    nothing = Figure("x", math.nan, math.nan, math.nan)
    assert {rule(nothing, 0.0).verdict for rule in (at_most, at_least, above)} == {"undecided"}
    assert inside(nothing, 0.0, 1.0).verdict == "undecided"
    assert "not defined" in at_most(nothing, 0.0).reason


def test_a_claim_of_several_things_is_as_good_as_its_worst_part() -> None:
    yes, no, open_ = Judgement("agrees", "a"), Judgement("disagrees", "b"), Judgement("undecided", "c")
    assert all_of(yes, yes) == Judgement("agrees", "a; a")
    assert all_of(yes, open_) == open_
    assert all_of(open_, no, yes) == no
