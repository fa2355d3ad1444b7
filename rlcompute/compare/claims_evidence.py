"""What the checks of the claims measure with: points of the comparison, and contrasts between them.

Shape legend: P queries of one modality.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Protocol

import numpy as np

from rlcompute.compare.claims_model import CEILING, Figure, Finding, Judgement, exact
from rlcompute.compare.claims_training import Runs, Training, straight_through_runs
from rlcompute.metrics import FloatArray, IntArray, bootstrap_interval
from rlcompute.policies.checkpoint import HEADS, METHODS

if TYPE_CHECKING:
    from rlcompute.compare.claims_firing import Firing
    from rlcompute.compare.points import Point
    from rlcompute.compare.strength_study import StrengthStudy

Measure = Callable[[Sequence[str], Sequence[float]], "list[Point]"]
"""Policies as they are written and budgets (:func:`rlcompute.compare.run.points`)."""


@dataclass(frozen=True)
class Scale:
    """Sizes of the backbone that decide which policies stand for the paper's."""

    num_layers: int
    num_experts: int
    top_k: int

    @property
    def half_k(self) -> int:
        """Half the experts of a token."""
        return max(1, self.top_k // 2)

    @property
    def half_experts(self) -> int:
        """Half the experts of a layer, as far as a token's choice still fits."""
        return max(self.top_k, self.num_experts // 2)


class Ranked(Protocol):
    """What is compared: ranks by modality, and the routed rows that were left of them."""

    @property
    def ranks(self) -> Mapping[str, IntArray]:
        """Of each query's target, from 0, int64 [P]."""
        ...

    @property
    def survived_NG(self) -> IntArray:
        """Tokens that ran the shared expert, by layer and modality of pairs."""
        ...

    @property
    def rows_NG(self) -> IntArray:
        """(Token, expert) rows that ran."""
        ...


class Laboratory(Protocol):
    """What is measured besides the comparison's points."""

    @property
    def strength(self) -> StrengthStudy:
        """Write strength against attention."""
        ...

    def firing(self, policy: str) -> Firing:
        """Where a policy drops and skips."""
        ...

    def execution(self, policy: str) -> tuple[Figure, Figure]:
        """Speed-up of the language model over full compute, dropped tokens masked, and dropped tokens removed."""
        ...

    def skip_only(self, policy: str) -> Ranked:
        """Gates whose decisions to drop only skip."""
        ...

    def expert_bytes(self, policy: str) -> int:
        """Bytes of the routed experts of the backbone that a policy runs on."""
        ...

    def training(self, policy: str) -> Training:
        """How the straight-through gates of a policy were trained."""
        ...


class Evidence:
    """Measures what a check asks for, once."""

    def __init__(
        self,
        scale: Scale,
        measure: Measure,
        laboratory: Laboratory,
        *,
        learned: Sequence[str] = (),
        free: Sequence[str] = (),
        samples: int,
        seed: int,
    ) -> None:
        """Args:
        scale: of the backbone.
        measure: makes the points.
        laboratory: measures the rest.
        learned: trained policies, as configured; one entry may stand for several trainings.
        free: training-free policies with a free knob, to hold against the trained ones at their own budgets.
        samples: bootstrap resamples.
        seed: of the resampling.
        """
        self.scale, self.laboratory = scale, laboratory
        self.samples, self.seed = samples, seed
        self._measure, self._learned, self._free = measure, tuple(learned), tuple(free)
        self._points: dict[str, Point] = {}

    def prefetch(self, policies: Sequence[str]) -> None:
        """Measures fixed policies in one go."""
        wanted = [x for x in dict.fromkeys(policies) if x not in self._points]
        if wanted:
            found = {point.spec: point for point in self._measure(wanted, ())}
            self._points |= {policy: found[policy] for policy in wanted}

    def point(self, policy: str) -> Point:
        """A fixed policy."""
        self.prefetch([policy])
        return self._points[policy]

    @property
    def full(self) -> Point:
        """Full compute."""
        return self.point("full")

    @cached_property
    def _trained(self) -> Sequence[Point]:
        """Trained policies without a free knob."""
        return self._measure(self._learned, ()) if self._learned else []

    @cached_property
    def learned(self) -> Mapping[str, Sequence[Point]]:
        """Policies trained by GRPO, by the entry that they were configured by."""
        groups: dict[str, list[Point]] = {}
        for point in self._trained:
            if point.method == METHODS[HEADS]:
                groups.setdefault(point.spec, []).append(point)
        return groups

    @cached_property
    def straight_through(self) -> Sequence[Runs]:
        """Policies trained straight through their decisions."""
        return straight_through_runs(self._trained, self.laboratory.training)

    def moved(self, points: Sequence[Point], budget: float) -> list[Point]:
        """Trained gates with their thresholds moved to a saving of the language model's FLOPs, those that reach it."""
        return self._measure([f"{point.resolved},shift=*" for point in points], (budget,))

    def rivals(self, budget: float) -> list[Point]:
        """Training-free policies at a saving of the language model's FLOPs, those that reach it."""
        return self._measure(self._free, (budget,))

    def contrast(self, name: str, *terms: tuple[float, Ranked]) -> Figure:
        """A weighted sum of recalls@1 in points, mean over modalities, with its paired interval.

        The same queries are resampled for all policies of the sum.
        """
        differences: list[FloatArray] = []
        for modality in terms[0][1].ranks:
            hits_P = [weight * (point.ranks[modality] < 1) for weight, point in terms]
            # Rounded, so that sums in another order do not count as other values.
            differences.append(np.round(100.0 * np.sum(hits_P, axis=0), 9))
        value = float(np.mean([x.mean() for x in differences]))
        low, high = bootstrap_interval(differences, self.samples, self.seed)
        return Figure(name, value, low, high, "points")

    def loss(self, name: str, policy: str) -> Figure:
        """Points lost against full compute by a fixed policy."""
        return self.contrast(f"loss of {name}", (1.0, self.full), (-1.0, self.point(policy)))

    def loss_of(self, name: str, ours: Sequence[Ranked]) -> Figure:
        """Points lost against full compute by some policies, on average."""
        return self.contrast(f"loss of {name}", (1.0, self.full), *((-1.0 / len(ours), x) for x in ours))

    def lead(self, name: str, ours: Sequence[Ranked], other: Ranked) -> Figure:
        """Points by which the mean of some policies is ahead of another."""
        return self.contrast(name, *((1.0 / len(ours), point) for point in ours), (-1.0, other))

    @cached_property
    def near_ceiling(self) -> bool:
        """Whether full compute answers nearly every query."""
        return self.full_recall.value >= CEILING

    @cached_property
    def full_recall(self) -> Figure:
        """Recall@1 of full compute."""
        return self.contrast("recall@1 of full compute", (1.0, self.full))


def skipped(name: str, point: Ranked, top_k: int) -> Figure:
    """Share of the survivors' routed rows that a policy leaves out."""
    return exact(f"rows skipped by {name}", 100.0 * skip_share(point, top_k), "%")


def skip_share(point: Ranked, top_k: int) -> float:
    """Share of the survivors' routed rows that a policy leaves out, in [0, 1]."""
    return 1.0 - float(point.rows_NG.sum()) / (top_k * float(point.survived_NG.sum()))


def percent(
    evidence: Evidence, firing: Firing, name: str, statistic: Callable[[FloatArray], FloatArray]
) -> Figure:
    """A share of what a policy decided, with its interval over pairs; ``statistic`` as of :meth:`Firing.figure`."""
    return firing.figure(
        name,
        lambda counts: 100.0 * statistic(counts),
        samples=evidence.samples,
        seed=evidence.seed,
        unit="%",
    )


def speedup(name: str, point: Point) -> Figure:
    """Speed-up over full compute, from the interleaved clock."""
    return Figure(f"speed-up of {name}", point.speedup, point.speedup_low, point.speedup_high, "×")


def conversion(name: str, point: Point) -> Figure:
    """Share of the clock saved over the share of executed FLOPs saved, vision tower included in both.

    Not defined where no FLOPs are saved.
    """
    saved = point.executed_saved
    value, low, high = (
        100.0 * (1.0 - 1.0 / ratio) / saved if saved > 0.0 else math.nan
        for ratio in (point.speedup, point.speedup_low, point.speedup_high)
    )
    return Figure(f"conversion of {name}", value, low, high, "%")


def with_gates(check: Callable[[Evidence], Finding]) -> Callable[[Evidence], Finding]:
    """The check of a claim on gates trained by GRPO: undecided where there are none."""
    missing = Finding(Judgement("undecided", "compare.policies names no gates trained by GRPO"), ())
    return lambda evidence: check(evidence) if evidence.learned else missing
