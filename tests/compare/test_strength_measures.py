"""Measures of one input against scipy and loops over tokens, layers and frames."""

from __future__ import annotations

from itertools import combinations
from typing import Any

import numpy as np
import pytest
import scipy.stats
from hypothesis import given, settings
from hypothesis import strategies as st

from rlcompute.compare.strength_maps import InputMaps
from rlcompute.compare.strength_measures import Layers, Measure, measures
from rlcompute.pack import IMAGE, TEXT, VIDEO

LAYERS = Layers(strength=(0, 1, 2, 4), attention=(3, 5))
PAIRS = ((2, 3), (4, 5))
FRAMES = [[3, 4, 5, 6, 7, 8], [10, 11, 12, 13, 14, 15], [18, 19, 20, 21, 22, 23]]
"""Tokens of a video of three frames, with one or two timestamp tokens between."""


def video_maps(seed: int, levels: int | None = None) -> InputMaps:
    """Random maps; of few ``levels`` they are full of ties."""
    rng = np.random.default_rng(seed)
    modality = np.full(27, TEXT, dtype=np.int8)
    modality[np.concatenate(FRAMES)] = VIDEO

    def maps(count: int) -> np.ndarray:
        shape = (count, len(modality))
        return rng.random(shape) if levels is None else rng.integers(1, levels + 1, shape).astype(float)

    return InputMaps(modality, maps(4), maps(2), maps(2))


def naive_cosine(a: Any, b: Any) -> float:
    dot = sum(float(x) * float(y) for x, y in zip(a, b, strict=True))
    return dot / (sum(float(x) ** 2 for x in a) * sum(float(y) ** 2 for y in b)) ** 0.5


def by_layer(maps: InputMaps) -> dict[str, dict[int, np.ndarray]]:
    return {
        "strength": dict(zip(LAYERS.strength, maps.strength_BL, strict=True)),
        "emb_attention": dict(zip(LAYERS.attention, maps.emb_attention_AL, strict=True)),
        "received_attention": dict(zip(LAYERS.attention, maps.received_attention_AL, strict=True)),
    }


def scopes(maps: InputMaps) -> dict[str, list[int]]:
    text = [t for t, kind in enumerate(maps.modality_L) if kind == TEXT]
    visual = [t for t, kind in enumerate(maps.modality_L) if kind != TEXT]
    return {"all": list(range(len(maps.modality_L))), "text": text, "visual": visual}


def test_pairs_are_neighbours() -> None:
    assert LAYERS.pairs == PAIRS
    assert Layers(strength=(1, 2), attention=(0,)).pairs == ()


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 2**31), levels=st.sampled_from([None, 3, 10]))
def test_correlations_equal_scipy(seed: int, levels: int | None) -> None:
    maps = video_maps(seed, levels)
    found, layered = measures(maps, LAYERS), by_layer(maps)
    for tokens, own in scopes(maps).items():
        for signal in ("emb_attention", "received_attention"):
            for name, oracle in (("pearson", scipy.stats.pearsonr), ("spearman", scipy.stats.spearmanr)):
                expected = [
                    oracle(layered["strength"][a][own], layered[signal][b][own]).statistic for a, b in PAIRS
                ]
                got = [found[Measure(name, signal, tokens, pair)] for pair in PAIRS]
                assert got == pytest.approx(expected, abs=1e-9)
                mean = found[Measure(name, signal, tokens)]
                assert mean == pytest.approx(np.mean(expected), abs=1e-9)


def test_levels_and_spread_equal_loops_over_tokens() -> None:
    maps = video_maps(1)
    found = measures(maps, LAYERS)
    for tokens, own in scopes(maps).items():
        for signal, layers in by_layer(maps).items():
            means = {layer: sum(float(x[t]) for t in own) / len(own) for layer, x in layers.items()}
            for layer, x in layers.items():
                variance = sum((float(x[t]) - means[layer]) ** 2 for t in own) / len(own)
                at: Any = (signal, tokens, (layer,))
                assert found[Measure("mean", *at)] == pytest.approx(means[layer])
                assert found[Measure("variation", *at)] == pytest.approx(variance**0.5 / means[layer])
            mean: Any = Measure("mean", signal, tokens)
            assert found[mean] == pytest.approx(np.mean(list(means.values())))


def test_likeness_across_layers_equals_loops() -> None:
    maps = video_maps(2)
    found, own = measures(maps, LAYERS), scopes(maps)["visual"]
    for signal, layers in by_layer(maps).items():
        cosines = []
        for a, b in combinations(layers, 2):
            x, y = layers[a][own], layers[b][own]
            at: Any = (signal, "visual", (a, b))
            cosines.append(naive_cosine(x, y))
            assert found[Measure("layer_cosine", *at)] == pytest.approx(cosines[-1])
            assert found[Measure("layer_correlation", *at)] == pytest.approx(
                scipy.stats.pearsonr(x, y).statistic
            )
        mean: Any = Measure("layer_cosine", signal, "visual")
        assert found[mean] == pytest.approx(np.mean(cosines))


def test_likeness_across_frames_equals_loops() -> None:
    maps = video_maps(3)
    found = measures(maps, LAYERS)
    for signal, layers in by_layer(maps).items():
        for layer, x in layers.items():
            pairs = [(x[a], x[b]) for a, b in combinations(FRAMES, 2)]
            at: Any = (signal, "visual", (layer,))
            assert found[Measure("frame_cosine", *at)] == pytest.approx(
                np.mean([naive_cosine(a, b) for a, b in pairs])
            )
            assert found[Measure("frame_correlation", *at)] == pytest.approx(
                np.mean([scipy.stats.pearsonr(a, b).statistic for a, b in pairs])
            )


def test_contrasts_are_differences_of_means_over_layers() -> None:
    found = measures(video_maps(4), LAYERS)
    for name in ("variation", "layer_cosine", "layer_correlation", "frame_cosine", "frame_correlation"):
        for signal in ("emb_attention", "received_attention"):
            own, other, gap = (
                found[Measure(name, x, "visual")] for x in ("strength", signal, f"strength - {signal}")
            )
            assert gap == pytest.approx(own - other)


def test_cosine_calls_flat_maps_alike_and_correlation_does_not() -> None:
    rng = np.random.default_rng(5)
    modality = np.full(4000, IMAGE, dtype=np.int8)
    flat = 1.0 + 0.2 * rng.standard_normal((4, len(modality)))
    found = measures(InputMaps(modality, flat, flat[:2], flat[:2]), LAYERS)
    assert found[Measure("layer_cosine", "strength", "visual")] == pytest.approx(1 / 1.04, abs=2e-3)
    assert abs(found[Measure("layer_correlation", "strength", "visual")]) < 0.03


def test_an_image_has_no_frames_and_a_text_nothing_visual() -> None:
    maps = video_maps(6)
    image = np.where(maps.modality_L == VIDEO, IMAGE, TEXT).astype(np.int8)
    of_image = measures(InputMaps(image, *list(vars(maps).values())[1:]), LAYERS)
    assert not any(measure.name.startswith("frame") for measure in of_image)
    assert Measure("layer_cosine", "strength", "visual") in of_image
    of_text = measures(InputMaps(np.full_like(image, TEXT), *list(vars(maps).values())[1:]), LAYERS)
    assert {measure.tokens for measure in of_text} == {"all", "text"}


def test_constant_maps_and_too_few_tokens_have_no_correlation() -> None:
    maps = video_maps(7)
    # A constant map as float32 sums leave it: with noise in the last bit, which must not look like an order.
    noise = 1e-8 * np.random.default_rng(7).standard_normal(27)
    maps.strength_BL[2] = 0.5 + noise
    found = measures(maps, LAYERS)
    for name in ("pearson", "spearman"):
        assert np.isnan(found[Measure(name, "emb_attention", "all", (2, 3))])
        defined = found[Measure(name, "emb_attention", "all", (4, 5))]
        assert found[Measure(name, "emb_attention", "all")] == defined
    assert found[Measure("variation", "strength", "all", (2,))] == pytest.approx(0.0, abs=1e-6)
    assert np.isnan(found[Measure("layer_correlation", "strength", "visual", (1, 2))])
    few = InputMaps(*(x[..., :4] for x in vars(maps).values()))
    assert np.isnan(measures(few, LAYERS)[Measure("pearson", "emb_attention", "all", (4, 5))])
