"""Claims of the paper on token pruning by write strength and on expert pruning.

Layers are the paper's, by number: β is read in layer 2 or 4, after as many Gated DeltaNet and attention layers as
there. A shallower backbone then prunes later in its depth and saves a smaller share.
"""

from __future__ import annotations

from rlcompute.compare.claims_evidence import Evidence, Scale, conversion, speedup
from rlcompute.compare.claims_model import (
    LITTLE,
    SAME,
    Claim,
    Finding,
    above,
    all_of,
    at_least,
    at_most,
    costs_little,
    effect,
    exact,
    inside,
    shown,
)

PRUNE_LAYER, EARLY_LAYER = 4, 2
SALIENCIES = ("reap", "msan", "man", "probability", "frequency")
OUTPUT_BASED = SALIENCIES[:3]


def beta(keep: float, layer: int = PRUNE_LAYER) -> str:
    """β pruning after a layer of the paper."""
    return f"beta_prune:layer={layer},keep={keep:g}"


def random_prune(keep: float, layer: int = PRUNE_LAYER) -> str:
    """The control of :func:`beta`."""
    return f"random_prune:layer={layer},keep={keep:g}"


def token_pruning(scale: Scale) -> list[Claim]:
    """One-shot pruning of visual tokens."""
    half, quarter, most = beta(0.5), beta(0.25), beta(0.75)
    early = {keep: beta(keep, EARLY_LAYER) for keep in (0.75, 0.25)}
    late = {0.75: most, 0.25: quarter}

    def beats_random(evidence: Evidence) -> Finding:
        gap = evidence.lead("β − random", [evidence.point(half)], evidence.point(random_prune(0.5)))
        losses = (evidence.loss("β", half), evidence.loss("random", random_prune(0.5)))
        return Finding(above(gap), (gap, *losses))

    def half_is_cheap(evidence: Evidence) -> Finding:
        loss = evidence.loss("β at keep 50 %", half)
        control = evidence.loss("random pruning at keep 25 %", random_prune(0.25))
        return Finding(costs_little(loss, control, 2.3), (loss, control))

    def steep(evidence: Evidence) -> Finding:
        gap = evidence.lead("keep 50 % − keep 25 %", [evidence.point(half)], evidence.point(quarter))
        losses = (evidence.loss("β at keep 50 %", half), evidence.loss("β at keep 25 %", quarter))
        return Finding(effect(gap, 1.6, evidence.near_ceiling), (gap, *losses))

    def depth(evidence: Evidence) -> Finding:
        gaps = [
            evidence.lead(f"layer {EARLY_LAYER} − layer {PRUNE_LAYER} at keep {100 * keep:g} %", [x], y)
            for keep in early
            for x, y in [(evidence.point(early[keep]), evidence.point(late[keep]))]
        ]
        control = evidence.loss("random pruning at keep 25 %", random_prune(0.25))
        judgement = all_of(*(inside(gap, -SAME, SAME) for gap in gaps))
        return Finding(shown(judgement, control, SAME), (*gaps, control))

    def converts(evidence: Evidence) -> Finding:
        shares = [
            conversion(f"keep {100 * keep:g} %", evidence.point(beta(keep))) for keep in (0.75, 0.5, 0.25)
        ]
        gains = [speedup(f"keep {100 * keep:g} %", evidence.point(beta(keep))) for keep in (0.75, 0.5, 0.25)]
        return Finding(all_of(*(at_least(x, 63.0) for x in shares)), (*shares, *gains))

    def masking(evidence: Evidence) -> Finding:
        masked, packed = evidence.laboratory.execution(half)
        return Finding(at_most(masked, 1.05), (masked, packed))

    def faster(evidence: Evidence) -> Finding:
        gain = speedup("β at keep 50 %", evidence.point(half))
        saved = exact("executed FLOPs saved", 100.0 * evidence.point(half).executed_saved, "%")
        return Finding(above(gain, 1.0), (gain, saved))

    return [
        Claim(
            "beta_beats_random",
            "Write strength β picks visual tokens better than chance.",
            "69.2 against 68.4 at keep 50 % (Tab. 6)",
            f"β minus random pruning after layer {PRUNE_LAYER}, keep 50 %",
            "agrees if the gap is above 0",
            beats_random,
            ("full", half, random_prune(0.5)),
        ),
        Claim(
            "half_the_tokens",
            "Keeping half of the visual tokens by β costs about a point.",
            "−1.1 points (Tab. 6), −1.15 (§5.3)",
            f"loss after layer {PRUNE_LAYER}; control: random pruning to a quarter",
            "agrees if the loss is at most 2.3 points (twice the paper's) and the control's is above that",
            half_is_cheap,
            ("full", half, random_prune(0.25)),
        ),
        Claim(
            "half_the_tokens_time",
            "Keeping half of the visual tokens makes embedding faster.",
            "1.39× for 22.8 % of the FLOPs (Tab. 6)",
            "speed-up over full compute on this machine, same process, interleaved",
            "agrees if it is above 1",
            faster,
            ("full", half),
        ),
        Claim(
            "beta_steep",
            "β pruning falls off steeply beyond half: at 75 % dropped it loses several points.",
            "−1.1 at keep 50 %, −4.3 at keep 25 % (Tab. 6, Tab. 13)",
            "recall at keep 50 % minus recall at keep 25 %",
            "agrees if the gap is at least 1.6 points (half of the paper's)",
            steep,
            ("full", half, quarter),
        ),
        Claim(
            "decision_depth",
            "The layer of the pruning decision hardly matters.",
            "layer 2 minus layer 4: +0.04 at keep 75 %, +0.21 at keep 25 % (Tab. 13)",
            "the same differences",
            f"agrees if both lie within ±{SAME:g} point, on a suite where random pruning to a quarter loses more",
            depth,
            ("full", *early.values(), *late.values(), random_prune(0.25)),
        ),
        Claim(
            "packed_converts",
            "Packed execution turns most of the FLOPs it removes into time.",
            "63–82 % at keep 75, 50, 25 % (Fig. 8, Tab. 9)",
            "conversion of β pruning, the vision tower included in FLOPs and time",
            "agrees if it is at least 63 % at every keep rate",
            converts,
            ("full", most, half, quarter),
        ),
        Claim(
            "masking_saves_nothing",
            "Masking dropped tokens instead of removing them saves no time.",
            "1.02× at every keep rate (Tab. 9)",
            "speed-up of the language model in masked execution of β decisions at keep 50 %; packed beside it",
            "agrees if it is at most 1.05",
            masking,
            ("full", half),
        ),
    ]


def expert_pruning(scale: Scale) -> list[Claim]:
    """Smaller checkpoints."""
    half = {x: f"prune_experts:saliency={x},experts={scale.half_experts}" for x in SALIENCIES}
    fewest = {x: f"prune_experts:saliency={x},experts={scale.top_k}" for x in SALIENCIES}

    def half_the_experts(evidence: Evidence) -> Finding:
        losses = [evidence.loss(x, half[x]) for x in SALIENCIES]
        control = evidence.loss(f"frequency at {scale.top_k} experts", fewest["frequency"])
        return Finding(costs_little(losses[0], control), (*losses, control))

    def output_beats_router(evidence: Evidence) -> Finding:
        gaps = [
            evidence.lead(
                f"output-based − router probability at {experts} experts",
                [evidence.point(kept[x]) for x in OUTPUT_BASED],
                evidence.point(kept["probability"]),
            )
            for experts, kept in ((scale.half_experts, half), (scale.top_k, fewest))
        ]
        return Finding(above(gaps[0]), tuple(gaps))

    def reap_best(evidence: Evidence) -> Finding:
        gaps = [
            evidence.contrast(
                f"REAP − {x}",
                *((0.5, evidence.point(kept["reap"])) for kept in (half, fewest)),
                *((-0.5, evidence.point(kept[x])) for kept in (half, fewest)),
            )
            for x in SALIENCIES[1:]
        ]
        return Finding(all_of(*map(above, gaps)), tuple(gaps))

    def memory(evidence: Evidence) -> Finding:
        point, laboratory = evidence.point(half["reap"]), evidence.laboratory
        saved = exact("executed FLOPs saved", 100.0 * point.executed_saved, "%")
        held = laboratory.expert_bytes(half["reap"]) / laboratory.expert_bytes("full")
        less = exact("routed experts' memory saved", 100.0 * (1.0 - held), "%")
        return Finding(
            all_of(inside(saved, -2.0, 2.0), at_least(less, 45.0)),
            (saved, less, speedup("half the experts", point)),
        )

    return [
        Claim(
            "half_the_experts",
            "Half of the experts can go for good at less than 1.2 points.",
            "256 → 128 experts: REAP −0.8, MSAN −0.9, MAN −0.9 (Tab. 6)",
            f"loss of REAP at {scale.half_experts} of {scale.num_experts}; control: frequency at {scale.top_k}",
            f"agrees if the loss is at most {LITTLE} points and the control's is above that",
            half_the_experts,
            ("full", *half.values(), fewest["frequency"]),
        ),
        Claim(
            "output_beats_router",
            "Saliencies that read the experts' output beat router probability.",
            "69.4–69.5 against 68.7 at half (Tab. 6)",
            "mean of REAP, MSAN and MAN minus router probability, at half the experts",
            "agrees if the gap is above 0",
            output_beats_router,
            (*half.values(), *fewest.values()),
        ),
        Claim(
            "reap_best",
            "REAP is generally the best saliency.",
            "69.5 against 69.4, 69.4, 68.7 (Tab. 6, Fig. 7)",
            f"REAP minus each other one, mean of {scale.half_experts} and {scale.top_k} experts",
            "agrees if every gap is above 0, disagrees if one is below",
            reap_best,
            (*half.values(), *fewest.values()),
        ),
        Claim(
            "pruning_memory_not_flops",
            "Expert pruning saves memory, not FLOPs.",
            "FLOPs ≈ 0 % (Tab. 6, §4.2)",
            "executed FLOPs and the routed experts' bytes at half the experts",
            "agrees if at most 2 % of the FLOPs and at least 45 % of the bytes are saved (exact counts)",
            memory,
            ("full", half["reap"]),
        ),
    ]
