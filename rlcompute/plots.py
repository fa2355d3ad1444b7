"""Pictures: accuracy against compute, actions by layer, and dropped patches on the input.

Every function returns an RGB picture, uint8 [height, width, 3], for TensorBoard or :func:`write_png`. Figures
are drawn without pyplot: no global state, no window system.
"""

from __future__ import annotations

import io
import os
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import BoundaryNorm, Colormap
from matplotlib.figure import Figure
from PIL import Image

from rlcompute.pack import MODALITY_NAMES

Picture = npt.NDArray[np.uint8]

_POLICY_STYLES = {
    "full": ("#222222", "s"),
    "gates": ("#d1495b", "o"),
    "random": ("#6c757d", "X"),
    "uniform_topk": ("#00798c", "D"),
}
_OTHER_STYLE = ("#edae49", "^")
_ACTION_COLOURS = {"route": "#2a6f97", "skip": "#f4a259", "drop": "#bc4b51"}
_TINT = 0.65
"""Strength of the layer's colour over a dropped patch; the rest is the greyed picture."""


@dataclass(frozen=True)
class AccuracyPoint:
    """One policy in one panel.

    Attributes:
        policy: name of the policy.
        panel: modality, or ``mean``.
        executed_percent: executed FLOPs as percent of the full forward.
        recall_at_1: points of 100.
        low, high: 95 % interval of ``recall_at_1`` (paired against full compute).
    """

    policy: str
    panel: str
    executed_percent: float
    recall_at_1: float
    low: float
    high: float


def accuracy_against_compute(points: Sequence[AccuracyPoint], title: str) -> Picture:
    """Recall@1 against executed FLOPs: one panel for the mean and one for each modality.

    Args:
        points: at least one; panels appear in the order of their first point.
        title: put above all panels.
    """
    panels = list(dict.fromkeys(point.panel for point in points))
    columns = min(3, len(panels))
    rows = -(-len(panels) // columns)
    figure = new_figure(4.2 * columns, 3.5 * rows + 0.7)
    for number, panel in enumerate(panels):
        axes = figure.add_subplot(rows, columns, number + 1)
        _accuracy_panel(axes, [point for point in points if point.panel == panel])
        axes.set_title("mean over modalities" if panel == "mean" else panel, fontweight="bold")
        if number % columns == 0:
            axes.set_ylabel("recall@1 (points of 100)")
        if number + columns >= len(panels):
            axes.set_xlabel("executed FLOPs (% of full compute)")
    names = list(dict.fromkeys(point.policy for point in points))
    handles, _ = figure.axes[0].get_legend_handles_labels()
    figure.legend(handles, names, loc="outside lower center", ncols=len(names), frameon=False)
    figure.suptitle(wrapped_title(title, figure), fontsize=9)
    return render(figure)


def _accuracy_panel(axes: Axes, points: Sequence[AccuracyPoint]) -> None:
    for point in points:
        colour, marker = _POLICY_STYLES.get(point.policy, _OTHER_STYLE)
        errors = [[max(0.0, point.recall_at_1 - point.low)], [max(0.0, point.high - point.recall_at_1)]]
        axes.errorbar(
            point.executed_percent,
            point.recall_at_1,
            yerr=errors,
            label=point.policy,
            color=colour,
            marker=marker,
            markersize=8,
            linestyle="none",
            capsize=4,
        )
        axes.annotate(
            f"{point.recall_at_1:.1f}",
            (point.executed_percent, point.recall_at_1),
            xytext=(8, 5),
            textcoords="offset points",
            fontsize=8,
            color=colour,
            bbox={"facecolor": "white", "edgecolor": "none", "alpha": 0.7, "pad": 0.5},
        )
        if point.policy == "full":
            axes.axhline(point.recall_at_1, color=colour, linewidth=0.8, linestyle=":", zorder=0)
    axes.margins(x=0.18, y=0.15)
    axes.set_xticks([tick for tick in axes.get_xticks() if tick <= 100])
    # Where all policies agree to a fraction of a point, the axis must not blow the fraction up.
    low, high = axes.get_ylim()
    middle, half = (low + high) / 2, max(2.5, (high - low) / 2)
    axes.set_ylim(middle - half, middle + half)
    axes.grid(alpha=0.25)


def action_fractions(counts_NM3: npt.NDArray[np.integer]) -> Picture:
    """Share of ROUTE, SKIP and DROP among the decisions of each layer, stacked, one panel a modality.

    Args:
        counts_NM3: decisions by layer, by modality (text, image, video) and by action; a modality without any
            gets no panel.
    """
    present = [m for m in range(counts_NM3.shape[1]) if counts_NM3[:, m].sum() > 0]
    layers = np.arange(counts_NM3.shape[0])
    figure = new_figure(min(7.0, 0.32 * len(layers) + 1.0) * max(1, len(present)), 3.2)
    for place, modality in enumerate(present):
        axes = figure.add_subplot(1, len(present), place + 1)
        totals_N = np.maximum(counts_NM3[:, modality].sum(1), 1)
        bottom_N = np.zeros(len(layers))
        for action, (name, colour) in enumerate(_ACTION_COLOURS.items()):
            share_N = counts_NM3[:, modality, action] / totals_N
            axes.bar(layers, share_N, bottom=bottom_N, color=colour, width=0.85, label=name)
            bottom_N += share_N
        axes.set_title(f"{MODALITY_NAMES[modality]} tokens", fontweight="bold")
        axes.set_xlabel("layer")
        axes.set_ylim(0, 1)
        axes.set_xticks(layers[:: max(1, -(-len(layers) // 10))])
        if place == 0:
            axes.set_ylabel("share of decisions")
        else:
            axes.set_yticklabels([])
    if present:
        handles, labels = figure.axes[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=3, frameon=False)
    return render(figure)


def dropped_patches(
    frames: Sequence[Picture], dropped_at: npt.NDArray[np.integer], num_layers: int, title: str
) -> Picture:
    """The input with every dropped patch shaded by the layer that dropped it; survivors stay clear.

    Args:
        frames: RGB uint8 pictures: one image or page, or for a video one for each temporal patch.
        dropped_at: int [t, h, w] over merged patches, t as many as frames: the dropping layer, or -1 where
            the patch survived.
        num_layers: layers of the backbone, for the colour scale.
        title: put above.
    """
    columns = min(len(frames), 4)
    rows = -(-len(frames) // columns)
    height, width = frames[0].shape[:2]
    cell = 3.4
    figure = new_figure(cell * columns, cell * rows * min(1.6, max(0.6, height / width)) + 1.3)
    for number, (frame, drops_hw) in enumerate(zip(frames, dropped_at, strict=True)):
        axes = figure.add_subplot(rows, columns, number + 1)
        axes.imshow(_shade(frame, drops_hw, num_layers))
        axes.set_axis_off()
        kept = float((drops_hw < 0).mean())
        axes.set_title(f"{100 * kept:.0f} % of patches survive", fontsize=8)
    norm = BoundaryNorm(np.arange(num_layers + 1) - 0.5, num_layers)
    bar = figure.colorbar(
        ScalarMappable(norm, _layer_colours(num_layers)),
        ax=figure.axes,
        orientation="horizontal",
        alpha=_TINT,
        ticks=np.arange(0, num_layers, max(1, -(-num_layers // 10))),
        aspect=12 * columns,
    )
    bar.set_label("layer that dropped the patch (clear: survives)", fontsize=8)
    bar.ax.tick_params(labelsize=8, length=0)
    figure.suptitle(wrapped_title(title, figure), fontsize=9)
    return render(figure)


def _shade(frame: Picture, drops_hw: npt.NDArray[np.integer], num_layers: int) -> Picture:
    """The frame, greyed and tinted where patches were dropped, with the patch grid drawn between."""
    rows, columns = drops_hw.shape
    scale = max(1, round(320 / max(frame.shape[:2])))
    shaded = frame.repeat(scale, 0).repeat(scale, 1).astype(np.float32)
    row_edges = np.linspace(0, shaded.shape[0], rows + 1).round().astype(int)
    column_edges = np.linspace(0, shaded.shape[1], columns + 1).round().astype(int)
    colours = _layer_colours(num_layers)
    for row, column in zip(*np.nonzero(drops_hw >= 0), strict=True):
        patch = (
            slice(row_edges[row], row_edges[row + 1]),
            slice(column_edges[column], column_edges[column + 1]),
        )
        colour = 255.0 * np.array(colours(int(drops_hw[row, column]))[:3])
        grey = shaded[patch].mean(2, keepdims=True)
        shaded[patch] = (1.0 - _TINT) * grey + _TINT * colour
    shaded[row_edges[1:-1]] = 0.7 * shaded[row_edges[1:-1]] + 0.3 * 128
    shaded[:, column_edges[1:-1]] = 0.7 * shaded[:, column_edges[1:-1]] + 0.3 * 128
    return shaded.round().astype(np.uint8)


def _layer_colours(num_layers: int) -> Colormap:
    """One colour a layer: dark for early ones, which save the most compute, to bright for late ones."""
    return colormaps["plasma"].resampled(num_layers)


def write_png(path: Path, picture: Picture) -> None:
    """Writes a picture, all or nothing."""
    buffer = io.BytesIO()
    Image.fromarray(picture).save(buffer, format="PNG")
    part = path.with_name(path.name + ".part")
    part.write_bytes(buffer.getvalue())
    os.replace(part, path)


def new_figure(width: float, height: float) -> Figure:
    """An empty figure of so many inches."""
    return Figure(figsize=(width, height), dpi=110, layout="constrained")


def wrapped_title(title: str, figure: Figure) -> str:
    """A title in lines that fit the figure at nine points, some 13 characters an inch."""
    return textwrap.fill(title, int(13 * figure.get_figwidth()))


def render(figure: Figure) -> Picture:
    """The drawn figure as a picture."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=figure.dpi)
    return np.asarray(Image.open(buffer).convert("RGB"))
