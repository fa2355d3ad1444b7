"""The held-out inputs and what is measured on them: accuracy and FLOPs, the saving of a setting, and the clock.

Everything is read and embedded when it is first needed, and then kept: a comparison whose points are all in the cache
loads neither data nor inputs.

Shape legend: P pairs of one modality, G modalities, N layers, S inputs (all queries, then all targets), H strata (a
side of a modality each), B packs, R rounds.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from rlcompute.backbones.base import Backbone
from rlcompute.compare.contenders import Prepared
from rlcompute.compare.points import FULL, Point, Speed
from rlcompute.compare.strength_study import StrengthStudy, study
from rlcompute.config import Config
from rlcompute.data.schema import Pair
from rlcompute.decision import Full
from rlcompute.encoder import encode
from rlcompute.flops import FlopModel
from rlcompute.held_out import items_of, ranks_by_modality, read_sample, timing_items
from rlcompute.pack import EmbeddedInput
from rlcompute.passes import Contender, InputBatches, Item, Timed, clock_batches, clock_rounds, measure
from rlcompute.preprocess import ModelInput
from rlcompute.progress import ProgressReporter

SOLVER_INPUTS = 96
"""Inputs on which knobs are solved, spread over modalities, sides and lengths."""
ROUNDS = 6
"""Timed rounds of a policy against full compute."""
STUDY_PAIRS = 48
"""Pairs of each modality in whose tokens write strength is held against attention."""
UNPRUNED = ""
"""Name of the inputs that the unpruned backbone embeds."""

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]


class Inputs:
    """What one vision tower and token embedding makes of the held-out pairs, embedded at once.

    Attributes:
        batches: packs of all inputs.
        lengths_S: tokens of each, int64.
    """

    def __init__(
        self, backbone: Backbone, items: Sequence[Item], timing: Sequence[Item], batch_size: int
    ) -> None:
        self._backbone, self._timing, self._batch_size = backbone, timing, batch_size
        self.batches = InputBatches(backbone, items, batch_size)
        lengths = []
        with ProgressReporter("embedding the held-out inputs", len(self.batches), unit="input") as progress:
            for names, inputs in self.batches:
                lengths += [x.length for x in inputs]
                progress.advance(len(names))
        self.lengths_S = np.array(lengths)

    @cached_property
    def timed(self) -> list[tuple[list[str], list[ModelInput]]]:
        """Packs for the clock."""
        return clock_batches(self._backbone, self._timing, self._batch_size)

    def take(self, index: IntArray) -> list[tuple[str, EmbeddedInput]]:
        """Name and embedded input of some places, in their order."""
        wanted = set(index.tolist())
        pairs = (pair for names, inputs in self.batches for pair in zip(names, inputs, strict=True))
        found = {place: pair for place, pair in enumerate(pairs) if place in wanted}
        return [found[place] for place in index.tolist()]


class Suite:
    """Held-out inputs of one configuration. Policies that read the same embedded inputs share them."""

    def __init__(self, config: Config, backbone: Backbone) -> None:
        """Args:
        config: of the comparison.
        backbone: the unpruned one, whose full compute is the reference.
        """
        self._config, self._backbone = config, backbone
        self._inputs: dict[str, Inputs] = {}
        self._subsets: dict[str, list[tuple[str, EmbeddedInput]]] = {}

    @cached_property
    def pairs(self) -> dict[str, list[Pair]]:
        """By modality.

        Raises:
            DataError: ``data.test`` cannot be used, or has no pairs.
        """
        return read_sample(self._config)

    def inputs(self, source: str, backbone: Backbone) -> Inputs:
        """The inputs of that name, which ``backbone`` embeds if it is the first to ask."""
        if source not in self._inputs:
            items = items_of([pair for group in self.pairs.values() for pair in group])
            timing = timing_items(self._config, self.pairs)
            self._inputs[source] = Inputs(backbone, items, timing, self._config.evaluation.batch_size)
        return self._inputs[source]

    def point(
        self, resolved: str, prepared: Prepared, source: str, speed: Speed, full: Point | None
    ) -> Point:
        """Measures one policy on all inputs.

        Args:
            resolved: the policy as text.
            prepared: what runs.
            source: name of the inputs that it reads.
            speed: of the policy, from :meth:`speed`.
            full: full compute; None if that is what runs.
        """
        inputs = self.inputs(source, prepared.backbone)
        facts, by_name = measure(prepared.backbone, inputs.batches, [prepared.contender], None)
        (measured,) = by_name.values()
        executed_G, logical_G, hardware_G, vision_G = (
            self._by_modality(values_S)
            for values_S in (
                *(measured.executed_S, measured.logical_S, measured.hardware_S),
                facts.vision_flops_S.numpy(),
            )
        )
        counts = {
            f"{name}_NG": self._by_modality(getattr(measured.trace, f"{name}_NS").numpy())
            for name in ("entered", "decided", "survived", "rows", "bypassed")
        }
        return Point(
            spec=resolved,
            resolved=resolved,
            budget=None,
            knob=None,
            top_k=prepared.backbone.top_k,
            num_experts=prepared.backbone.num_experts,
            ranks=ranks_by_modality(measured.embeddings_Sd, self.pairs, self._config.evaluation.gallery),
            executed_G=executed_G,
            logical_G=logical_G,
            hardware_G=hardware_G,
            full_executed_G=executed_G if full is None else full.executed_G,
            full_logical_G=logical_G if full is None else full.logical_G,
            full_hardware_G=hardware_G if full is None else full.hardware_G,
            vision_G=vision_G,
            full_vision_G=vision_G if full is None else full.vision_G,
            **counts,
            speedup=speed.speedup,
            speedup_low=speed.speedup_low,
            speedup_high=speed.speedup_high,
            inputs_per_second=speed.inputs_per_second,
            method=None,
        )

    def study(self) -> StrengthStudy | None:
        """Write strength against attention on both sides of the first pairs of each modality.

        None if the backbone does not have both kinds of layer.
        """
        kinds = {layer.is_attention for layer in self._backbone.layers}
        if kinds != {False, True}:
            return None
        sample = {modality: group[:STUDY_PAIRS] for modality, group in self.pairs.items()}
        size = self._config.evaluation.batch_size
        items = items_of([pair for group in sample.values() for pair in group])
        inputs = [one for _, batch in InputBatches(self._backbone, items, size) for one in batch]
        groups = [modality for modality, group in sample.items() for _ in group] * 2
        return study(self._backbone, inputs, groups, batch_size=size)

    def saving(self, prepared: Prepared, source: str) -> float:
        """Share of the language model's executed FLOPs that a policy saves over all inputs, from a sample of them.

        In every stratum the sample's ratio of executed to full FLOPs stands for that of all its inputs.
        """
        flops, size = FlopModel(prepared.backbone), self._config.evaluation.batch_size
        subset, executed = self._subset(source, prepared.backbone), []
        for start in range(0, len(subset), size):
            names, inputs = zip(*subset[start : start + size], strict=True)
            policy = prepared.contender.make(names)
            encoded = encode(prepared.backbone, *prepared.backbone.pack(inputs), policy)
            executed.append(flops.executed(encoded.trace, policy.gate_flops_per_token).numpy())
        index = self._subset_index
        strata, count = self._strata_S, self._strata_S.max() + 1
        executed_H = np.bincount(strata[index], np.concatenate(executed), count)
        sampled_H = np.bincount(strata[index], self._full_S[index], count)
        full_H = np.bincount(strata, self._full_S, count)
        return 1.0 - float((full_H * executed_H / sampled_H).sum() / full_H.sum())

    def speed(self, prepared: Prepared, source: str) -> Speed:
        """Times a policy and full compute side by side; full compute itself alone."""
        own = Timed(prepared.backbone, prepared.contender, self.inputs(source, prepared.backbone).timed)
        variants, names = [own], [name for names, _ in own.batches for name in names]
        if prepared.contender.name != FULL:
            reference = self.inputs(UNPRUNED, self._backbone).timed
            variants.append(Timed(self._backbone, Contender(FULL, lambda names: Full()), reference))
        seconds_R = clock_rounds(variants, ROUNDS).sum(axis=1)
        ratios_R = seconds_R[-1] / seconds_R[0]
        return Speed(
            inputs_per_second=len(names) / float(np.median(seconds_R[0])),
            speedup=float(np.median(ratios_R)),
            speedup_low=float(ratios_R.min()),
            speedup_high=float(ratios_R.max()),
        )

    @cached_property
    def _full_S(self) -> FloatArray:
        """Full compute's FLOPs of each input."""
        lengths_S = torch.from_numpy(self.inputs(UNPRUNED, self._backbone).lengths_S)
        full_S: FloatArray = FlopModel(self._backbone).full(lengths_S).numpy()
        return full_S

    @cached_property
    def _modality_S(self) -> IntArray:
        one_side = np.repeat(np.arange(len(self.pairs)), [len(group) for group in self.pairs.values()])
        return np.tile(one_side, 2)

    @cached_property
    def _strata_S(self) -> IntArray:
        is_target_S = np.arange(len(self._modality_S)) >= len(self._modality_S) // 2
        return self._modality_S + len(self.pairs) * is_target_S

    @cached_property
    def _subset_index(self) -> IntArray:
        """Of every stratum the same number of inputs, evenly spread over its lengths."""
        count = self._strata_S.max() + 1
        places = []
        for stratum in range(count):
            members = np.flatnonzero(self._strata_S == stratum)
            members = members[np.argsort(self._full_S[members], kind="stable")]
            share = min(len(members), max(1, SOLVER_INPUTS // count))
            places.append(members[((np.arange(share) + 0.5) * len(members) / share).astype(int)])
        return np.concatenate(places)

    def _subset(self, source: str, backbone: Backbone) -> list[tuple[str, EmbeddedInput]]:
        if source not in self._subsets:
            self._subsets[source] = self.inputs(source, backbone).take(self._subset_index)
        return self._subsets[source]

    def _by_modality(self, values: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Sums over the last axis, S, in the dtype of the values: [..., G]."""
        columns = [values[..., self._modality_S == g].sum(-1) for g in range(len(self.pairs))]
        return np.stack(columns, axis=-1)
