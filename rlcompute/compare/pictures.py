"""Pictures of the comparison: accuracy against savings by kind of action, and firing rates by layer.

They take plain points, so that whoever measured them decides what a point is. Every function returns an RGB picture,
uint8 [height, width, 3], for :func:`rlcompute.plots.write_png`.

Shape legend: N layers.
"""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.transforms import ScaledTranslation

from rlcompute.data.schema import MODALITIES
from rlcompute.metrics import FloatArray
from rlcompute.plots import Picture, new_figure, render, wrapped_title
from rlcompute.policies.checkpoint import METHODS
from rlcompute.policies.rules import BACKBONES, FREE, RULES, PolicySpec, Rule

_GATES = {method: f"{method} gates" for method in METHODS.values()}
TOP_K, TOKENS, SKIPPING, EXPERTS, COMBINED, *_ = PANELS = (
    "adaptive top-k",
    "token pruning",
    "expert skipping",
    "expert pruning",
    "combined rules",
    *_GATES.values(),
)
"""Panels of :func:`budget_curves`, in order; what is in the same panel competes by the same kind of action, or was
trained by the same method."""

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
}

# Okabe and Ito's palette, without the yellow that white paper swallows: also the colour-blind tell them apart.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#222222")
_MARKERS = "osD^vPX"
_DASHES = ("-", "--", ":")
_PANEL_INCHES = 4.3
_DEEPEST = 10.0
"""Points under full compute at which the panels end; what lies deeper would flatten all that matters."""
_LEGEND_INCHES = 0.66
"""From a panel's lower edge to its legend: ticks and a label of two lines."""
MODALITY_COLOURS = dict(zip(MODALITIES, COLOURS, strict=False))
MODALITY_MARKERS = dict(zip(MODALITIES, _MARKERS, strict=False))


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
        joined: whether a line joins the points of this name. Members of a group, such as gates of several seeds, are
            better left apart.
    """

    panel: str
    policy: str
    saved_percent: float
    recall: float
    low: float
    high: float
    experts: int | None = None
    joined: bool = True


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


def panel_of(spec: PolicySpec, method: str | None = None) -> str | None:
    """The panel of :func:`budget_curves` that a policy belongs to; None for full compute, which is in all of them.

    Args:
        spec: of the policy.
        method: what trained it (:data:`rlcompute.policies.checkpoint.METHODS`); None if nothing did.
    """
    if method is not None:
        return _GATES[method]
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


def budget_curves(
    points: Sequence[CurvePoint], *, full_recall: float, num_experts: int, title: str
) -> Picture:
    """Recall@1 against what is saved, one panel a kind of action (paper, Fig. 7).

    All panels share their axes, but for the experts kept. In those of combined rules and of gates the points of the
    other panels stand in grey. A point more than 10 points under full compute stands on the lower edge as an open
    triangle.

    Args:
        points: at least one; panels without points are left out.
        full_recall: recall@1 of full compute, mean over modalities, points of 100.
        num_experts: experts in a layer of the full checkpoint.
        title: put above all panels: what was evaluated, on how many queries.
    """
    panels = [panel for panel in PANELS if any(point.panel == panel for point in points)]
    columns = 2 if len(panels) == 4 else min(3, len(panels))
    rows = -(-len(panels) // columns)
    names = max(len({point.policy for point in points if point.panel == panel}) for panel in panels)
    figure = new_figure(_PANEL_INCHES * columns, (3.8 + 0.16 * names) * rows + 0.5)
    most_saved = max(point.saved_percent for point in points)
    lowest = max(min(full_recall, *(point.low for point in points)) - 1.0, full_recall - _DEEPEST)
    first: Axes | None = None
    for number, panel in enumerate(panels):
        axes = figure.add_subplot(rows, columns, number + 1, sharey=first)
        first = first or axes
        axes.axhline(full_recall, color="#222222", linewidth=0.9, linestyle=":", label="full compute")
        if panel == COMBINED or panel in _GATES.values():
            _draw_others(axes, [point for point in points if point.panel not in (panel, EXPERTS)])
        _draw_lines(axes, [point for point in points if point.panel == panel], lowest)
        axes.set_title(panel, fontweight="bold")
        axes.set_xlabel(
            f"experts kept in a layer, of {num_experts}"
            if panel == EXPERTS
            else "executed FLOPs saved\n(% of the language model's at full compute)"
        )
        if panel == EXPERTS:
            axes.set_xticks(sorted({_position(point) for point in points if point.panel == EXPERTS}))
            axes.invert_xaxis()
        else:
            axes.set_xlim(0.0, max(1.0, 1.06 * most_saved))
        if number % columns == 0:
            axes.set_ylabel("recall@1 (points of 100),\nmean over modalities")
        axes.grid(alpha=0.25)
        legend_below(axes, _PANEL_INCHES)
    figure.axes[0].set_ylim(bottom=lowest)
    figure.suptitle(wrapped_title(title, figure), fontsize=9)
    return render(figure)


def _position(point: CurvePoint) -> float:
    if point.panel != EXPERTS:
        return point.saved_percent
    assert point.experts is not None, f"{point.policy}: expert pruning needs the number of experts"
    return float(point.experts)


def _draw_others(axes: Axes, others: Sequence[CurvePoint]) -> None:
    if others:
        axes.scatter(
            [point.saved_percent for point in others],
            [point.recall for point in others],
            s=12,
            color="#c4c4c4",
            zorder=0,
            label="the other panels",
        )


def _draw_lines(axes: Axes, points: Sequence[CurvePoint], lowest: float) -> None:
    for number, name in enumerate(dict.fromkeys(point.policy for point in points)):
        own = sorted((point for point in points if point.policy == name), key=_position)
        colour = COLOURS[number % len(COLOURS)]
        dashes = _DASHES[number // len(COLOURS) % len(_DASHES)]
        errors = [
            [max(0.0, point.recall - point.low) for point in own],
            [max(0.0, point.high - point.recall) for point in own],
        ]
        axes.errorbar(
            [_position(point) for point in own],
            [point.recall for point in own],
            yerr=errors,
            label=name,
            color=colour,
            # Of the second seven each colour has another marker than of the first.
            marker=_MARKERS[(number + number // len(COLOURS)) % len(_MARKERS)],
            markersize=6,
            linewidth=1.4,
            linestyle=dashes if all(point.joined for point in own) else "none",
            elinewidth=1.0,
            capsize=3,
        )
        deeper = [_position(point) for point in own if point.recall < lowest]
        axes.scatter(
            deeper,
            [lowest] * len(deeper),
            marker="v",
            color="white",
            edgecolors=colour,
            clip_on=False,
            zorder=3,
        ).set_in_layout(False)


def legend_below(axes: Axes, width: float) -> None:
    """The legend of a panel so many inches wide, under its label, in as many columns as fit at eight points."""
    _, labels = axes.get_legend_handles_labels()
    figure = axes.get_figure(root=True)
    assert figure is not None
    axes.legend(
        loc="upper center",
        bbox_to_anchor=(0.5, 0.0),
        bbox_transform=axes.transAxes + ScaledTranslation(0.0, -_LEGEND_INCHES, figure.dpi_scale_trans),
        ncols=min(4, max(1, int(15 * width / (max(map(len, labels)) + 8)))),
        fontsize=8,
        frameon=False,
        handlelength=2.2,
        columnspacing=1.2,
        borderpad=0.0,
    )


def firing_rates(curves: Sequence[RateCurve], title: str) -> Picture:
    """Shares of tokens dropped and of expert rows left out, layer by layer, one column a policy (paper, Fig. 9).

    Args:
        curves: at least one; columns and lines in the order of the first curve of each.
        title: put above all panels.
    """
    policies = list(dict.fromkeys(curve.policy for curve in curves))
    figure = new_figure(3.5 * len(policies) + 0.6, 5.6)
    for column, policy in enumerate(policies):
        own = [curve for curve in curves if curve.policy == policy]
        for row in range(2):
            axes = figure.add_subplot(2, len(policies), row * len(policies) + column + 1)
            for curve in own:
                _draw_rate(axes, curve, (curve.drop_N, curve.skip_N)[row])
            if row == 0:
                axes.set_title(textwrap.fill(policy, 36), fontsize=8, fontweight="bold")
            else:
                axes.set_xlabel("layer (in the last, only <emb> is left)")
            if column == 0:
                axes.set_ylabel(
                    (
                        "tokens dropped\n(of those that reach the layer)",
                        "expert rows left out\n(of k for each survivor)",
                    )[row]
                )
    _legend_of_modalities(figure)
    figure.suptitle(wrapped_title(title, figure), fontsize=9)
    return render(figure)


def _draw_rate(axes: Axes, curve: RateCurve, rate_N: FloatArray) -> None:
    layers = np.arange(len(rate_N))
    axes.plot(
        layers,
        rate_N,
        label=curve.modality,
        color=MODALITY_COLOURS[curve.modality],
        marker=MODALITY_MARKERS[curve.modality],
        markersize=4.5,
        linewidth=1.3,
    )
    axes.set_ylim(-0.04, 1.04)
    axes.set_xticks(layers[:: max(1, -(-len(layers) // 10))])
    axes.grid(alpha=0.25)


def _legend_of_modalities(figure: Figure) -> None:
    handles = {
        label: handle
        for axes in figure.axes
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)
    }
    figure.legend(
        handles.values(), handles.keys(), loc="outside lower center", ncols=len(handles), frameon=False
    )
