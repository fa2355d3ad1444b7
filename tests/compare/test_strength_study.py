"""The study: means over inputs of a kind, independence of the packs, its file, and bad input."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rlcompute.backbones import load_backbone
from rlcompute.backbones.base import Backbone
from rlcompute.compare import strength_study
from rlcompute.compare.strength_maps import InputMaps, input_maps
from rlcompute.compare.strength_measures import Layers, Measure, measures
from rlcompute.compare.strength_study import ALL_KINDS, StrengthStudy, study
from rlcompute.errors import ConfigError, DataError
from rlcompute.pack import EmbeddedInput
from tests.inputs import every_modality
from tests.tiny import write_tiny_checkpoint

GROUPS = ["visdoc", "image", "visdoc", "video", "text", "image"]
"""Pair modalities of ``every_modality``: text, image, page, video, two images with a video, text."""
KINDS = ["text", "image", "visdoc", "video", "video", "text"]
"""An input without visual tokens is text, whatever its pair; a pair of texts with a video in it is video."""


@pytest.fixture(scope="module")
def backbone(tmp_path_factory: pytest.TempPathFactory) -> Backbone:
    return load_backbone(write_tiny_checkpoint(tmp_path_factory.mktemp("tiny")))


@pytest.fixture(scope="module")
def inputs(backbone: Backbone) -> list[EmbeddedInput]:
    return backbone.embed_inputs(every_modality(backbone.preprocessor))


@pytest.fixture(scope="module")
def found(backbone: Backbone, inputs: list[EmbeddedInput]) -> StrengthStudy:
    return study(backbone, inputs, GROUPS, batch_size=4)


def test_figures_are_means_over_the_inputs_of_a_kind(
    backbone: Backbone, inputs: list[EmbeddedInput], found: StrengthStudy
) -> None:
    assert found.inputs == {"image": 1, "video": 2, "visdoc": 1, "text": 2}
    assert found.pairs == ((0, 1), (2, 3))
    layers = Layers(found.strength_layers, found.attention_layers)
    packs = (inputs[:4], inputs[4:])  # as the study has them: a rounding may swap two ranks
    alone = [measures(maps, layers) for pack in packs for maps in input_maps(backbone, pack)]
    for figure in found.figures:
        measure = Measure(figure.name, figure.signal, figure.tokens, figure.layers)
        means = []
        for kind in found.inputs:
            values = [
                one[measure] for one, own in zip(alone, KINDS, strict=True) if own == kind and measure in one
            ]
            values = [value for value in values if np.isfinite(value)]
            if values and figure.kind in (kind, ALL_KINDS):
                means.append(float(np.mean(values)))
        if not means:
            assert figure.mean is figure.low is figure.high is None
        else:
            assert figure.mean == pytest.approx(float(np.mean(means)), abs=1e-9)
            assert figure.low is not None
            assert figure.high is not None
            assert figure.low - 1e-9 <= figure.mean <= figure.high + 1e-9
        assert found.find(figure.name, figure.signal, figure.kind, figure.tokens, figure.layers) == figure


def test_what_is_there_and_what_is_not(found: StrengthStudy) -> None:
    spearman = found.find("spearman", "emb_attention", ALL_KINDS, "all")
    assert spearman is not None
    assert spearman.mean is not None
    assert -1.0 <= spearman.mean <= 1.0
    assert found.find("frame_cosine", "strength", "video", "visual") is not None
    assert found.find("frame_cosine", "strength", "image", "visual") is None
    assert found.find("mean", "strength", "text", "visual") is None
    assert found.find("mean", "strength", "image", "all", (1,)) is None  # an attention layer


def test_a_study_survives_json(found: StrengthStudy) -> None:
    assert StrengthStudy.from_values(json.loads(json.dumps(found.values))) == found


def test_constant_maps_are_none_in_json(
    backbone: Backbone, inputs: list[EmbeddedInput], monkeypatch: pytest.MonkeyPatch
) -> None:
    def flat(backbone: Backbone, inputs: list[EmbeddedInput]) -> list[InputMaps]:
        return [
            InputMaps(x.modality_L, *(np.ones_like(y) for y in list(vars(x).values())[1:]))
            for x in original(backbone, inputs)
        ]

    original = input_maps
    monkeypatch.setattr(strength_study, "input_maps", flat)
    constant = study(backbone, inputs, GROUPS)
    figure = constant.find("pearson", "emb_attention", "image", "all")
    assert figure is not None
    assert figure.mean is None
    assert figure.inputs == 0
    json.dumps(constant.values, allow_nan=False)
    assert any(x["mean"] is None for x in constant.values["figures"])


@pytest.mark.parametrize(
    ("count", "groups"), [(0, []), (2, ["image"]), (1, ["pictures"])], ids=["none", "too few", "unknown"]
)
def test_inputs_without_a_group_are_refused(
    count: int, groups: list[str], backbone: Backbone, inputs: list[EmbeddedInput]
) -> None:
    with pytest.raises(DataError, match="the study needs inputs"):
        study(backbone, inputs[:count], groups)


def test_a_backbone_without_delta_rule_is_refused(tmp_path: Path) -> None:
    torch.manual_seed(0)
    backbone: Any = load_backbone(write_tiny_checkpoint(tmp_path, ("full_attention", "full_attention")))
    inputs = backbone.embed_inputs(every_modality(backbone.preprocessor)[:1])
    with pytest.raises(ConfigError, match="no layer has Gated DeltaNet"):
        study(backbone, inputs, ["text"])


def test_a_backbone_without_attention_has_strength_alone(tmp_path: Path) -> None:
    backbone: Any = load_backbone(write_tiny_checkpoint(tmp_path, ("linear_attention", "linear_attention")))
    inputs = backbone.embed_inputs(every_modality(backbone.preprocessor)[:2])
    found = study(backbone, inputs, ["text", "image"])
    assert {figure.signal for figure in found.figures} == {"strength"}
    assert found.pairs == ()
