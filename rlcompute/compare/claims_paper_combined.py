"""Claims of the paper on several actions trained straight through together, and on GRPO against them (Tab. 6).

Straight-through gates meet budgets of their own, so they are compared after their thresholds were moved to one saving.

Shape legend: I iterations.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from rlcompute.compare.claims_evidence import Evidence, with_gates
from rlcompute.compare.claims_model import Claim, Figure, Finding, Judgement, above, all_of, exact
from rlcompute.compare.claims_paper_pruning import random_prune
from rlcompute.compare.claims_straight import runs_missing, without_curves
from rlcompute.compare.claims_training import Curves, Runs

if TYPE_CHECKING:
    from rlcompute.compare.points import Point

SEPARATE = ("simultaneous", "alternating", "sequential")
"""A budget for each action; in the order of the paper's losses."""
SHARED = "shared"
"""One budget for all actions."""
DROPPING = "token_pruner"
LEAST_SAVED = 0.02
"""Share of the language model's FLOPs below which it makes no sense to ask what saved them."""

Groups = Mapping[str, Sequence["Point"]]
"""Trainings by combination."""


def combinations() -> list[Claim]:
    """All of them."""
    return [
        Claim(
            "separate_budgets_better",
            "Several actions under one global budget lose more than with a budget each.",
            "global −5.6; simultaneous −3.2, alternating −3.5, sequential −3.7 (Tab. 6, no FLOPs given)",
            "gates of each separate combination minus those of the shared budget, at the mean of their savings; of "
            "several shared budgets that nearest to the others' savings",
            "agrees if all three gaps are above 0",
            _separate_better,
            ("full",),
        ),
        Claim(
            "combination_order",
            "With a budget each, training all actions at once loses least, one after another most.",
            "simultaneous −3.2, alternating −3.5, sequential −3.7, at targets that differ somewhat (Tab. 6)",
            "simultaneous minus alternating and alternating minus sequential, at the mean of all savings",
            "agrees if both gaps are above 0",
            _order,
            ("full",),
        ),
        Claim(
            "global_budget_drops",
            "Under one global budget token dropping dominates and leaves the other actions behind.",
            "stated without figures (App. E.1)",
            "share of the training forward's saving that the dropped tokens alone explain: dropped share times what "
            "random pruning in that layer saves for each; when the saving first reaches half of its final value, and "
            "at the end",
            "agrees if it is above half at both times, in every run under one budget",
            _global_drops,
            ("full",),
        ),
        Claim(
            "grpo_beats_straight_through",
            "Actions combined by GRPO lose less than those combined straight through.",
            "GRPO −0.7 at 22.5 % of FLOPs; straight-through −3.2 to −5.6 (Tab. 6)",
            "GRPO's gates minus the best straight-through combination, moved to the saving of the former; of several "
            "budgets that nearest to the combinations' own",
            "agrees if the gap is above 0",
            with_gates(_grpo_better),
            ("full",),
        ),
    ]


def _groups(evidence: Evidence) -> dict[str, Sequence[Point]]:
    """All trainings of each combination; of several shared budgets those whose saving is nearest to the others'.

    The others are the separate budgets or, without any, GRPO.
    """
    several = [runs for runs in evidence.straight_through if len(runs.actions) > 1]
    groups: dict[str, Sequence[Point]] = {}
    for name in SEPARATE:
        points = [point for runs in several if runs.combination == name for point in runs.points]
        if points:
            groups[name] = points
    shared = [runs for runs in several if runs.combination == SHARED]
    if shared:
        others = [point for points in (groups or evidence.learned).values() for point in points]
        wanted = _mean_saved({"": others or shared[0].points})
        groups[SHARED] = min(shared, key=lambda runs: abs(runs.lm_saved - wanted)).points
    return groups


def _needs(names: Sequence[str], check: Callable[[Evidence, Groups], Finding], evidence: Evidence) -> Finding:
    """The check on these combinations; undecided if one is missing."""
    groups = _groups(evidence)
    missing = [name for name in names if name not in groups]
    if missing:
        return Finding(runs_missing(missing), ())
    return check(evidence, {name: groups[name] for name in names})


def _mean_saved(groups: Groups) -> float:
    return float(np.mean([np.mean([x.lm_saved for x in points]) for points in groups.values()]))


def _at(evidence: Evidence, groups: Groups, budget: float) -> Groups | Judgement:
    """The gates at one saving; undecided if some do not reach it."""
    moved = {name: evidence.moved(points, budget) for name, points in groups.items()}
    for name, points in groups.items():
        if len(moved[name]) < len(points):
            reason = f"no threshold of the gates trained {name} saves {100.0 * budget:.0f} % of LM FLOPs"
            return Judgement("undecided", reason)
    return moved


def _gap(evidence: Evidence, groups: Groups, ours: str, theirs: str, where: str) -> Figure:
    return evidence.contrast(
        f"{ours} − {theirs} {where}",
        *((1.0 / len(groups[ours]), x) for x in groups[ours]),
        *((-1.0 / len(groups[theirs]), x) for x in groups[theirs]),
    )


def _own(evidence: Evidence, groups: Groups) -> list[Figure]:
    """Losses and savings with the thresholds that training set."""
    return [
        figure
        for name, points in groups.items()
        for figure in (
            evidence.loss_of(f"{name} as trained", points),
            exact(f"LM FLOPs saved by {name} as trained", 100.0 * _mean_saved({name: points}), "%"),
        )
    ]


def _contrasts(evidence: Evidence, groups: Groups, pairs: Sequence[tuple[str, str]]) -> Finding:
    budget = _mean_saved(groups)
    moved = _at(evidence, groups, budget)
    if isinstance(moved, Judgement):
        return Finding(moved, tuple(_own(evidence, groups)))
    where = f"at {100.0 * budget:.0f} % of LM FLOPs"
    gaps = [_gap(evidence, moved, ours, theirs, where) for ours, theirs in pairs]
    losses = [evidence.loss_of(f"{name} {where}", points) for name, points in moved.items()]
    return Finding(all_of(*map(above, gaps)), (*gaps, *losses, *_own(evidence, groups)))


def _separate_better(evidence: Evidence) -> Finding:
    pairs = [(name, SHARED) for name in SEPARATE]
    return _needs((*SEPARATE, SHARED), lambda x, groups: _contrasts(x, groups, pairs), evidence)


def _order(evidence: Evidence) -> Finding:
    pairs = list(pairwise(SEPARATE))
    return _needs(SEPARATE, lambda x, groups: _contrasts(x, groups, pairs), evidence)


def _global_drops(evidence: Evidence) -> Finding:
    found = [
        _drop_share(evidence, runs)
        for runs in evidence.straight_through
        if runs.combination == SHARED and DROPPING in runs.actions
    ]
    if not found:
        return Finding(runs_missing([SHARED]), ())
    judgement = all_of(*(finding.judgement for finding in found))
    return Finding(judgement, tuple(figure for finding in found for figure in finding.figures))


def _drop_share(evidence: Evidence, runs: Runs) -> Finding:
    if not runs.curves:
        return Finding(without_curves(runs), ())
    layer, keep = runs.gates[DROPPING]["layer"], 0.25
    each_dropped = evidence.point(random_prune(keep, layer)).lm_saved / (1.0 - keep)
    at_end = runs.curve(lambda curves: curves.last("compute/lm_saved"))
    total = exact(f"LM FLOPs saved by {runs.name} at the end of training", 100.0 * at_end, "%")
    if at_end < LEAST_SAVED:
        return Finding(Judgement("undecided", f"{total}: there is no saving to divide"), (total,))

    def explained(curves: Curves, early: bool) -> float:
        saved_I = curves.smooth("compute/lm_saved")
        place = int(np.argmax(saved_I >= 0.5 * saved_I[-1])) if early else -1
        dropped = 1.0 - curves.smooth(f"rate/{DROPPING}/keep")[place]
        return 100.0 * each_dropped * float(dropped / saved_I[place])

    shares = [
        exact(f"of the saving by {runs.name} dropped tokens explain {when}", value, "%")
        for when, value in (
            ("early", runs.curve(lambda curves: explained(curves, early=True))),
            ("at the end", runs.curve(lambda curves: explained(curves, early=False))),
        )
    ]

    def rate_at_end(tag: str) -> Figure:
        name = f"{tag} at the end of training, {runs.name}"
        return exact(name, runs.curve(lambda curves: curves.last(f"rate/{tag}")))

    tags = (f"{DROPPING}/keep", "expert_skip/skip", "layer_skip/skip")
    rates = [rate_at_end(tag) for tag in tags if tag.split("/")[0] in runs.actions]
    return Finding(all_of(*(above(share, 50.0) for share in shares)), (*shares, total, *rates))


def _grpo_better(evidence: Evidence) -> Finding:
    groups = _groups(evidence)
    if not groups:
        return Finding(runs_missing((*SEPARATE, SHARED)), ())
    own = _mean_saved(groups)
    ours = min(evidence.learned.values(), key=lambda points: abs(_mean_saved({"": points}) - own))
    budget = _mean_saved({"": ours})
    moved = {name: evidence.moved(points, budget) for name, points in groups.items()}
    able = {name: points for name, points in moved.items() if len(points) == len(groups[name])}
    if not able:
        reason = f"no straight-through combination saves {100.0 * budget:.0f} % of LM FLOPs"
        return Finding(Judgement("undecided", reason), tuple(_own(evidence, groups)))
    both = {"GRPO": ours, **able}
    where = f"at {100.0 * budget:.0f} % of LM FLOPs"
    gaps = sorted((_gap(evidence, both, "GRPO", name, where) for name in able), key=lambda gap: gap.value)
    loss = evidence.loss_of(f"GRPO {where}", ours)
    return Finding(above(gaps[0]), (*gaps, loss, *_own(evidence, groups)))
