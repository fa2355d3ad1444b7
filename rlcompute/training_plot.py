"""Picture of a straight-through run: what every action leaves out, what that saves, and what it costs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from matplotlib.axes import Axes

from rlcompute.config_ste import HALTING
from rlcompute.plots import Picture, new_figure, render

FloatArray = npt.NDArray[np.float64]

SMOOTHED_SHARE = 0.04
"""Iterations that a line is the mean of, as a share of the run: a batch is a small sample."""
_LEAST_SPAN = 5.0
"""Percentage points that an axis shows at least: noise must not look like a change."""


@dataclass(frozen=True)
class _Line:
    """One metric: its name for readers, its colour, and whether the picture shows 1 - value, what is left out."""

    tag: str
    name: str
    colour: str
    left_out: bool = False


_SHARES = (
    _Line("compute/lm_saved", "LM FLOPs saved", "#222222"),
    _Line("rate/token_pruner/keep", "visual tokens dropped", "#bc4b51", left_out=True),
    _Line("rate/expert_skip/skip", "routed experts skipped\n(of tokens and layers)", "#f4a259"),
    _Line("rate/layer_skip/skip", "layers skipped\n(of inputs and layers)", "#2a6f97"),
)
_COUNTS = (
    _Line("rate/null_experts/real", "real experts a token", "#5b8e7d"),
    *(_Line(f"rate/{kind}/layers", "expected layers before halting", "#7b2d8b") for kind in HALTING),
)
_QUALITY = (
    _Line("recall/teacher", "recall in the batch, full compute", "#adb5bd"),
    _Line("recall/mean", "recall in the batch", "#00798c"),
    _Line("distill/cosine", "cosine to full compute", "#d1495b"),
)


def rates_over_training(rows: Sequence[Mapping[str, Any]]) -> Picture:
    """How the rates of all actions, the saving and the embeddings' quality develop, one panel above the other.

    Thin lines are batches, thick ones their moving average over :data:`SMOOTHED_SHARE` of the run, whose last value
    the legend gives. Metrics that the rows lack have no line, and a panel without lines is left out.

    Args:
        rows: lines of ``metrics.jsonl``, at least one; null where a metric had no value.
    """
    iterations = np.array([row["iteration"] for row in rows], dtype=np.float64)
    panels = [
        ("left out, saved (%)", 100.0, _present(_SHARES, rows)),
        ("mean a token or input", 1.0, _present(_COUNTS, rows)),
        ("embeddings (%)", 100.0, _present(_QUALITY, rows)),
    ]
    shown = [panel for panel in panels if panel[2]]
    figure = new_figure(8.6, 2.7 * len(shown) + 0.3)
    for number, (label, scale, lines) in enumerate(shown, start=1):
        axes = figure.add_subplot(len(shown), 1, number)
        for line in lines:
            _draw(axes, line, iterations, scale * _values(line, rows))
        axes.set_ylabel(label)
        axes.set_xlim(iterations[0], max(iterations[-1], iterations[0] + 1))
        axes.grid(alpha=0.25)
        if scale > 1.0:
            _limit(axes)
        axes.legend(loc="center left", bbox_to_anchor=(1.01, 0.5), frameon=False, fontsize=8)
        if number < len(shown):
            axes.tick_params(labelbottom=False)
        else:
            axes.set_xlabel("iteration")
    return render(figure)


def _present(lines: Sequence[_Line], rows: Sequence[Mapping[str, Any]]) -> list[_Line]:
    return [line for line in lines if any(row.get(line.tag) is not None for row in rows)]


def _values(line: _Line, rows: Sequence[Mapping[str, Any]]) -> FloatArray:
    """The metric in every row, NaN where it has no value."""
    values = np.array([row.get(line.tag) for row in rows], dtype=np.float64)
    return 1.0 - values if line.left_out else values


def _draw(axes: Axes, line: _Line, iterations: FloatArray, values: FloatArray) -> None:
    axes.plot(iterations, values, color=line.colour, linewidth=0.6, alpha=0.3)
    smooth = moving_average(values, round(SMOOTHED_SHARE * len(values)))
    axes.plot(iterations, smooth, color=line.colour, linewidth=1.8, label=f"{line.name}: {smooth[-1]:.2f}")


def _limit(axes: Axes) -> None:
    """Percent axes show a least span and nothing impossible above 100."""
    low, high = axes.get_ylim()
    high = min(high, 101.0)
    axes.set_ylim(min(low, high - _LEAST_SPAN), high)


def moving_average(values: FloatArray, width: int) -> FloatArray:
    """Mean over the last ``width`` values (at least one) that are not NaN; NaN where all of them are."""
    width = max(1, width)
    known = np.concatenate([[0], np.cumsum(np.isfinite(values))])
    total = np.concatenate([[0.0], np.cumsum(np.nan_to_num(values))])
    end = np.arange(1, len(values) + 1)
    start = np.maximum(0, end - width)
    count = known[end] - known[start]
    mean: FloatArray = np.full(len(values), np.nan)
    np.divide(total[end] - total[start], count, out=mean, where=count > 0)
    return mean
