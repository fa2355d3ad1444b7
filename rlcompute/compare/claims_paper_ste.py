"""Claims of the paper on gates that were trained straight through their decisions, each action alone (Tab. 6).

The paper trains adapters of the backbone with the gates, or a backbone; here it is frozen unless ``ste.lora_rank`` was
set.
"""

from __future__ import annotations

import math

from rlcompute.compare.claims_evidence import Evidence, Scale, percent, skipped
from rlcompute.compare.claims_model import (
    LITTLE,
    Claim,
    Figure,
    Finding,
    Judgement,
    above,
    all_of,
    at_least,
    at_most,
    costs_little,
    exact,
    inside,
)
from rlcompute.compare.claims_paper_experts import SKIP_TOLERANCE
from rlcompute.compare.claims_paper_pruning import beta, random_prune
from rlcompute.compare.claims_straight import (
    ahead,
    fewest,
    firing_of,
    inputs_skipping,
    on_gates,
    saved,
    skipped_by,
    visual_dropped,
)
from rlcompute.compare.claims_training import Runs

KEPT, KEPT_TOLERANCE = 30.0, 10.0
"""Visual tokens kept by the paper's pruner, in percent, and how far ours may be from it."""
DEEP = 0.25
"""Share of the visual tokens kept where rules fall behind (§5.3)."""
LEAST_SKIPPED = 25.0
"""Percent of routed rows that a skip gate must skip: half of what the paper's saving of FLOPs comes to."""
CARRIED = 0.9
"""Share of the skipped layers that is counted as all of it."""
_CONTROL = "random pruning at keep 25 %"


def single_actions(scale: Scale) -> list[Claim]:
    """All of them."""
    return [*_pruning(), *_skipping(scale), *_layers(), *_null_experts(scale)]


def _pruning() -> list[Claim]:
    def little_loss(evidence: Evidence, runs: Runs) -> Finding:
        kept = percent(
            evidence,
            firing_of(evidence, runs),
            f"visual tokens kept by {runs.name}",
            lambda x: 1.0 - visual_dropped(x),
        )
        loss = evidence.loss_of(runs.name, runs.points)
        control = evidence.loss(_CONTROL, random_prune(DEEP))
        judgement = costs_little(loss, control)
        if abs(kept.value - KEPT) > KEPT_TOLERANCE:
            judgement = Judgement(
                "undecided", f"{kept}, but the claim is about {KEPT:g} %: set ste.prune_keep"
            )
        return Finding(judgement, (loss, kept, saved(runs), control))

    def beats_rules(evidence: Evidence, runs: Runs) -> Finding:
        layer = runs.gates["token_pruner"]["layer"]
        rules = {"β": beta(DEEP, layer), "random": random_prune(DEEP, layer)}
        budget = evidence.point(rules["random"]).lm_saved
        ours = evidence.moved(runs.points, budget)
        if len(ours) < len(runs.points):
            reason = f"{runs.name}: no threshold saves {100.0 * budget:.0f} % of the language model's FLOPs"
            return Finding(Judgement("undecided", reason), ())
        gaps = [
            evidence.lead(
                f"{runs.name} − {name} at keep 25 % after layer {layer}", ours, evidence.point(rule)
            )
            for name, rule in rules.items()
        ]
        losses = [
            evidence.loss_of(f"{runs.name} there", ours),
            *(evidence.loss(f"{name} there", rule) for name, rule in rules.items()),
        ]
        return Finding(all_of(*map(above, gaps)), (*gaps, *losses))

    return [
        Claim(
            "pruner_little_loss",
            "A trained pruner removes 70 % of the visual tokens early and costs about a point.",
            "−1.0 at 32 % of FLOPs (Tab. 6, §5.3)",
            "loss of token_pruner gates on the held-out pairs; control: random pruning to a quarter",
            f"agrees if the loss is at most {LITTLE} points and the control's is above that; undecided if not "
            f"{KEPT - KEPT_TOLERANCE:g} to {KEPT + KEPT_TOLERANCE:g} % of the visual tokens are kept",
            on_gates("token_pruner", little_loss),
            ("full", random_prune(DEEP)),
        ),
        Claim(
            "pruner_beats_rules",
            "With 75 % of the visual tokens dropped, a trained pruner is far ahead of rules.",
            "−1.0 against −4.3 for β at 70–75 % dropped (§5.3, Fig. 7)",
            "token_pruner gates minus β and minus random pruning to a quarter after the same layer; the gates' "
            "threshold is moved until they save what random pruning does",
            "agrees if both gaps are above 0",
            on_gates("token_pruner", beats_rules),
            ("full",),
        ),
    ]


def _skipping(scale: Scale) -> list[Claim]:
    random_half = f"random_topk:k={scale.half_k}"

    def little_loss(evidence: Evidence, runs: Runs) -> Finding:
        loss, rows = evidence.loss_of(runs.name, runs.points), skipped_by(evidence, runs)
        control = evidence.loss("a random half of the experts", random_half)
        judgement = all_of(costs_little(loss, control), at_least(rows, LEAST_SKIPPED))
        return Finding(judgement, (loss, rows, saved(runs), control))

    return [
        Claim(
            "skip_gate_little_loss",
            "A learned skip of a token's experts saves about as much as half of the experts and costs little.",
            "−0.9 at 12 % of FLOPs; half of the experts: 11.6 % (Tab. 6)",
            "loss and skipped rows of expert_skip gates; control: a random half of the experts",
            f"agrees if the loss is at most {LITTLE} points, the control's is above that, and at least "
            f"{LEAST_SKIPPED:g} % of the rows are skipped",
            on_gates("expert_skip", little_loss),
            ("full", random_half),
        ),
        Claim(
            "skip_gate_behind_modes",
            "A learned skip of a token's experts is no match for training-free adaptive top-k.",
            "learned skip gate −0.9 at 12 % of FLOPs, MoDES −0.6 at 13.8 % (Tab. 6, §5.3)",
            "MoDES minus expert_skip gates, at the latter's rows skipped",
            f"agrees if the gap is above 0; rows skipped must agree within {SKIP_TOLERANCE:g} percentage points",
            on_gates("expert_skip", _modes_ahead),
            ("full",),
        ),
    ]


def _modes_ahead(evidence: Evidence, runs: Runs) -> Finding:
    """MoDES against gates, at an equal share of rows that run."""
    rows = skipped_by(evidence, runs)
    if rows.value < 1.0:
        return Finding(
            Judgement("undecided", f"{rows}: there is nothing to compare at equal skipping"), (rows,)
        )
    rule = f"modes:skip={rows.value / 100.0:.3f}"
    theirs = skipped("MoDES", evidence.point(rule), evidence.scale.top_k)
    gap = ahead(evidence, f"MoDES − {runs.name} at equal skipping", rule, runs)
    judgement = above(gap)
    if abs(theirs.value - rows.value) > SKIP_TOLERANCE:
        judgement = Judgement("undecided", f"{rows}, {theirs}: too far apart to compare")
    losses = (evidence.loss_of(runs.name, runs.points), evidence.loss("MoDES", rule))
    return Finding(judgement, (gap, rows, theirs, *losses))


def _layers() -> list[Claim]:
    def concentrated(evidence: Evidence, runs: Runs) -> Finding:
        first, firing = runs.gates["layer_skip"]["first"], firing_of(evidence, runs)
        eligible = evidence.scale.num_layers - first
        rate = percent(
            evidence,
            firing,
            f"skipped by {runs.name} of the {eligible} eligible layers",
            lambda x: inputs_skipping(x, first).mean(1),
        )
        carriers = firing.figure(
            f"layers of {eligible} that carry {CARRIED:.0%} of it",
            lambda x: fewest(inputs_skipping(x, first), CARRIED),
            samples=evidence.samples,
            seed=evidence.seed,
        )

        def of_layer(place: int) -> Figure:
            return percent(
                evidence,
                firing,
                f"inputs that skip layer {first + place}",
                lambda x: inputs_skipping(x, first)[:, place],
            )

        judgements = [inside(rate, 15.0, 25.0), at_most(carriers, math.ceil(eligible / 4))]
        trained = []
        if runs.curves:
            at_end = runs.curve(lambda curves: curves.last("rate/layer_skip/skip"))
            trained = [exact("skipped at the end of training", 100.0 * at_end, "%")]
            judgements.append(inside(trained[0], 15.0, 25.0))
        each = [of_layer(place) for place in range(eligible)]
        return Finding(all_of(*judgements), (rate, carriers, *trained, *each))

    def little_loss(evidence: Evidence, runs: Runs) -> Finding:
        loss = evidence.loss_of(runs.name, runs.points)
        control = evidence.loss(_CONTROL, random_prune(DEEP))
        return Finding(costs_little(loss, control), (loss, saved(runs), control))

    return [
        Claim(
            "layer_skip_concentrates",
            "A trained gate that may skip layers reaches its 20 %, in a few layers only.",
            "20.5 %, in 9 of 36 eligible layers (App. E.1)",
            "rate of layer_skip gates at the end of training and on the held-out pairs, by layer",
            f"agrees if both rates lie within 15 to 25 % (on the pairs alone without curves of training) and a quarter "
            f"of the eligible layers, rounded up, carries at least {CARRIED:.0%} of the skips",
            on_gates("layer_skip", concentrated),
        ),
        Claim(
            "layer_skip_little_loss",
            "Skipping a fifth of the layers by a trained gate costs little.",
            "−0.8 at about 20 % of FLOPs (Tab. 6)",
            "loss of layer_skip gates; control: random pruning to a quarter",
            f"agrees if the loss is at most {LITTLE} points and the control's is above that",
            on_gates("layer_skip", little_loss),
            ("full", random_prune(DEEP)),
        ),
    ]


def _null_experts(scale: Scale) -> list[Claim]:
    def few_real(evidence: Evidence, runs: Runs) -> Finding:
        rows = skipped_by(evidence, runs)
        real = exact(f"slots of {runs.name} that real experts fill", 100.0 - rows.value, "%")
        mean = exact(f"that is, experts a token of {scale.top_k}", scale.top_k * real.value / 100.0)
        figures = [real, mean]
        if runs.curves:
            tag = "rate/null_experts/real"
            figures += [
                exact("experts a token halfway through training", runs.curve(lambda x: x.middle(tag))),
                exact("experts a token at its end", runs.curve(lambda x: x.last(tag))),
            ]
        return Finding(inside(real, 25.0, 50.0), tuple(figures))

    return [
        Claim(
            "null_experts_few_real",
            "With as many null experts as real ones, tokens end up with fewer than half of their experts.",
            "2.94 of 8, 37 %; load balancing holds about 4 in the first half of training (App. E.1)",
            "mean share of a token's slots that real experts fill, null_experts gates, held-out pairs",
            "agrees if it lies within 25 to 50 %",
            on_gates("null_experts", few_real),
        ),
        Claim(
            "null_experts_behind_modes",
            "Null experts, which are trained, lose to training-free MoDES at an equal share of executed rows.",
            "67.2 at 63.3 % skipped against 69.8 at 57.1 % and 68.8 at 77.5 % (§5.3)",
            "MoDES minus null_experts gates, at the latter's rows skipped",
            f"agrees if the gap is above 0; rows skipped must agree within {SKIP_TOLERANCE:g} percentage points",
            on_gates("null_experts", _modes_ahead),
            ("full",),
        ),
    ]
