"""What is measured of one input's maps: level and spread over tokens, agreement of β with attention, likeness of maps.

Shape legend: L tokens of one input, n those of one kind, K maps, P pairs of layers, F frames of a video, m tokens of
a frame.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations
from typing import Literal, NamedTuple, get_args

import numpy as np

from rlcompute.compare.strength_maps import FloatArray, InputMaps
from rlcompute.pack import TEXT, VIDEO

Name = Literal[
    "mean",
    "variation",
    "spearman",
    "pearson",
    "layer_cosine",
    "layer_correlation",
    "frame_cosine",
    "frame_correlation",
]
Signal = Literal[
    "strength",
    "emb_attention",
    "received_attention",
    "strength - emb_attention",
    "strength - received_attention",
]
Tokens = Literal["all", "text", "visual"]
CONTRASTED: tuple[Name, ...] = (
    "variation",
    "layer_cosine",
    "layer_correlation",
    "frame_cosine",
    "frame_correlation",
)
_FEWEST = 5
"""Tokens below which a correlation is left undefined: of two it is 1 or -1 whatever they are."""
_CONSTANT = 1e-6
"""A map whose deviations are smaller than this, relative to its values, is constant: float32 sums differ by as much."""


class Measure(NamedTuple):
    """One number of an input.

    Attributes:
        name: ``mean`` over tokens; ``variation``, their standard deviation divided by the mean; ``spearman`` and
            ``pearson``, correlation over tokens of β with ``signal``; ``layer_cosine`` and ``layer_correlation``,
            between a signal's maps in two layers; ``frame_cosine`` and ``frame_correlation``, between its maps on two
            frames of a video in one layer, mean over the pairs of frames. A cosine of positive maps is near 1 if they
            are flat, whatever they show: with variation v in both and nothing in common it is 1 / (1 + v²). The
            correlation, which is the cosine without the maps' means, is not.
        signal: the map; ``a - b`` is the difference of the measures of the two.
        tokens: over which tokens of the input; never over its ``<emb>``.
        layers: one or two; none for the mean over all layers or pairs of layers.
    """

    name: Name
    signal: Signal
    tokens: Tokens
    layers: tuple[int, ...] = ()


class Layers(NamedTuple):
    """Layers with Gated DeltaNet, layers with attention, and pairs of one directly before the other."""

    strength: tuple[int, ...]
    attention: tuple[int, ...]

    @property
    def pairs(self) -> tuple[tuple[int, int], ...]:
        return tuple((layer, layer + 1) for layer in self.strength if layer + 1 in self.attention)


def measures(maps: InputMaps, layers: Layers) -> dict[Measure, float]:
    """Everything measured of one input; NaN where it is undefined: a constant map, too few tokens."""
    found: dict[Measure, float] = {}
    signals: tuple[tuple[Signal, FloatArray, Sequence[int]], ...] = (
        ("strength", maps.strength_BL, layers.strength),
        ("emb_attention", maps.emb_attention_AL, layers.attention),
        ("received_attention", maps.received_attention_AL, layers.attention),
    )
    for tokens in get_args(Tokens):
        own_L = _selected(maps, tokens)
        if not own_L.any():
            continue
        for signal, map_KL, numbers in signals:
            found |= _levels(map_KL[:, own_L], signal, tokens, numbers)
            if signal != "strength":
                found |= _agreements(maps.strength_BL[:, own_L], map_KL[:, own_L], signal, tokens, layers)
    visual_L = maps.modality_L != TEXT
    for signal, map_KL, numbers in signals:
        if visual_L.any():
            found |= _across_layers(map_KL[:, visual_L], signal, numbers)
        frames_KFm = _frames(map_KL, maps.modality_L)
        if frames_KFm is not None:
            found |= _across_frames(frames_KFm, signal, numbers)
    return found | dict(_contrasts(found))


def _selected(maps: InputMaps, tokens: Tokens) -> np.ndarray:
    text_L = maps.modality_L == TEXT
    return {"all": np.ones_like(text_L), "text": text_L, "visual": ~text_L}[tokens]


def _levels(
    map_Kn: FloatArray, signal: Signal, tokens: Tokens, layers: Sequence[int]
) -> dict[Measure, float]:
    mean_K = map_Kn.mean(1)
    with np.errstate(invalid="ignore", divide="ignore"):
        variation_K = map_Kn.std(1) / mean_K if map_Kn.shape[1] > 1 else np.full_like(mean_K, np.nan)
    places = [(layer,) for layer in layers]
    return _by_place("mean", signal, tokens, places, mean_K) | _by_place(
        "variation", signal, tokens, places, variation_K
    )


def _agreements(
    strength_Bn: FloatArray, attention_An: FloatArray, signal: Signal, tokens: Tokens, layers: Layers
) -> dict[Measure, float]:
    ours_Pn = strength_Bn[[layers.strength.index(a) for a, _ in layers.pairs]]
    theirs_Pn = attention_An[[layers.attention.index(b) for _, b in layers.pairs]]
    pearson_P = (_standardised(ours_Pn) * _standardised(theirs_Pn)).sum(1)
    spearman_P = (_standardised(_ranks(ours_Pn)) * _standardised(_ranks(theirs_Pn))).sum(1)
    spearman_P[np.isnan(pearson_P)] = np.nan
    return _by_place("pearson", signal, tokens, layers.pairs, pearson_P) | _by_place(
        "spearman", signal, tokens, layers.pairs, spearman_P
    )


def _across_layers(map_Kn: FloatArray, signal: Signal, layers: Sequence[int]) -> dict[Measure, float]:
    pairs = list(combinations(layers, 2))
    rows, columns = np.triu_indices(len(layers), k=1)  # the same pairs, as places
    cosine_KK, correlation_KK = _products(_unit(map_Kn)), _products(_standardised(map_Kn))
    return _by_place("layer_cosine", signal, "visual", pairs, cosine_KK[rows, columns]) | _by_place(
        "layer_correlation", signal, "visual", pairs, correlation_KK[rows, columns]
    )


def _across_frames(frames_KFm: FloatArray, signal: Signal, layers: Sequence[int]) -> dict[Measure, float]:
    rows, columns = np.triu_indices(frames_KFm.shape[1], k=1)
    cosine_K = _products(_unit(frames_KFm))[:, rows, columns].mean(1)
    correlation_K = _products(_standardised(frames_KFm))[:, rows, columns].mean(1)
    places = [(layer,) for layer in layers]
    return _by_place("frame_cosine", signal, "visual", places, cosine_K) | _by_place(
        "frame_correlation", signal, "visual", places, correlation_K
    )


def _frames(map_KL: FloatArray, modality_L: np.ndarray) -> FloatArray | None:
    """The video's tokens frame by frame, [K,F,m]: runs of them, between which stand timestamps; None below two."""
    tokens = np.flatnonzero(modality_L == VIDEO)
    frames = np.split(tokens, np.flatnonzero(np.diff(tokens) > 1) + 1)
    return map_KL[:, np.stack(frames)] if len(frames) > 1 else None


def _contrasts(found: Mapping[Measure, float]) -> Iterator[tuple[Measure, float]]:
    """β's measure minus that of attention, both as means over layers."""
    for measure, value in found.items():
        if measure.name in CONTRASTED and measure.signal == "strength" and not measure.layers:
            emb, received = (
                measure._replace(signal="emb_attention"),
                measure._replace(signal="received_attention"),
            )
            if emb in found:
                yield measure._replace(signal="strength - emb_attention"), value - found[emb]
                yield measure._replace(signal="strength - received_attention"), value - found[received]


def _by_place(
    name: Name, signal: Signal, tokens: Tokens, places: Sequence[tuple[int, ...]], values: FloatArray
) -> dict[Measure, float]:
    """One measure a place and their mean, over the places where it is defined."""
    if not places:
        return {}
    defined = values[np.isfinite(values)]
    values = np.where(np.isfinite(values), values, np.nan)
    found = {Measure(name, signal, tokens, place): float(x) for place, x in zip(places, values, strict=True)}
    return found | {Measure(name, signal, tokens): float(defined.mean()) if len(defined) else np.nan}


def _unit(maps: FloatArray) -> FloatArray:
    """Maps along the last axis divided by their norm; NaN where that is 0."""
    norm = np.linalg.norm(maps, axis=-1, keepdims=True)
    return np.divide(maps, norm, out=np.full_like(maps, np.nan), where=norm > 0)


def _standardised(maps: FloatArray) -> FloatArray:
    """Maps along the last axis without their mean, divided by their norm; NaN where they are constant or too short."""
    if maps.shape[-1] < _FEWEST:
        return np.full_like(maps, np.nan)
    centred = maps - maps.mean(-1, keepdims=True)
    norm = np.linalg.norm(centred, axis=-1, keepdims=True)
    varies = norm > _CONSTANT * np.linalg.norm(maps, axis=-1, keepdims=True)
    return np.divide(centred, norm, out=np.full_like(centred, np.nan), where=varies)


def _products(maps: FloatArray) -> FloatArray:
    """Scalar products of all pairs of maps along the last axis."""
    return maps @ np.swapaxes(maps, -1, -2)


def _ranks(maps_Kn: FloatArray) -> FloatArray:
    """Ranks along the last axis, from 1; equal values share the mean of theirs."""
    ranks_Kn = np.empty_like(maps_Kn)
    for row, map_n in enumerate(maps_Kn):
        _, place_n, counts = np.unique(map_n, return_inverse=True, return_counts=True)
        ranks_Kn[row] = (counts.cumsum() - (counts - 1) / 2)[place_n]
    return ranks_Kn
