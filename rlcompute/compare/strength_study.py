"""What β, the write strength of Gated DeltaNet, says of a token, and whether attention says the same.

The paper prunes by β because no fast kernel yields an attention map. This study measures, under full compute and by
kind of input, how large and how varied both are, layer by layer; how they agree; and how stable each is across layers
and across the frames of a video. All figures are means over inputs of what is measured within one input
(:mod:`rlcompute.compare.strength_measures`): lengths and scales of different inputs never mix.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

import numpy as np

from rlcompute.backbones.base import Backbone
from rlcompute.compare.strength_maps import InputMaps, input_maps, mixer_layers
from rlcompute.compare.strength_measures import Layers, Measure, Name, Signal, Tokens, measures
from rlcompute.data.schema import MODALITIES
from rlcompute.errors import ConfigError, DataError
from rlcompute.metrics import bootstrap_interval
from rlcompute.pack import TEXT, VIDEO, EmbeddedInput
from rlcompute.progress import ProgressReporter

ALL_KINDS = "mean"
"""The kind of figures that are means over the kinds of inputs, each kind alike."""
_RESAMPLES = 1000
_SEED = 0


@dataclass(frozen=True)
class Figure:
    """A measure's mean over the inputs of one kind for which it is defined.

    Attributes:
        name, signal, tokens, layers: see :class:`rlcompute.compare.strength_measures.Measure`.
        kind: ``text`` for inputs without visual tokens, otherwise the pair's modality, or :data:`ALL_KINDS`.
        mean: None if the measure is defined for no input.
        low, high: 95 % bootstrap interval over inputs.
        inputs: how many there are.
    """

    name: Name
    signal: Signal
    tokens: Tokens
    layers: tuple[int, ...]
    kind: str
    mean: float | None
    low: float | None
    high: float | None
    inputs: int


@dataclass(frozen=True)
class StrengthStudy:
    """All figures of one backbone on one sample.

    Attributes:
        backbone_hash: of the backbone.
        strength_layers, attention_layers: layers with Gated DeltaNet, and with attention.
        inputs: number of inputs by kind.
        figures: all of them; :meth:`find` looks one up.
    """

    backbone_hash: str
    strength_layers: tuple[int, ...]
    attention_layers: tuple[int, ...]
    inputs: dict[str, int]
    figures: tuple[Figure, ...]

    @cached_property
    def _by_key(self) -> dict[tuple[Measure, str], Figure]:
        return {(Measure(x.name, x.signal, x.tokens, x.layers), x.kind): x for x in self.figures}

    @property
    def pairs(self) -> tuple[tuple[int, int], ...]:
        """Pairs of a layer with Gated DeltaNet and the attention layer that follows it directly."""
        return Layers(self.strength_layers, self.attention_layers).pairs

    def find(
        self, name: Name, signal: Signal, kind: str, tokens: Tokens, layers: tuple[int, ...] = ()
    ) -> Figure | None:
        """One figure; None if no input of the sample has such tokens, or no layer such a map."""
        return self._by_key.get((Measure(name, signal, tokens, layers), kind))

    @property
    def values(self) -> dict[str, Any]:
        """JSON values; :meth:`from_values` reads them."""
        return asdict(self)

    @classmethod
    def from_values(cls, values: Mapping[str, Any]) -> StrengthStudy:
        """The study that :attr:`values` were taken from, before or after a way through JSON."""
        return cls(
            backbone_hash=values["backbone_hash"],
            strength_layers=tuple(values["strength_layers"]),
            attention_layers=tuple(values["attention_layers"]),
            inputs=values["inputs"],
            figures=tuple(Figure(**{**x, "layers": tuple(x["layers"])}) for x in values["figures"]),
        )


def study(
    backbone: Backbone, inputs: Sequence[EmbeddedInput], groups: Sequence[str], *, batch_size: int = 32
) -> StrengthStudy:
    """Measures β and attention on all inputs, in one pass of full compute.

    Args:
        backbone: the frozen model.
        inputs: what to embed, both sides of pairs.
        groups: the modality of the pair that each input belongs to.
        batch_size: inputs of one pack.

    Raises:
        ConfigError: the backbone has no Gated DeltaNet.
        DataError: no inputs, another number of groups than of inputs, or an unknown group.
    """
    layers = Layers(*mixer_layers(backbone))
    if not layers.strength:
        raise ConfigError(
            f"{backbone.path} ({backbone.family}): no layer has Gated DeltaNet, so there is no write strength β"
        )
    if len(inputs) != len(groups) or not inputs or not set(groups) <= set(MODALITIES):
        raise DataError(
            f"{len(inputs)} inputs and {len(groups)} groups, named {sorted(set(groups))}: the study needs inputs, and "
            f"for each of them one of {', '.join(MODALITIES)}"
        )
    found: dict[str, list[dict[Measure, float]]] = {}
    with ProgressReporter("write strength", len(inputs), unit="input") as progress:
        for start in range(0, len(inputs), batch_size):
            batch = input_maps(backbone, inputs[start : start + batch_size])
            for maps, group in zip(batch, groups[start:], strict=False):
                found.setdefault(_kind(maps, group), []).append(measures(maps, layers))
            progress.advance(len(batch))
    kinds = [kind for kind in MODALITIES if kind in found]
    return StrengthStudy(
        backbone_hash=backbone.hash,
        strength_layers=layers.strength,
        attention_layers=layers.attention,
        inputs={kind: len(found[kind]) for kind in kinds},
        figures=_figures({kind: found[kind] for kind in kinds}),
    )


def _kind(maps: InputMaps, group: str) -> str:
    if (maps.modality_L == TEXT).all():
        return "text"
    if group != "text":
        return group
    return "video" if (maps.modality_L == VIDEO).any() else "image"


def _figures(found: dict[str, list[dict[Measure, float]]]) -> tuple[Figure, ...]:
    """Means and intervals by kind, and over kinds."""
    values: dict[Measure, dict[str, list[float]]] = {}
    for kind, inputs in found.items():
        for one in inputs:
            for measure, value in one.items():
                values.setdefault(measure, {}).setdefault(kind, []).append(value)
    figures = []
    for measure, by_kind in values.items():
        defined = {kind: np.array(x)[np.isfinite(x)] for kind, x in by_kind.items()}
        for kind, one_n in defined.items():
            figures.append(_figure(measure, kind, [one_n]))
        figures.append(_figure(measure, ALL_KINDS, list(defined.values())))
    return tuple(figures)


def _figure(measure: Measure, kind: str, values: Sequence[np.ndarray]) -> Figure:
    """Mean over kinds of the means over inputs; kinds for which nothing is defined are left out."""
    values = [x for x in values if len(x)]
    inputs = sum(len(x) for x in values)
    if not values:
        return Figure(*measure, kind, None, None, None, 0)
    mean = float(np.mean([x.mean() for x in values]))
    return Figure(*measure, kind, mean, *bootstrap_interval(values, _RESAMPLES, _SEED), inputs)
