"""The knob solver on functions whose answer is known."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlcompute.compare.budget import TOLERANCE, KnobSolver, OutOfReach, Solution, rounded
from rlcompute.policies.rules import PolicySpec, parse


def knob_of(spec: PolicySpec) -> float:
    """The value that the solver set."""
    (value,) = (value for rule in spec.rules for value in rule.values.values() if isinstance(value, float))
    return value


@settings(deadline=None)
@given(
    power=st.floats(0.5, 5.0),
    least=st.floats(0.0, 0.3),
    most=st.floats(0.5, 1.0),
    budget=st.floats(0.0, 1.0),
    rising=st.booleans(),
)
def test_a_smooth_knob_meets_every_budget_in_reach(
    power: float, least: float, most: float, budget: float, rising: bool
) -> None:
    spec = parse("beta_skip:share=*" if rising else "random_prune:layer=1,keep=*")

    def saving(value: float) -> float:
        return least + (most - least) * (value if rising else 1.0 - value) ** power

    solved = KnobSolver(spec, lambda x: saving(knob_of(x))).solve(budget)
    if least <= budget <= most:
        assert isinstance(solved, Solution)
        assert abs(saving(solved.knob) - budget) <= TOLERANCE
        assert solved.saved == saving(solved.knob)
        # The text of the policy means the very value that was evaluated.
        assert knob_of(parse(spec.with_free(solved.knob).text)) == solved.knob
    elif budget < least - TOLERANCE or budget > most + TOLERANCE:
        assert isinstance(solved, OutOfReach)
        assert (solved.least, solved.most) == pytest.approx((least, most))


@settings(deadline=None)
@given(steps=st.integers(2, 12), budget=st.floats(0.0, 1.0))
def test_a_knob_that_works_in_jumps_takes_the_nearest(steps: int, budget: float) -> None:
    solver = KnobSolver(parse("beta_skip:share=*"), lambda x: round(knob_of(x) * steps) / steps)
    solved = solver.solve(budget)
    assert isinstance(solved, Solution)
    nearest = np.abs(np.arange(steps + 1) / steps - budget).min()
    assert abs(solved.saved - budget) <= max(nearest, TOLERANCE) + 1e-9


def test_no_setting_is_evaluated_twice_and_the_order_of_budgets_does_not_matter() -> None:
    seen: list[float] = []

    def saving(spec: PolicySpec) -> float:
        seen.append(knob_of(spec))
        return seen[-1] ** 3

    spec, budgets = parse("beta_skip:share=*"), [0.2, 0.5, 0.45, 0.2]
    solver = KnobSolver(spec, saving)
    found = [solver.solve(budget) for budget in budgets]
    assert len(seen) == len(set(seen))
    assert found == [KnobSolver(spec, saving).solve(budget) for budget in budgets]


def test_rounding_is_what_a_text_holds() -> None:
    assert rounded(0.123456789) == 0.123457
