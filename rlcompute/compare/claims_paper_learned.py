"""Claims of the paper on trained policies, against rules at the same saving.

They hold the gates that ``compare.policies`` names against rules that need no training. The best rule of a budget is
chosen by the same queries that it is then compared on, which favours the rules.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from rlcompute.compare.claims_evidence import Evidence, skip_share, skipped, with_gates
from rlcompute.compare.claims_model import (
    LITTLE,
    Claim,
    Figure,
    Finding,
    Judgement,
    above,
    all_of,
    costs_little,
    exact,
)
from rlcompute.compare.claims_paper_pruning import beta, random_prune

if TYPE_CHECKING:
    from rlcompute.compare.points import Point

NEAR = 0.01
"""Share of the language model's FLOPs by which savings "at the same budget" may differ."""


def _saved(points: Sequence[Point]) -> float:
    return float(np.mean([point.lm_saved for point in points]))


def _lead(evidence: Evidence, ours: Sequence[Point]) -> tuple[Figure | None, list[Figure]]:
    """How far gates are ahead of the best rule at their saving; None if no rule reaches it."""
    saved = _saved(ours)
    rivals = [x for x in evidence.rivals(saved) if x.lm_saved >= saved - NEAR]
    if not rivals:
        return None, []
    best = max(rivals, key=lambda point: evidence.contrast("", (1.0, point)).value)
    where = f"at {100.0 * saved:.0f} % of the language model's FLOPs"
    return evidence.lead(f"gates − {best.resolved} {where}", ours, best), [
        evidence.lead(f"gates − {rival.resolved} {where}", ours, rival)
        for rival in rivals
        if rival is not best
    ]


def _beats_rules(evidence: Evidence) -> Finding:
    judgements, figures = [], []
    for ours in evidence.learned.values():
        lead, others = _lead(evidence, ours)
        if lead is None:
            saved = 100.0 * _saved(ours)
            judgements.append(
                Judgement("undecided", f"no rule saves {saved:.0f} % of the language model's FLOPs")
            )
            continue
        judgements.append(above(lead))
        figures += [lead, *others]
    return Finding(all_of(*judgements), tuple(figures))


def _advantage_grows(evidence: Evidence) -> Finding:
    groups = sorted(evidence.learned.values(), key=_saved)
    if len(groups) < 2:
        return Finding(Judgement("undecided", "needs gates of two budgets in compare.policies"), ())
    terms: list[tuple[float, Point]] = []
    for sign, ours in ((-1.0, groups[0]), (1.0, groups[-1])):
        saved = _saved(ours)
        rivals = [x for x in evidence.rivals(saved) if x.lm_saved >= saved - NEAR]
        if not rivals:
            return Finding(Judgement("undecided", f"no rule saves {100.0 * saved:.0f} % there"), ())
        best = max(rivals, key=lambda point: evidence.contrast("", (1.0, point)).value)
        terms += [(sign / len(ours), point) for point in ours] + [(-sign, best)]
    low, high = (100.0 * _saved(x) for x in (groups[0], groups[-1]))
    growth = evidence.contrast(f"lead at {high:.0f} % − lead at {low:.0f} % of LM FLOPs", *terms)
    return Finding(above(growth), (growth,))


def _beta_behind(evidence: Evidence) -> Finding:
    rule = evidence.point(beta(0.25))
    able = [x for x in evidence.learned.values() if _saved(x) >= rule.lm_saved - NEAR]
    if not able:
        saved = 100.0 * rule.lm_saved
        reason = f"no gates save {saved:.0f} % of the language model's FLOPs, as β does at keep 25 %"
        return Finding(Judgement("undecided", reason), ())
    ours = min(able, key=_saved)
    lead = evidence.lead("gates − β at keep 25 %", ours, rule)
    savings = (
        exact("saved by gates", 100.0 * _saved(ours), "%"),
        exact("saved by β", 100.0 * rule.lm_saved, "%"),
    )
    return Finding(above(lead), (lead, *savings, evidence.loss("β at keep 25 %", beta(0.25))))


def _little_loss(evidence: Evidence) -> Finding:
    losses = [
        evidence.contrast(
            f"loss of gates at {100.0 * _saved(ours):.0f} % of LM FLOPs",
            (1.0, evidence.full),
            *((-1.0 / len(ours), x) for x in ours),
        )
        for ours in sorted(evidence.learned.values(), key=_saved)
    ]
    control = evidence.loss("random pruning at keep 25 %", random_prune(0.25))
    return Finding(costs_little(losses[0], control), (*losses, control))


def _learned_skip(evidence: Evidence) -> Finding:
    gates = min(evidence.learned.values(), key=_saved)[0]
    ours = evidence.laboratory.skip_only(gates.resolved)
    share = skip_share(ours, evidence.scale.top_k)
    rule = evidence.point(f"modes:skip={share:.3f}")
    lead = evidence.lead("MoDES − learned skip at equal skipping", [rule], ours)
    rows = [skipped(name, x, evidence.scale.top_k) for name, x in (("learned skip", ours), ("MoDES", rule))]
    return Finding(above(lead), (lead, *rows))


def learned() -> list[Claim]:
    """All of them."""
    return [
        Claim(
            "grpo_beats_rules",
            "Trained by GRPO, gates lose less than rules of the same budget.",
            "GRPO −0.7 at 22.5 % of FLOPs; GDN-β −1.1 at 22.8 % (Tab. 6)",
            "gates minus the best rule at the same saving of the language model's FLOPs, mean over seeds",
            "agrees if gates are ahead at every budget they were trained for, disagrees if the best rule is at one",
            with_gates(_beats_rules),
            ("full",),
        ),
        Claim(
            "advantage_grows",
            "Training pays mostly at extreme savings; rules are competitive at moderate ones.",
            "trained −1.0 against β −4.3 at 70–75 % dropped, equal at half (§5.3, Fig. 7)",
            "lead of the gates over the best rule at their largest saving minus that at their smallest",
            "agrees if it is above 0",
            with_gates(_advantage_grows),
            ("full",),
        ),
        Claim(
            "beta_behind_trained",
            "With 75 % of the visual tokens dropped, β falls behind a trained policy.",
            "−4.3 against −1.0 (§5.3, Fig. 7)",
            "gates that save at least as much minus β at keep 25 %",
            "agrees if the gap is above 0",
            with_gates(_beta_behind),
            ("full", beta(0.25)),
        ),
        Claim(
            "grpo_little_loss",
            "Gates trained by GRPO cost little.",
            "−0.7 at 22.5 % of FLOPs (Tab. 6)",
            "loss of the gates with the smallest saving, the others beside it; control: random pruning to a quarter",
            f"agrees if the loss is at most {LITTLE} points and the control's is above that",
            with_gates(_little_loss),
            ("full", random_prune(0.25)),
        ),
        Claim(
            "learned_skip",
            "A trained skip of experts is no match for training-free adaptive top-k.",
            "learned skip gate −0.9 at 12 % of FLOPs, MoDES −0.6 at 13.8 % (Tab. 6, §5.3)",
            "MoDES minus gates whose drops only skip, at equal rows skipped: gates that were trained to drop as well "
            "stand in for a skip gate",
            "agrees if the gap is above 0",
            with_gates(_learned_skip),
            ("full",),
        ),
    ]
