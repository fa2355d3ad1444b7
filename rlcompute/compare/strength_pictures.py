"""Pictures of the study of write strength: agreement with attention, depth, stability (paper, Fig. 10, 13, 14).

Every function returns an RGB picture, uint8 [height, width, 3], for :func:`rlcompute.plots.write_png`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from matplotlib.axes import Axes

from rlcompute.compare.pictures import COLOURS, MODALITY_COLOURS, MODALITY_MARKERS, legend_below
from rlcompute.compare.strength_measures import Name, Signal, Tokens
from rlcompute.compare.strength_study import ALL_KINDS, Figure, StrengthStudy
from rlcompute.plots import Picture, new_figure, render

_SIGNALS: dict[Signal, tuple[str, str, str]] = {
    "strength": ("write strength β", COLOURS[0], "o"),
    "emb_attention": ("attention from <emb>", COLOURS[1], "s"),
    "received_attention": ("attention received", COLOURS[4], "D"),
}
_PANEL_INCHES = 5.5
_BAR = "bars: 95 % bootstrap intervals over inputs"


@dataclass(frozen=True)
class _Bars:
    """One series of a bar chart over kinds of inputs."""

    label: str
    colour: str
    hatch: str
    name: Name
    signal: Signal
    tokens: Tokens


def strength_and_attention(study: StrengthStudy) -> Picture:
    """β against attention (paper, Fig. 10): correlation over tokens, and level by kind of token."""
    figure = new_figure(2 * _PANEL_INCHES, 7.6)
    scopes: dict[Tokens, str] = {"all": "all tokens of an input", "visual": "visual tokens alone"}
    for place, (tokens, scope) in enumerate(scopes.items()):
        axes = figure.add_subplot(2, 2, place + 1)
        _draw_bars(axes, study, _correlations(tokens))
        axes.set_title(f"β against attention, {scope}", fontsize=10, fontweight="bold")
        axes.set_ylabel("correlation over an input's tokens")
        axes.axhline(0.0, color="#222222", linewidth=0.8)
    levels: dict[Signal, str] = {
        "strength": "",
        "emb_attention": " (sums to 1 in each input)",
    }
    for place, (signal, note) in enumerate(levels.items()):
        axes = figure.add_subplot(2, 2, place + 3)
        text = _Bars("text tokens", COLOURS[3], "", "mean", signal, "text")
        visual = _Bars("visual tokens", COLOURS[2], "///", "mean", signal, "visual")
        _draw_bars(axes, study, [text, visual])
        axes.set_title(_SIGNALS[signal][0] + note, fontsize=10, fontweight="bold")
        axes.set_ylabel("mean over tokens and layers")
    pairs = ", ".join(f"{a}→{b}" for a, b in study.pairs)
    figure.suptitle(
        f"Each layer with β is compared with the attention layer after it ({pairs}); <emb> itself left out; {_BAR}",
        fontsize=9,
    )
    return render(figure)


def _correlations(tokens: Tokens) -> list[_Bars]:
    signals: dict[Signal, str] = {"emb_attention": "", "received_attention": "///"}
    names: dict[Name, tuple[str, str]] = {
        "spearman": ("Spearman ρ", COLOURS[0]),
        "pearson": ("Pearson r", COLOURS[1]),
    }
    return [
        _Bars(f"{label}, {_SIGNALS[signal][0]}", colour, hatch, name, signal, tokens)
        for signal, hatch in signals.items()
        for name, (label, colour) in names.items()
    ]


def strength_by_layer(study: StrengthStudy) -> Picture:
    """Depth (paper, Fig. 13): mean β by kind of input, and how much β and attention vary over tokens."""
    figure = new_figure(2 * _PANEL_INCHES, 4.2)
    axes = figure.add_subplot(1, 2, 1)
    for kind in study.inputs:
        found = [study.find("mean", "strength", kind, "all", (layer,)) for layer in study.strength_layers]
        _draw_line(axes, study.strength_layers, found, kind, MODALITY_COLOURS[kind], MODALITY_MARKERS[kind])
    axes.set_title("write strength β by kind of input", fontsize=10, fontweight="bold")
    axes.set_ylabel("mean over tokens and value heads")
    axes.set_xlabel("layer (those with Gated DeltaNet)")
    spread = figure.add_subplot(1, 2, 2)
    for signal, (label, colour, marker) in _SIGNALS.items():
        layers = study.strength_layers if signal == "strength" else study.attention_layers
        found = [study.find("variation", signal, ALL_KINDS, "all", (layer,)) for layer in layers]
        _draw_line(spread, layers, found, label, colour, marker)
    spread.set_title("spread over the tokens of an input", fontsize=10, fontweight="bold")
    spread.set_ylabel("standard deviation / mean")
    spread.set_ylim(bottom=0.0)
    spread.set_xlabel("layer")
    for one in (axes, spread):
        one.grid(alpha=0.25)
        legend_below(one, _PANEL_INCHES)
    figure.suptitle(f"<emb> itself left out; {_BAR}", fontsize=9)
    return render(figure)


def strength_stability(study: StrengthStudy) -> Picture:
    """Likeness of a signal's maps over visual tokens, in two layers and on two frames (paper, Fig. 14).

    Beside the cosine stands the correlation, which does not call two flat maps alike
    (:class:`rlcompute.compare.strength_measures.Measure`).
    """
    figure = new_figure(2 * _PANEL_INCHES, 7.6)
    names: dict[Name, str] = {
        "layer_cosine": "two layers: cosine",
        "layer_correlation": "two layers: correlation",
        "frame_cosine": "two frames of a video: cosine",
        "frame_correlation": "two frames of a video: correlation",
    }
    for place, (name, title) in enumerate(names.items()):
        axes = figure.add_subplot(2, 2, place + 1)
        bars = [
            _Bars(label, colour, hatch, name, signal, "visual")
            for (signal, (label, colour, _)), hatch in zip(_SIGNALS.items(), ("", "///", "..."), strict=True)
        ]
        _draw_bars(axes, study, bars)
        axes.set_title(title, fontsize=10, fontweight="bold")
        axes.set_ylabel(
            "mean over pairs of " + ("layers" if name.startswith("layer") else "frames, and layers")
        )
        axes.axhline(0.0, color="#222222", linewidth=0.8)
        axes.set_ylim(top=1.0)
    figure.suptitle(f"A signal's own maps over visual tokens; {_BAR}", fontsize=9)
    return render(figure)


def _draw_bars(axes: Axes, study: StrengthStudy, series: Sequence[_Bars]) -> None:
    """Grouped bars, one group a kind of input that has any of the figures, with values written on them."""
    kinds = [
        kind
        for kind in study.inputs
        if any(_defined(study.find(x.name, x.signal, kind, x.tokens)) for x in series)
    ]
    width = 0.8 / len(series)
    for number, one in enumerate(series):
        for place, kind in enumerate(kinds):
            figure = study.find(one.name, one.signal, kind, one.tokens)
            if figure is None or figure.mean is None or figure.low is None or figure.high is None:
                continue
            x = place + (number - (len(series) - 1) / 2) * width
            errors = [[max(0.0, figure.mean - figure.low)], [max(0.0, figure.high - figure.mean)]]
            axes.bar(x, figure.mean, 0.9 * width, color=one.colour, hatch=one.hatch, edgecolor="white")
            axes.errorbar(x, figure.mean, yerr=errors, color="#222222", capsize=2, linewidth=1.0)
            axes.annotate(
                f"{figure.mean:.2f}" if abs(figure.mean) >= 0.1 else f"{figure.mean:.2g}",
                (x, max(0.0, figure.high)),
                xytext=(0, 2),
                textcoords="offset points",
                ha="center",
                fontsize=6.5,
            )
        axes.bar(0, 0, color=one.colour, hatch=one.hatch, edgecolor="white", label=one.label)
    axes.set_xticks(range(len(kinds)), [f"{kind}\n({study.inputs[kind]} inputs)" for kind in kinds])
    axes.set_xlim(-0.6, max(1, len(kinds)) - 0.4)
    axes.margins(y=0.12)
    axes.grid(alpha=0.25, axis="y")
    axes.set_axisbelow(True)
    legend_below(axes, _PANEL_INCHES)


def _draw_line(
    axes: Axes, layers: Sequence[int], found: Sequence[Figure | None], label: str, colour: str, marker: str
) -> None:
    mean, low, high = (
        np.array([np.nan if x is None or getattr(x, key) is None else getattr(x, key) for x in found])
        for key in ("mean", "low", "high")
    )
    axes.errorbar(
        layers,
        mean,
        yerr=[np.maximum(0.0, mean - low), np.maximum(0.0, high - mean)],
        label=label,
        color=colour,
        marker=marker,
        markersize=5,
        linewidth=1.3,
        elinewidth=1.0,
        capsize=3,
    )


def _defined(figure: Figure | None) -> bool:
    return figure is not None and figure.mean is not None
