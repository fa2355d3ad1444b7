"""What the claims need besides the comparison's points: write strength, firing rates, masked execution, learned skips.

Everything but the learned skip is measured on both sides of the first pairs of each modality.

Shape legend: T tokens, S inputs (all queries, then all targets), N layers, G modalities of pairs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from rlcompute.backbones.base import Backbone
from rlcompute.benchmark.masked import encode_masked
from rlcompute.benchmark.timing import Timing, interleaved
from rlcompute.benchmark.variants import check_agreement
from rlcompute.compare.claims_firing import Firing, firing
from rlcompute.compare.claims_model import Figure
from rlcompute.compare.claims_training import Training, training_of
from rlcompute.compare.contenders import Builder
from rlcompute.compare.strength_study import StrengthStudy
from rlcompute.config import Config
from rlcompute.data.schema import Pair
from rlcompute.decision import Bypass, Decision, Full, Policy, Signals, bypass_of
from rlcompute.encoder import encode
from rlcompute.held_out import items_of, ranks_by_modality
from rlcompute.metrics import IntArray
from rlcompute.pack import EmbeddedInput, Pack
from rlcompute.passes import Contender, InputBatches, measure
from rlcompute.policies.rules import parse

SAMPLE_PAIRS = 48
"""Pairs of each modality whose tokens are looked at one by one."""
CLOCK_S = 20.0
"""Seconds for the clock of masked and packed execution."""


@dataclass(frozen=True)
class SkipOnly:
    """Gates whose decisions to drop only skip, on all held-out pairs (:class:`rlcompute.compare.points.Point`)."""

    ranks: Mapping[str, IntArray]
    survived_NG: IntArray
    rows_NG: IntArray


class _DropsSkip:
    """A policy whose drops only leave out the routed experts."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self.gate_flops_per_token = policy.gate_flops_per_token

    def bypass(self, layer: int, emb_Sd: Tensor, pack: Pack) -> Bypass | None:
        return bypass_of(self._policy, layer, emb_Sd, pack)

    def decide(self, layer: int, x_Td: Tensor, signals: Signals, pack: Pack) -> Decision:
        decision = self._policy.decide(layer, x_Td, signals, pack)
        if decision.drop_T is None:
            return decision
        keep = ~decision.drop_T | pack.is_emb_T()
        if decision.keep is not None:
            keep = decision.keep & (keep if decision.keep.ndim == 1 else keep[:, None])
        return replace(decision, drop_T=None, keep=keep)


class PairLaboratory:
    """Measures on the held-out pairs; each thing once, when it is first asked for."""

    def __init__(
        self,
        config: Config,
        backbone: Backbone,
        builder: Builder,
        pairs: Mapping[str, Sequence[Pair]],
        strength: StrengthStudy,
    ) -> None:
        """Args:
        config: for batch size and galleries.
        backbone: the unpruned one.
        builder: of the policies.
        pairs: the held-out pairs by modality.
        strength: write strength against attention under full compute.
        """
        self.strength = strength
        self._config, self._backbone, self._builder = config, backbone, builder
        self._pairs = {modality: list(group) for modality, group in pairs.items()}
        self._firing: dict[str, Firing] = {}

    @cached_property
    def _groups(self) -> list[str]:
        """The modality of each pair of the sample."""
        return [name for name, group in self._pairs.items() for _ in group[:SAMPLE_PAIRS]]

    @cached_property
    def _batches(self) -> list[tuple[list[str], list[EmbeddedInput]]]:
        """The sample's inputs, as the unpruned backbone embeds them."""
        return self._embedded(self._backbone)

    def _embedded(self, backbone: Backbone) -> list[tuple[list[str], list[EmbeddedInput]]]:
        sample = [pair for group in self._pairs.values() for pair in group[:SAMPLE_PAIRS]]
        return list(InputBatches(backbone, items_of(sample), self._config.evaluation.batch_size))

    def firing(self, policy: str) -> Firing:
        """Where a policy drops and skips."""
        if policy not in self._firing:
            prepared = self._builder.build(parse(policy))
            own = prepared.backbone
            # An adapter may change the vision tower.
            batches = self._batches if own is self._backbone else self._embedded(own)
            self._firing[policy] = firing(own, prepared.contender.make, batches, self._groups)
        return self._firing[policy]

    def execution(self, policy: str) -> tuple[Figure, Figure]:
        """Speed-up of the language model over full compute: dropped tokens masked, and dropped tokens removed.

        Each round is held against full compute of the same round.

        Raises:
            BackendError: the two do not give the same embeddings.
        """
        backbone = self._backbone
        prepared = self._builder.build(parse(policy))
        packs = [(*backbone.pack(inputs), prepared.contender.make(names)) for names, inputs in self._batches]
        for hidden_Td, pack, rule in packs:
            packed_Sd = encode(backbone, hidden_Td, pack, rule).embeddings_Sd
            check_agreement(policy, encode_masked(backbone, hidden_Td, pack, rule), packed_Sd, backbone.dtype)

        def full() -> None:
            for hidden_Td, pack, _ in packs:
                encode(backbone, hidden_Td, pack, Full())

        def masked() -> None:
            for hidden_Td, pack, rule in packs:
                encode_masked(backbone, hidden_Td, pack, rule)

        def packed() -> None:
            for hidden_Td, pack, rule in packs:
                encode(backbone, hidden_Td, pack, rule)

        variants: dict[str, Callable[[], object]] = {"full": full, "masked": masked, "packed": packed}
        timings = interleaved(variants, budget_s=CLOCK_S, device=backbone.device)
        return (
            _speedup("speed-up of masked execution", timings["masked"], timings["full"]),
            _speedup("speed-up of packed execution", timings["packed"], timings["full"]),
        )

    def expert_bytes(self, policy: str) -> int:
        """Bytes of the routed experts of the backbone that a policy runs on."""
        tensors = [
            tensor
            for layer in self._builder.build(parse(policy)).backbone.layers
            for tensor in (layer.experts.gate_up_E2Fd, layer.experts.down_EdF)
        ]
        return sum(x.numel() * x.element_size() for x in tensors)

    def training(self, policy: str) -> Training:
        """How the straight-through gates of a policy were trained."""
        return training_of(policy)

    def skip_only(self, policy: str) -> SkipOnly:
        """Gates whose decisions to drop only skip, on all held-out pairs."""
        prepared = self._builder.build(parse(policy))

        def make(names: Sequence[str]) -> Policy:
            return _DropsSkip(prepared.contender.make(names))

        settings = self._config.evaluation
        items = items_of([pair for group in self._pairs.values() for pair in group])
        batches = InputBatches(prepared.backbone, items, settings.batch_size)
        measured = measure(prepared.backbone, batches, [Contender("skip", make)], "learned skip")[1]["skip"]
        owner_S = torch.tensor(
            [place for place, group in enumerate(self._pairs.values()) for _ in group]
        ).repeat(2)

        def by_modality(counts_NS: Tensor) -> IntArray:
            zeros_NG = torch.zeros(len(counts_NS), len(self._pairs), dtype=torch.int64)
            return zeros_NG.index_add(1, owner_S, counts_NS.long()).numpy()

        return SkipOnly(
            ranks_by_modality(measured.embeddings_Sd, self._pairs, settings.gallery),
            by_modality(measured.trace.survived_NS),
            by_modality(measured.trace.rows_NS),
        )


def _speedup(name: str, timing: Timing, reference: Timing) -> Figure:
    """The median of the rounds' ratios between the order statistics that enclose the true one in 95 of 100 cases."""
    ratios = np.sort(np.array(reference.samples) / np.array(timing.samples))
    rounds, left, beyond = len(ratios), 0, 0.0
    while left < rounds // 2 and beyond + math.comb(rounds, left) / 2**rounds <= 0.025:
        beyond += math.comb(rounds, left) / 2**rounds
        left += 1
    cut = max(0, left - 1)
    return Figure(name, float(np.median(ratios)), float(ratios[cut]), float(ratios[rounds - 1 - cut]), "×")
