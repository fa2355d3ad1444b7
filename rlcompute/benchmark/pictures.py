"""Pictures of time against FLOPs, of tiles, and of where the time goes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from rlcompute.benchmark.breakdown import EVERY
from rlcompute.benchmark.rows import Row

_COLOURS = ("#2a6f97", "#d1495b", "#edae49", "#6c757d", "#00798c", "#9b5de5")
_DPI = 110


def write(out: Path, tables: Mapping[str, Sequence[Row]], geometry: str) -> list[Path]:
    """Writes a picture for each table that has one, and returns their paths."""
    drawn: dict[str, tuple[str, Callable[[Axes, Sequence[Row]], None]]] = {
        "i": ("time_against_flops_tokens", _against_flops),
        "ii": ("time_against_flops_experts", _against_flops),
        "iii": ("time_against_tokens", _against_tokens),
        "iv": ("where_the_time_goes", _components),
        "v": ("full_compute", _bars),
    }
    paths = []
    for number, rows in tables.items():
        if number in drawn:
            name, draw = drawn[number]
            figure = Figure(figsize=(7.5, 4.6), dpi=_DPI, layout="constrained")
            axes = figure.add_subplot()
            draw(axes, rows)
            axes.set_title(f"table {number}, geometry {geometry}", fontsize=10)
            path = out / f"{name}.png"
            figure.savefig(path)
            paths.append(path)
    return paths


def fit(rows: Sequence[Row]) -> tuple[float, float]:
    """Least squares of seconds on FLOPs: seconds per FLOP, and seconds at no FLOPs."""
    flops = [row.flops for row in rows if row.flops is not None]
    slope, intercept = np.polyfit(flops, [row.seconds_median for row in rows], 1)
    return float(slope), float(intercept)


def _against_flops(axes: Axes, rows: Sequence[Row]) -> None:
    """Points with their spread and regression; the dashed line is time in proportion to FLOPs."""
    for name, colour in zip(dict.fromkeys(row.variant for row in rows), _cycle(), strict=False):
        points = [row for row in rows if row.variant == name]
        flops = np.array([row.flops for row in points], dtype=np.float64) / 1e9
        seconds = np.array([row.seconds_median for row in points])
        spread = np.array([row.seconds_iqr / 2 for row in points])
        label = name
        if len(points) > 1:
            slope, intercept = fit(points)
            label = f"{name}: {slope * 1e12:.2f} s a TFLOP, {intercept:+.3f} s at none"
            ends = np.array([0.0, flops.max()])
            axes.plot(ends, intercept + slope * 1e9 * ends, color=colour, linewidth=1.0)
            most = flops.argmax()
            axes.plot([0, flops[most]], [0, seconds[most]], color=colour, linewidth=0.8, linestyle=":")
        axes.errorbar(
            flops, seconds, yerr=spread, color=colour, marker="o", linestyle="none", capsize=3, label=label
        )
    axes.set_xlabel("FLOPs that the decisions leave (GFLOP); dotted: time in proportion")
    axes.set_ylabel("seconds")
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=min(0.0, axes.get_ylim()[0]))
    axes.grid(alpha=0.25)
    axes.legend(fontsize=8, frameon=False)


def _against_tokens(axes: Axes, rows: Sequence[Row]) -> None:
    for name, colour in zip(dict.fromkeys(row.variant for row in rows), _cycle(), strict=False):
        points = [row for row in rows if row.variant == name]
        tokens = [int(row.row.split()[0]) for row in points]
        axes.plot(tokens, [row.seconds_median for row in points], color=colour, marker="o", label=name)
        for x, row in zip(tokens, points, strict=True):
            axes.annotate(
                row.extra.get("tiles of 128", ""),
                (x, row.seconds_median),
                xytext=(5, -9),
                textcoords="offset points",
                fontsize=7,
                color=colour,
            )
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xlabel("tokens (numbers: tiles of 128 rows)")
    axes.set_ylabel("seconds")
    axes.grid(alpha=0.25, which="both")
    axes.legend(fontsize=8, frameon=False)


def _components(axes: Axes, rows: Sequence[Row]) -> None:
    rows = [row for row in rows if row.variant != EVERY]
    variants = list(dict.fromkeys(row.variant for row in rows))
    components = list(dict.fromkeys(row.row for row in rows if row.row != "total"))
    left = np.zeros(len(variants))
    for name, colour in zip(components, _cycle(), strict=False):
        width = np.array(
            [
                next(row.seconds_median for row in rows if row.variant == v and row.row == name)
                for v in variants
            ]
        )
        hatch = "//" if components.index(name) >= len(_COLOURS) else None
        axes.barh(variants, width, left=left, color=colour, hatch=hatch, edgecolor="white", label=name)
        left += width
    axes.invert_yaxis()
    axes.set_xlabel("seconds of the language model's pass")
    axes.legend(fontsize=8, frameon=False, ncols=4, loc="upper center", bbox_to_anchor=(0.5, -0.14))


def _bars(axes: Axes, rows: Sequence[Row]) -> None:
    labels = [f"{row.row}\n{row.variant}" for row in rows]
    colours = [_COLOURS[0] if row.variant.startswith("ours") else _COLOURS[3] for row in rows]
    axes.barh(
        labels,
        [row.seconds_median for row in rows],
        xerr=[row.seconds_iqr / 2 for row in rows],
        color=colours,
    )
    axes.invert_yaxis()
    axes.tick_params(axis="y", labelsize=6)
    axes.set_xlabel("seconds")


def _cycle() -> list[str]:
    return list(_COLOURS) * 4
