"""The place of the learned policies: at every budget, against the best policy that needed no training.

A group is what one entry of the configuration stands for, such as the gates of several seeds, as far as one method
trained them. Its accuracy is the mean over its members. It is held against the largest budget that its mean saving
reaches; at a budget that no group of a method is held against, the method's nearest group that saves more takes its
place. The rule is the one with the highest accuracy among all
that reach the budget, chosen on the very pairs that it is judged on, which is in its favour.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from rlcompute.compare.points import FloatArray, Point
from rlcompute.metrics import bootstrap_interval

REACH = 0.01
"""How far below a budget a saving may be and still reach it, as a share of the language model's FLOPs."""


@dataclass(frozen=True)
class Lead:
    """A group of learned policies against the best rule at one budget.

    Attributes:
        budget: share of the language model's FLOPs to save.
        group: the learned policies, as configured.
        method: what trained them, in words.
        members: how many they are.
        saved, recall_at_1: of the group, means over its members.
        rule: the best training-free policy, as it ran.
        rule_saved, rule_recall_at_1: of it.
        lead: points of recall@1 by which the group is ahead.
        low, high: paired 95 % interval of ``lead``.
    """

    budget: float
    group: str
    method: str | None
    members: int
    saved: float
    recall_at_1: float
    rule: str
    rule_saved: float
    rule_recall_at_1: float
    lead: float
    low: float
    high: float

    @property
    def verdict(self) -> str:
        """``ahead`` or ``behind`` where the interval excludes zero, otherwise ``level``."""
        return "ahead" if self.low > 0.0 else "behind" if self.high < 0.0 else "level"


def leads(points: Sequence[Point], budgets: Sequence[float], samples: int, seed: int) -> list[Lead]:
    """Every budget's groups against its best rule; a budget that no group or no rule reaches has none.

    Args:
        points: all that were measured on the same pairs.
        budgets: shares of the language model's FLOPs.
        samples, seed: of the bootstrap over queries.
    """
    methods = _by_method([point for point in points if point.learned])
    rules = [point for point in points if not point.learned]
    found = []
    for budget in sorted(set(budgets)):
        able = [rule for rule in rules if reaches(rule.lm_saved, budget)]
        if able:
            best = max(able, key=lambda rule: rule.recall_at_1)
            for groups in methods:
                held = _held_against(groups, budget, budgets)
                found += [_lead(budget, name, groups[name], best, samples, seed) for name in held]
    return found


def reaches(saved: float, budget: float) -> bool:
    """Whether a saving meets a budget, up to :data:`REACH`."""
    return saved >= budget - REACH


def paired(ours: Sequence[Point], other: Point) -> list[FloatArray]:
    """Points of recall@1 by which the mean of some policies is ahead of another, query by query, by modality."""
    own = [point.hits() for point in ours]
    return [
        # Rounded, so that sums in another order do not count as other values.
        np.round(100.0 * (np.mean([hits[modality] for hits in own], axis=0) - theirs_P), 9)
        for modality, theirs_P in other.hits().items()
    ]


def _by_method(learned: Sequence[Point]) -> list[dict[str, list[Point]]]:
    """The groups of each method, by name."""
    methods: dict[str | None, dict[str, list[Point]]] = {}
    for point in learned:
        name = point.spec if point.budget is None else f"{point.spec} at {100 * point.budget:g} %"
        methods.setdefault(point.method, {}).setdefault(name, []).append(point)
    return list(methods.values())


def _held_against(
    groups: Mapping[str, Sequence[Point]], budget: float, budgets: Sequence[float]
) -> list[str]:
    savings = {name: float(np.mean([x.lm_saved for x in members])) for name, members in groups.items()}
    able = {name: saved for name, saved in savings.items() if reaches(saved, budget)}
    own = [name for name, saved in able.items() if not any(reaches(saved, x) for x in budgets if x > budget)]
    return own or sorted(able, key=lambda name: able[name])[:1]


def _lead(budget: float, name: str, members: Sequence[Point], rule: Point, samples: int, seed: int) -> Lead:
    differences = paired(members, rule)
    low, high = bootstrap_interval(differences, samples, seed)
    return Lead(
        budget=budget,
        group=name,
        method=members[0].method,
        members=len(members),
        saved=float(np.mean([point.lm_saved for point in members])),
        recall_at_1=float(np.mean([point.recall_at_1 for point in members])),
        rule=rule.resolved,
        rule_saved=rule.lm_saved,
        rule_recall_at_1=rule.recall_at_1,
        lead=float(np.mean([x.mean() for x in differences])),
        low=low,
        high=high,
    )
