"""Pictures of the comparison: accuracy against savings by kind of action, and firing rates by layer.

They take plain points, so that whoever measured them decides what a point is. Every function returns an RGB picture,
uint8 [height, width, 3], for :func:`rlcompute.plots.write_png`.

Shape legend: N layers.
"""

from __future__ import annotations

from dataclasses import dataclass

from rlcompute.metrics import FloatArray
from rlcompute.policies.rules import BACKBONES, FREE, RULES, PolicySpec, Rule

TOP_K, TOKENS, SKIPPING, EXPERTS, COMBINED = PANELS = (
    "adaptive top-k",
    "token pruning",
    "expert skipping",
    "expert pruning",
    "combined and learned",
)
"""Panels of :func:`budget_curves`, in order; rules of the same panel compete by the same kind of action."""

_PANEL_OF_RULE = {
    "uniform_topk": TOP_K,
    "random_topk": TOP_K,
    "threshold": TOP_K,
    "modes": TOP_K,
    "beta_prune": TOKENS,
    "random_prune": TOKENS,
    "attention_prune": TOKENS,
    "skip_layers": SKIPPING,
    "beta_skip": SKIPPING,
    "otsu_beta": SKIPPING,
    "otsu_logit": SKIPPING,
    "prune_experts": EXPERTS,
    "checkpoint": EXPERTS,
    "gates": COMBINED,
}


@dataclass(frozen=True)
class CurvePoint:
    """One measured policy in :func:`budget_curves`.

    Attributes:
        panel: one of :data:`PANELS` (:func:`panel_of`).
        policy: name of the line that the point belongs to (:func:`line_name`); points of one name are joined.
        saved_percent: executed FLOPs saved, percent of the language model's at full compute.
        recall: recall@1, mean over modalities, points of 100.
        low, high: 95 % interval of ``recall``, paired against full compute.
        experts: experts that the checkpoint keeps in a layer; what the panel :data:`EXPERTS` is drawn against.
    """

    panel: str
    policy: str
    saved_percent: float
    recall: float
    low: float
    high: float
    experts: int | None = None


@dataclass(frozen=True)
class RateCurve:
    """What a policy does to the inputs of one modality, layer by layer, in :func:`firing_rates`.

    Attributes:
        policy: name of the panel.
        modality: name of the line.
        drop_N: dropped tokens as a share of those that reach the decision, in [0, 1]; NaN where none does.
        skip_N: (token, expert) rows left out as a share of the survivors' k rows each; NaN where none survives.
    """

    policy: str
    modality: str
    drop_N: FloatArray
    skip_N: FloatArray


def panel_of(spec: PolicySpec) -> str | None:
    """The panel of :func:`budget_curves` that a policy belongs to; None for full compute, which is in all of them."""
    names = [rule.name for rule in spec.rules]
    if names == ["full"]:
        return None
    return _PANEL_OF_RULE[names[0]] if len(names) == 1 else COMBINED


def line_name(spec: PolicySpec) -> str:
    """Name of the line that a policy is a point of: what does not say how much it saves.

    The free knob, paths and defaults are left out; of a single rule without a free knob also what could be free, and
    numbers of experts: ``uniform_topk:k=2`` and ``uniform_topk:k=3`` lie on one line. Which weights run is always
    said.
    """
    alone = len(spec.rules) == 1 and spec.free is None
    return " + ".join(_rule_name(rule, alone) for rule in spec.rules)


def _rule_name(rule: Rule, alone: bool) -> str:
    told = []
    for key, value in rule.values.items():
        parameter = RULES[rule.name][key]
        amount = parameter.saves_more is not None or key in ("k", "experts")
        default = value == parameter.default and rule.name not in BACKBONES
        if value == FREE or key == "path" or default or (amount and alone):
            continue
        told.append(str(value) if parameter.choices else f"{key} {value}")
    return " ".join([rule.name, *told])
