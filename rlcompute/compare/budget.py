"""Sets a policy's free knob so that it saves a given share of compute."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from rlcompute.policies.rules import PolicySpec

TOLERANCE = 0.0025
"""How far the saving may be from the budget, as a share of the language model's FLOPs."""
_MOST_STEPS = 16
_GUARD = 0.05
"""No step goes nearer to an end of the bracket than this part of it."""

Evaluate = Callable[[PolicySpec], float]
"""The share of the language model's FLOPs that a policy without a free knob saves."""


@dataclass(frozen=True)
class Solution:
    """A setting of the knob.

    Attributes:
        knob: the value.
        saved: what the policy then saves, by ``evaluate``.
    """

    knob: float
    saved: float


@dataclass(frozen=True)
class OutOfReach:
    """No value of the knob meets the budget: all of them save between ``least`` and ``most``."""

    least: float
    most: float


class KnobSolver:
    """Solves one policy for any number of budgets.

    No setting is evaluated twice, and the setting found for a budget does not depend on what was solved before it.
    """

    def __init__(self, spec: PolicySpec, evaluate: Evaluate) -> None:
        """Args:
        spec: the policy, with a free knob.
        evaluate: what a setting of it saves; not falling towards the end of the knob's range that saves more.
        """
        assert spec.free is not None
        self._spec, self._evaluate = spec, evaluate
        low, high = spec.free.low, spec.free.high
        self._weakest, self._strongest = (low, high) if spec.free.saves_more == "high" else (high, low)
        self._saved: dict[float, float] = {}

    def solve(self, budget: float) -> Solution | OutOfReach:
        """The setting that saves ``budget``, within :data:`TOLERANCE` where the knob is fine enough.

        A knob that works in jumps is set to the value whose saving is nearest.
        """
        saved = {value: self._at(value) for value in (self._weakest, self._strongest)}
        least, most = saved.values()
        if not least - TOLERANCE <= budget <= most + TOLERANCE:
            return OutOfReach(min(least, most), max(least, most))
        for step in range(_MOST_STEPS):
            if abs(saved[_nearest(saved, budget)] - budget) <= TOLERANCE:
                break
            # Every third step halves the bracket, so that a knob that works in jumps is found as well.
            value = _between(saved, self._bracket(saved, budget), budget, halve=step % 3 == 2)
            if value in saved:
                break
            saved[value] = self._at(value)
        best = _nearest(saved, budget)
        return Solution(best, saved[best])

    def _at(self, value: float) -> float:
        if value not in self._saved:
            self._saved[value] = self._evaluate(self._spec.with_free(value))
        return self._saved[value]

    def _bracket(self, saved: Mapping[float, float], budget: float) -> tuple[float, float]:
        """The strongest setting that saves less than the budget, and the next stronger one that was evaluated."""
        order = sorted(saved, reverse=self._strongest < self._weakest)
        below = max(place for place, value in enumerate(order) if saved[value] < budget)
        return order[below], order[below + 1]


def _nearest(saved: Mapping[float, float], budget: float) -> float:
    return min(saved, key=lambda value: abs(saved[value] - budget))


def _between(
    saved: Mapping[float, float], bracket: tuple[float, float], budget: float, *, halve: bool
) -> float:
    """Regula falsi, or the middle."""
    below, above = bracket
    part = 0.5 if halve else (budget - saved[below]) / (saved[above] - saved[below])
    part = min(1.0 - _GUARD, max(_GUARD, part))
    return rounded(below + part * (above - below))


def rounded(value: float) -> float:
    """As many digits as a policy's text has, so that the text means exactly what ran."""
    return float(f"{value:.6g}")
