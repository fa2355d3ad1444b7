"""Claims of the paper on adaptive top-k, expert skipping, and their combination with token pruning."""

from __future__ import annotations

from rlcompute.compare.claims_evidence import Evidence, Scale, conversion, skip_share, skipped, speedup
from rlcompute.compare.claims_model import (
    LITTLE,
    SAME,
    Claim,
    Finding,
    above,
    all_of,
    at_least,
    costs_little,
    effect,
    exact,
    inside,
    no_better,
    shown,
)
from rlcompute.compare.claims_paper_pruning import beta

SKIP_TOLERANCE = 5.0
"""Percentage points of routed rows by which policies "at equal skipping" may differ."""
MARGIN = 0.5
"""Points of recall@1 below which an expert rule is not ahead."""


def adaptive_top_k(scale: Scale) -> list[Claim]:
    """Uniform top-k, its random control, and MoDES."""
    uniform, random = f"uniform_topk:k={scale.half_k}", f"random_topk:k={scale.half_k}"
    one, equal_one = "uniform_topk:k=1", f"modes:skip={1.0 - 1.0 / scale.top_k:g}"
    equal, moderate, deep = (
        f"modes:skip={1.0 - scale.half_k / scale.top_k:g}",
        "modes:skip=0.571",
        "modes:skip=0.775",
    )

    def uniform_half(evidence: Evidence) -> Finding:
        loss, control = evidence.loss("uniform", uniform), evidence.loss("the random half", random)
        return Finding(costs_little(loss, control), (loss, control))

    def random_half(evidence: Evidence) -> Finding:
        gap = evidence.lead("uniform − random", [evidence.point(uniform)], evidence.point(random))
        return Finding(
            effect(gap, 3.0, evidence.near_ceiling), (gap, evidence.loss("the random half", random))
        )

    def modes_no_better(evidence: Evidence) -> Finding:
        judgements, figures = [], []
        room = evidence.loss("uniform top-1", one)
        for k, theirs, ours in ((scale.half_k, uniform, equal), (1, one, equal_one)):
            point, rival = evidence.point(ours), evidence.point(theirs)
            gap = evidence.lead(f"MoDES − uniform top-{k}", [point], rival)
            rows = [skipped(name, x, scale.top_k) for name, x in (("MoDES", point), (f"top-{k}", rival))]
            distance = exact("difference of rows skipped", abs(rows[0].value - rows[1].value), "%")
            comparable = inside(distance, 0.0, SKIP_TOLERANCE)
            judgements.append(comparable if comparable.verdict != "agrees" else no_better(gap, room, MARGIN))
            figures += [gap, *rows]
        return Finding(all_of(*judgements), (*figures, room))

    def robust(evidence: Evidence) -> Finding:
        losses = [evidence.loss(f"MoDES at {x} % skip", spec) for x, spec in ((57, moderate), (77, deep))]
        control = evidence.loss("the random half", random)
        judgement = all_of(costs_little(losses[0], control), costs_little(losses[1], control, 3.0))
        rows = [
            skipped(f"MoDES at {x} %", evidence.point(s), scale.top_k)
            for x, s in ((57, moderate), (77, deep))
        ]
        return Finding(judgement, (*losses, *rows, control))

    def converts(evidence: Evidence) -> Finding:
        point = evidence.point(uniform)
        gain = speedup("uniform half", point)
        saved = exact("executed FLOPs saved", 100.0 * point.executed_saved, "%")
        share = conversion("uniform half", point)
        return Finding(at_least(share, 56.0), (share, gain, saved))

    return [
        Claim(
            "uniform_half",
            "Running half of each token's experts, the highest-weighted, costs little.",
            "−0.5 points at top-4 of 8 (Tab. 6)",
            f"loss of uniform top-{scale.half_k} of {scale.top_k}; control: a random half",
            f"agrees if the loss is at most {LITTLE} points and the control's is above that",
            uniform_half,
            ("full", uniform, random),
        ),
        Claim(
            "random_half",
            "Which half matters: a random half of the selected experts costs far more.",
            "−6.6 against −0.5 points (Tab. 6, App. E.2)",
            f"uniform minus random {scale.half_k} of {scale.top_k}",
            "agrees if the gap is at least 3 points (half of the paper's)",
            random_half,
            ("full", uniform, random),
        ),
        Claim(
            "modes_no_better",
            "Calibrated MoDES is no better than uniform top-k at equal skipping.",
            "69.8 and 69.8 (Tab. 6, §5.3)",
            f"MoDES minus uniform top-{scale.half_k} and top-1, each at the latter's rows skipped",
            f"agrees if MoDES is at most {MARGIN} points ahead of both, where top-1 loses more than that; disagrees if "
            f"it is ahead at all; rows skipped must agree within {SKIP_TOLERANCE:g} percentage points",
            modes_no_better,
            ("full", uniform, one, equal, equal_one),
        ),
        Claim(
            "modes_robust",
            "MoDES holds at 57 % of the rows skipped, and nearly at 77 %.",
            "69.8 (−0.5) and 68.8 (−1.5) of 70.3 (§5.3)",
            "losses at these targets; control: a random half, which skips less",
            f"agrees if the losses are at most {LITTLE} and 3 points (twice the paper's) and the control's is above",
            robust,
            ("full", random, moderate, deep),
        ),
        Claim(
            "topk_converts",
            "With kernels that skip the rows, adaptive top-k turns over half of its FLOPs into time.",
            "56–58 % with SonicMoE, 41 % with grouped GEMM (Fig. 8); 1.19× for 11.6 % (Tab. 6)",
            "conversion of uniform half top-k on this machine's kernels",
            "agrees if at least 56 % of the executed FLOPs saved show on the clock",
            converts,
            ("full", uniform),
        ),
    ]


def expert_skipping(scale: Scale) -> list[Claim]:
    """Skipping a token's experts altogether, against leaving out some of each token's."""
    by_rank, otsu_beta, otsu_logit = "beta_skip:share=0.5", "otsu_beta", "otsu_logit"
    nothing = "skip_layers:first=0"

    def top_k_beats_skipping(evidence: Evidence) -> Finding:
        gaps, rows = [], []
        for name, policy in (("β rank", by_rank), ("Otsu on β", otsu_beta), ("Otsu on logits", otsu_logit)):
            point = evidence.point(policy)
            share = skip_share(point, scale.top_k)
            rival = evidence.point(f"modes:skip={share:.3f}")
            gaps.append(evidence.lead(f"MoDES − {name} at equal skipping", [rival], point))
            rows += [skipped(name, point, scale.top_k), skipped("that MoDES", rival, scale.top_k)]
        return Finding(all_of(*map(above, gaps)), (*gaps, *rows))

    def otsu(evidence: Evidence) -> Finding:
        point = evidence.point(otsu_beta)
        share = skip_share(point, scale.top_k)
        rival = evidence.point(f"beta_skip:share={share:.3f}")
        gap = evidence.lead("Otsu on β − fixed share of β", [point], rival)
        rows = (skipped("Otsu", point, scale.top_k), skipped("the fixed share", rival, scale.top_k))
        control = evidence.loss("no routed experts at all", nothing)
        return Finding(
            shown(above(gap, -SAME), control, SAME),
            (gap, *rows, evidence.loss("Otsu on β", otsu_beta), control),
        )

    return [
        Claim(
            "topk_beats_skipping",
            "Adaptive top-k is the most compute-efficient action on a token: better than skipping all its experts.",
            "69.8 at half the rows (Tab. 6, §5.3); skipping's curves lie in Fig. 7, without figures in the text",
            "MoDES minus β-ranked skip at 50 %, Otsu on β and Otsu on router logits, each at the latter's rows skipped",
            "agrees if every gap is above 0, disagrees if one is below",
            top_k_beats_skipping,
            ("full", by_rank, otsu_beta, otsu_logit),
        ),
        Claim(
            "otsu_finds_threshold",
            "A split of β found per layer by Otsu's method serves without a share to set.",
            "method in App. E.2, curves in Fig. 7, no figures in the text",
            "Otsu on β minus the β-ranked skip of the same share of rows",
            f"agrees if it is less than {SAME:g} point behind, where leaving out all routed experts loses more",
            otsu,
            ("full", otsu_beta, nothing),
        ),
    ]


def combined(scale: Scale) -> list[Claim]:
    """A token rule with an expert rule."""
    tokens, experts = beta(0.5), "modes:skip=0.3"
    both = f"{experts}+{tokens}"

    def adds(evidence: Evidence) -> Finding:
        full, joint = evidence.full, evidence.point(both)
        one, other = evidence.point(tokens), evidence.point(experts)
        excess = evidence.contrast(
            "loss of both − the losses of each", (-1.0, full), (-1.0, joint), (1.0, one), (1.0, other)
        )
        losses = [
            evidence.loss(name, x)
            for name, x in (("both", both), ("β alone", tokens), ("MoDES alone", experts))
        ]
        more = exact(
            "more executed FLOPs saved than by β", 100.0 * (joint.executed_saved - one.executed_saved), "%"
        )
        adds_up = shown(inside(excess, -SAME, SAME), losses[0], SAME)
        return Finding(all_of(adds_up, above(more)), (excess, *losses, more))

    return [
        Claim(
            "modes_and_beta",
            "MoDES and β pruning combine: savings accumulate, and losses about add.",
            "30 % skip + keep 50 %: −1.2 for 28.9 % FLOPs; β alone −1.1 for 22.8 % (Tab. 6)",
            "loss of both minus the sum of the two losses; FLOPs saved beyond β alone",
            f"agrees if the first lies within ±{SAME:g} point, with a loss of both above it, and the second above 0",
            adds,
            ("full", tokens, experts, both),
        )
    ]
