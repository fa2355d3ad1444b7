"""Claims, figures with intervals, and the rules that turn figures into verdicts.

A claim is a sentence of the paper that can be tested at the scale at hand. Its rule, which difference and which bound,
is part of the claim and fixed before anything is measured. Every bound is compared with both ends of a 95 % interval:

- agrees: the whole interval is on the claim's side of the bound;
- disagrees: the whole interval is on the other side;
- undecided: the interval holds the bound, or the suite cannot show the effect (:func:`shown`, :func:`effect`).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from rlcompute.compare.claims_evidence import Evidence

Verdict = Literal["agrees", "disagrees", "undecided"]
Unit = Literal["points", "%", "×", ""]

LITTLE = 1.2
"""Points of recall@1: what the paper calls little ("within 1.2 points", §5.3)."""
SAME = 1.0
"""Points of recall@1: policies this close are the same to a user of the embedder."""
CEILING = 95.0
"""Mean recall@1 of full compute, in points, above which a suite is too easy to lose much on."""


@dataclass(frozen=True)
class Figure:
    """A measured figure with its 95 % interval; an exact count has the interval of no width."""

    name: str
    value: float
    low: float
    high: float
    unit: Unit = ""

    def __str__(self) -> str:
        if math.isnan(self.value):
            return f"{self.name}: not defined on this sample"
        places = 3 if self.unit == "" else 2 if self.unit in ("points", "×") else 1
        unit = f" {self.unit}" if self.unit else ""
        text = f"{self.name}: {self.value:.{places}f}{unit}"
        if self.low == self.high == self.value:
            return text
        return f"{text} [{self.low:.{places}f}, {self.high:.{places}f}]"


def exact(name: str, value: float, unit: Unit = "") -> Figure:
    """A count of this sample, without an interval."""
    return Figure(name, value, value, value, unit)


@dataclass(frozen=True)
class Judgement:
    """A verdict and why, in one line."""

    verdict: Verdict
    reason: str


@dataclass(frozen=True)
class Finding:
    """What the check of a claim found."""

    judgement: Judgement
    figures: tuple[Figure, ...]


@dataclass(frozen=True)
class Claim:
    """One claim of the paper.

    Attributes:
        id: short name.
        statement: what the paper says, in our words.
        paper: its figures, with their place.
        measured: what is measured here.
        rule: the verdict rule of ``check``, in words.
        check: measures and judges.
        policies: fixed policies that ``check`` will ask for, so that they can be measured together.
    """

    id: str
    statement: str
    paper: str
    measured: str
    rule: str
    check: Callable[[Evidence], Finding]
    policies: tuple[str, ...] = ()


def at_most(figure: Figure, bound: float) -> Judgement:
    """The claim is that the figure is at most ``bound``."""
    return _against(figure, bound, figure.high <= bound, figure.low > bound, "at most")


def at_least(figure: Figure, bound: float) -> Judgement:
    """The claim is that the figure is at least ``bound``."""
    return _against(figure, bound, figure.low >= bound, figure.high < bound, "at least")


def above(figure: Figure, bound: float = 0.0) -> Judgement:
    """The claim is a direction: the figure is above ``bound``. Equality of all that is resampled proves nothing."""
    return _against(figure, bound, figure.low > bound, figure.high < bound, "above")


def inside(figure: Figure, low: float, high: float) -> Judgement:
    """The claim is that the figure lies between two bounds."""
    agrees = low <= figure.low and figure.high <= high
    disagrees = figure.high < low or figure.low > high
    verdict: Verdict = "agrees" if agrees else "disagrees" if disagrees else "undecided"
    side = {"agrees": "inside", "disagrees": "outside", "undecided": "partly outside"}[verdict]
    return Judgement(verdict, f"{figure} is {side} {low:g} to {high:g}")


def _against(figure: Figure, bound: float, agrees: bool, disagrees: bool, words: str) -> Judgement:
    if agrees:
        return Judgement("agrees", f"{figure} is {words} {bound:g}")
    if disagrees:
        return Judgement("disagrees", f"{figure} is not {words} {bound:g}")
    return Judgement("undecided", f"{figure}: the interval does not decide whether it is {words} {bound:g}")


def shown(judgement: Judgement, control: Figure, bound: float) -> Judgement:
    """Agreement counts only where the suite would have shown the opposite.

    Args:
        judgement: of the claim.
        control: a loss that must be there for the claim to mean something.
        bound: what it must be above.
    """
    if judgement.verdict != "agrees" or control.low > bound:
        return judgement
    return Judgement(
        "undecided",
        f"{judgement.reason}, but this suite would hardly show otherwise: {control} is not above {bound:g}",
    )


def costs_little(loss: Figure, control: Figure, bound: float = LITTLE) -> Judgement:
    """The claim is that a saving costs at most ``bound`` points, on a suite where ``control`` costs more."""
    return shown(at_most(loss, bound), control, bound)


def no_better(gap: Figure, room: Figure, margin: float) -> Judgement:
    """The claim is that one policy is no better than another.

    Args:
        gap: points by which it is ahead; above 0 it is better, however little.
        room: loss of the other one, which is what could be gained.
        margin: points below which a gap is none.
    """
    if gap.low > 0.0:
        return Judgement("disagrees", f"{gap} is above 0")
    judgement = at_most(gap, margin)
    return shown(judgement, room, margin)


def effect(gap: Figure, wanted: float, ceiling: bool) -> Judgement:
    """The claim is a gap in points, of at least ``wanted`` (half of the paper's).

    Near the ceiling of the suite every gap shrinks, so that a smaller one of the right sign says nothing there.
    """
    judgement = at_least(gap, wanted)
    if judgement.verdict == "disagrees" and ceiling and gap.high > 0.0:
        sign = "of the right sign" if gap.low > 0.0 else "not to be told from none"
        return Judgement(
            "undecided",
            f"{gap} is {sign} and below {wanted:g}, but full compute is near the ceiling, where gaps shrink",
        )
    return judgement


_WORST: tuple[Verdict, ...] = ("disagrees", "undecided", "agrees")


def all_of(*judgements: Judgement) -> Judgement:
    """The claim is several things at once: it is as good as its worst part."""
    verdict = next(x for x in _WORST if any(part.verdict == x for part in judgements))
    return Judgement(verdict, "; ".join(part.reason for part in judgements if part.verdict == verdict))
