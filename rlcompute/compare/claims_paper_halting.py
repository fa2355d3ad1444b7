"""Claims of the paper on what did not work: halting and early exit, trained straight through (App. E.1, Tab. 12).

A claim agrees if the failure shows here as well. "Layers missed" are those after the first, which every token enters:
0 % is full compute, 100 % means that all halt in the first layer.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from rlcompute.compare.claims_evidence import Evidence, Scale, percent
from rlcompute.compare.claims_model import (
    LITTLE,
    Claim,
    Figure,
    Finding,
    Unit,
    all_of,
    at_least,
    at_most,
    exact,
)
from rlcompute.compare.claims_straight import (
    firing_of,
    inputs_skipping,
    on_gates,
    saved,
    visual_dropped,
    visual_drops,
    without_curves,
)
from rlcompute.compare.claims_training import Curves, Runs
from rlcompute.config_ste import Action
from rlcompute.metrics import FloatArray

NEGLIGIBLE = 2.0
"""Percent of the language model's FLOPs below which a saving is none."""
HEALTHY, COLLAPSED = 90.0, 50.0
"""Recall in the batch, in percent of full compute's, above which training is healthy and below which it has failed."""
GONE = 10.0
"""Percent of its peak below which the gradient's norm counts as collapsed."""
TOO_MUCH = 85.0
"""Percent dropped beyond which the paper's gates collapse."""
NEARLY_ALL = 90.0
INERT = 5.0
"""Percent of the visual tokens below which a gate that drops them counts as inert."""


def halting(scale: Scale) -> list[Claim]:
    """All of them."""
    return [_avit(scale), _cumulative(scale), _beta(scale), _early_exit(scale)]


def missed(scale: Scale, kind: Action) -> Callable[[Curves], FloatArray]:
    """Percent of the layers after the first that are missed, over training; from the expected number of layers."""

    def over_training(curves: Curves) -> FloatArray:
        layers = curves.smooth(f"rate/{kind}/layers")
        return 100.0 * (1.0 - (layers - 1.0) / (scale.num_layers - 1.0))

    return over_training


def _read(runs: Runs, name: str, measure: Callable[[Curves], float], unit: Unit = "%") -> Figure:
    """A figure of the curves, mean over trainings."""
    return exact(f"{name}, {runs.name}", runs.curve(measure), unit)


def _course(scale: Scale, kind: Action, runs: Runs) -> list[Figure]:
    """How training went, if there are curves."""
    if not runs.curves:
        return []
    share = missed(scale, kind)
    return [
        _read(runs, "layers missed at the start of training", lambda x: float(share(x)[0])),
        _read(runs, "layers missed at most", lambda x: float(np.nanmax(share(x)))),
        _read(runs, "layers missed at the end", lambda x: float(share(x)[-1])),
        _read(runs, "divergence from the prior at the start", lambda x: x.first(f"rate/{kind}/kl"), ""),
        _read(runs, "divergence from the prior at the end", lambda x: x.last(f"rate/{kind}/kl"), ""),
        _read(runs, "cosine to full compute at the end", lambda x: x.last("distill/cosine"), ""),
    ]


def _recall(curves: Curves) -> FloatArray:
    """Recall in the batch, in percent of full compute's on the same batches, over training."""
    return 100.0 * curves.smooth("recall/mean") / curves.smooth("recall/teacher")


def _avit(scale: Scale) -> Claim:
    def check(evidence: Evidence, runs: Runs) -> Finding:
        loss = evidence.loss_of(runs.name, runs.points)
        if not runs.curves:
            return Finding(without_curves(runs), (loss, saved(runs)))
        share = missed(scale, "halt_avit")
        start = _read(runs, "recall of full compute's at the start", lambda x: float(_recall(x)[0]))
        end = _read(runs, "recall of full compute's at the end", lambda x: float(_recall(x)[-1]))
        dropped = _read(runs, "layers missed at the end of training", lambda x: float(share(x)[-1]))
        gradient = _read(runs, "gradient at the end, of its peak", _gradient_left)
        judgement = all_of(
            at_least(start, HEALTHY),
            at_least(dropped, TOO_MUCH),
            at_most(end, COLLAPSED),
            at_most(gradient, GONE),
        )
        figures = (start, dropped, end, gradient, loss, saved(runs), *_course(scale, "halt_avit", runs))
        return Finding(judgement, figures)

    return Claim(
        "avit_collapses",
        "A-ViT's halting with a learned projection trains well at first, then drops too much and collapses.",
        "beyond about 85 % dropped, representation and gradients collapse (Tab. 12)",
        "curves of training of halt_avit gates, means over the first and the last tenth: layers missed, recall in the "
        "batch, norm of the gradient",
        f"agrees if recall starts at {HEALTHY:g} % of full compute's or more, and at the end at least {TOO_MUCH:g} % "
        f"of the layers are missed, recall is at most {COLLAPSED:g} % of full compute's and the gradient at most "
        f"{GONE:g} % of its peak",
        on_gates("halt_avit", check),
        ("full",),
    )


def _gradient_left(curves: Curves) -> float:
    norms = curves.smooth("policy/gradient_norm")
    peak = float(np.nanmax(norms))
    return 100.0 * float(norms[-1]) / peak if peak > 0.0 else 0.0


def _cumulative(scale: Scale) -> Claim:
    first = max(1, scale.num_layers // 4)

    def check(evidence: Evidence, runs: Runs) -> Finding:
        firing = firing_of(evidence, runs)
        early = percent(
            evidence,
            firing,
            f"of the drops by {runs.name} in the first {first} of {scale.num_layers} layers",
            lambda x: visual_drops(x)[:, :first].sum(1) / visual_drops(x).sum(1),
        )
        dropped = percent(evidence, firing, "visual tokens dropped in any layer", visual_dropped)
        rate = runs.gates["halt_cumulative"]["rate"]
        wanted = (1.0 - (1.0 - rate) ** first) / (1.0 - (1.0 - rate) ** scale.num_layers)
        prior = exact("the prior's share of these layers", 100.0 * wanted, "%")
        judgement = all_of(at_least(dropped, 50.0), at_least(early, NEARLY_ALL))
        loss = evidence.loss_of(runs.name, runs.points)
        figures = (early, dropped, prior, loss, saved(runs), *_course(scale, "halt_cumulative", runs))
        return Finding(judgement, figures)

    return Claim(
        "cumulative_halts_first",
        "With a drop logit that accumulates, nearly all tokens halt in the first layers, whatever the prior says.",
        "nearly all halting in the first layer; the prior does not offset it (Tab. 12)",
        "where halt_cumulative gates drop the visual tokens of the held-out pairs; beside it the prior's share",
        f"agrees if at least half of the visual tokens are dropped, {NEARLY_ALL:g} % of these in the first quarter of "
        "the layers",
        on_gates("halt_cumulative", check),
        ("full",),
    )


def _beta(scale: Scale) -> Claim:
    def check(evidence: Evidence, runs: Runs) -> Finding:
        dropped = percent(
            evidence, firing_of(evidence, runs), f"visual tokens dropped by {runs.name}", visual_dropped
        )
        judgement = all_of(at_most(dropped, INERT), at_most(saved(runs), NEGLIGIBLE))
        loss = evidence.loss_of(runs.name, runs.points)
        return Finding(judgement, (dropped, saved(runs), loss, *_course(scale, "halt_beta", runs)))

    return Claim(
        "beta_halting_inert",
        "Halting by write strength, low β first, goes back to dropping nothing.",
        "frequently inert, returns toward zero drop; more aggressive settings destabilise training (Tab. 12)",
        "what halt_beta gates drop of the held-out pairs, and their course in training",
        f"agrees if at most {INERT:g} % of the visual tokens are dropped and at most {NEGLIGIBLE:g} % of the language "
        "model's FLOPs saved",
        on_gates("halt_beta", check),
        ("full",),
    )


def _early_exit(scale: Scale) -> Claim:
    def check(evidence: Evidence, runs: Runs) -> Finding:
        ran = percent(
            evidence,
            firing_of(evidence, runs),
            f"layers that an input runs under {runs.name}",
            lambda x: 1.0 - inputs_skipping(x).mean(1),
        )
        loss = evidence.loss_of(runs.name, runs.points)
        judgement = all_of(at_least(ran, NEARLY_ALL), at_most(saved(runs), NEGLIGIBLE), at_most(loss, LITTLE))
        return Finding(judgement, (ran, saved(runs), loss, *_course(scale, "early_exit", runs)))

    return Claim(
        "early_exit_exits_late",
        "A learned early exit ends up in the last layers: quality is kept, nothing is saved.",
        "exit probabilities converge to the final layer, negligible savings under stable quality (Tab. 12)",
        "layers that the inputs of the held-out pairs run under early_exit gates, saving and loss",
        f"agrees if inputs run at least {NEARLY_ALL:g} % of the layers, at most {NEGLIGIBLE:g} % of the language "
        f"model's FLOPs are saved, and the loss is at most {LITTLE} points",
        on_gates("early_exit", check),
        ("full",),
    )
