"""What a rollout worker computes, without Ray: embed inputs once, sample rollouts, keep their score statistics.

Shape legend: 2 sides (query, target), B pairs of a micro-batch, G rollouts, S = 2*B*G segments of its pack ordered
by side, pair and rollout, N layers, F gate features, d hidden size, R decisions.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Sequence
from typing import Generic, TypeVar

import numpy as np
import torch
from torch import Tensor

from rlcompute.actors.messages import (
    SIDES,
    Array,
    Decisions,
    GradientRequest,
    MicroBatch,
    Normaliser,
    Overlay,
    Rollouts,
)
from rlcompute.backbones.base import Backbone
from rlcompute.charge import Charge
from rlcompute.config import Config
from rlcompute.data.schema import Pair, Side
from rlcompute.decision import Bypass, Decision, Full, Policy, Signals, bypass_of
from rlcompute.encoder import encode
from rlcompute.flops import FlopModel
from rlcompute.pack import EmbeddedInput, Pack
from rlcompute.policies.checkpoint import Gates
from rlcompute.policies.draws import as_keys, rollout_key
from rlcompute.policies.gates import GateHeads, RecordedLayer, SampledGates, calibrate
from rlcompute.policies.grpo import gradient_from_statistic

EMBEDDED_CACHE_BYTES = 512 * 2**20
"""Bound of the cache of embedded inputs of one worker."""
EXPERT_ROWS_CACHE_BYTES = 64 * 2**20
"""Bound of the cache of full compute's rows by expert; filled only if tiles are charged."""


Cached = TypeVar("Cached", EmbeddedInput, Tensor)


class InputCache(Generic[Cached]):
    """What was computed of inputs, by key; the least recently used dropped when a bound in bytes is passed."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._bytes = 0
        self._entries: OrderedDict[tuple[str, str], Cached] = OrderedDict()

    def get(self, key: tuple[str, str]) -> Cached | None:
        """The entry, which becomes the most recently used one."""
        if key in self._entries:
            self._entries.move_to_end(key)
        return self._entries.get(key)

    def put(self, key: tuple[str, str], value: Cached) -> None:
        """Adds an entry that is not there yet."""
        self._entries[key] = value
        self._bytes += value.nbytes
        while self._bytes > self._max_bytes and len(self._entries) > 1:
            _, dropped = self._entries.popitem(last=False)
            self._bytes -= dropped.nbytes

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return self._bytes


class RolloutEngine:
    """One frozen backbone and the rollouts of the current iteration."""

    def __init__(
        self, backbone: Backbone, config: Config, *, cache_bytes: int = EMBEDDED_CACHE_BYTES
    ) -> None:
        self.backbone = backbone
        self._config = config
        self._flops = FlopModel(backbone)
        self._charge = Charge(config.compute, backbone)
        self._cache: InputCache[EmbeddedInput] = InputCache(cache_bytes)
        self._expert_rows: InputCache[Tensor] = InputCache(EXPERT_ROWS_CACHE_BYTES)
        self._kept: dict[tuple[int, int], SampledGates] = {}

    def full_embeddings(self, pairs: Sequence[Pair]) -> Array:
        """Teacher embeddings of both sides under full compute, float32 [2, len(pairs), d]."""
        inputs = [self.embed(pair, side) for side in SIDES for pair in pairs]
        encoded = encode(self.backbone, *self.backbone.pack(inputs), Full())
        return _numpy(encoded.embeddings_Sd.float().view(2, len(pairs), -1))

    def calibrate(self, pairs: Sequence[Pair]) -> Normaliser:
        """Mean and scale of the gate heads' inputs under full compute."""
        inputs = [self.embed(pair, side) for pair in pairs for side in SIDES]
        mean_Nd, scale_N = calibrate(self.backbone, inputs)
        return Normaliser(_numpy(mean_Nd), _numpy(scale_N))

    def sample(self, batch: MicroBatch, heads: GateHeads) -> Rollouts:
        """Phase 1: runs G rollouts of both sides of every pair and keeps their score statistics.

        Rollouts of other iterations are forgotten.
        """
        started = time.perf_counter()
        settings = self._config.grpo
        inputs = [self.embed(pair, side) for side in SIDES for pair in batch.pairs]
        seed = self._config.run.seed
        keys = [
            rollout_key(seed, batch.iteration, pair.id, side, rollout)
            for side in SIDES
            for pair in batch.pairs
            for rollout in range(settings.rollouts)
        ]
        gates = SampledGates(
            heads.to(self.backbone.device),
            as_keys(keys, self.backbone.device),
            temperature=self._config.policy.temperature,
            record=settings.updates_per_batch > 1,
            score_statistic=self.backbone.kernels.score_statistic,
        )
        repeated = [x for x in inputs for _ in range(settings.rollouts)]
        encoded = encode(self.backbone, *self.backbone.pack(repeated), gates)
        self._kept = {key: kept for key, kept in self._kept.items() if key[0] == batch.iteration}
        self._kept[batch.iteration, batch.index] = gates
        shape = (2, len(batch.pairs), settings.rollouts)
        lengths = torch.tensor([x.length for x in inputs])
        expert_rows = None
        if self._charge.by_expert:
            once = [self._full_expert_rows(pair, side) for side in SIDES for pair in batch.pairs]
            expert_rows = torch.stack(once).sum(0) * settings.rollouts
        return Rollouts(
            embeddings_2BGd=_numpy(encoded.embeddings_Sd.float().view(*shape, -1)),
            executed_2BG=_numpy(self._flops.executed(encoded.trace, gates.gate_flops_per_token).view(shape)),
            full_2B=_numpy(self._flops.full(lengths).view(shape[:2])),
            charged_2BG=_numpy(self._charge.executed(encoded.trace, gates.gate_flops_per_token).view(shape)),
            charged_full_2B=_numpy(self._charge.full(lengths, expert_rows).view(shape[:2])),
            vision_2B=np.array([x.vision_flops for x in inputs]).reshape(shape[:2]),
            entered_N=_numpy(encoded.trace.entered_NS.sum(1)),
            actions_NM3=_numpy(gates.action_counts_NM3),
            seconds=time.perf_counter() - started,
        )

    def gradient(self, request: GradientRequest) -> Array | Decisions | None:
        """Phase 3: the micro-batch's part of the loss gradient, float64 [N,3,F], or its recorded decisions.

        The gradient is that of ``-sum_i A_i log pi_i`` over its rollouts (spec §3), inputs added in their order.
        None if this process did not sample the micro-batch.
        """
        gates = self._kept.get((request.iteration, request.index))
        if gates is None:
            return None
        if request.ship_decisions:
            return _decisions(gates.records)
        advantages_S = torch.tensor(request.advantages_2BG, device=self.backbone.device).flatten()
        return _numpy(gradient_from_statistic(gates.statistic_SN3F, advantages_S, gates.decisions_S))

    def overlay(self, side: Side, gates: Gates) -> Overlay:
        """Where gates drop the tokens of one input; nothing is drawn."""
        model_input = self.backbone.preprocessor(side)
        (embedded,) = self.backbone.embed_inputs([model_input])
        recorder = _DropRecorder(gates.to(self.backbone.device).policy(), embedded.length)
        encoded = encode(self.backbone, *self.backbone.pack([embedded]), recorder)
        executed = self._flops.executed(encoded.trace, recorder.gate_flops_per_token)
        full = self._flops.full(torch.tensor([embedded.length]))
        return Overlay(
            dropped_at_L=_numpy(recorder.dropped_at_L),
            modality_L=_numpy(embedded.modality_L),
            grid_thw=model_input.grid_thw.numpy(),
            saved=float(1 - executed[0] / full[0]),
        )

    def _full_expert_rows(self, pair: Pair, side: str) -> Tensor:
        """Rows by expert of one input under full compute, int64 [N,E]; one input at a time, as :meth:`embed`."""
        key = (pair.id, side)
        rows_NE = self._expert_rows.get(key)
        if rows_NE is None:
            encoded = encode(self.backbone, *self.backbone.pack([self.embed(pair, side)]), Full())
            rows_NE = encoded.trace.expert_rows_NE.cpu()
            self._expert_rows.put(key, rows_NE)
        return rows_NE

    def embed(self, pair: Pair, side: str) -> EmbeddedInput:
        """An input after token embedding and vision tower.

        Inputs are embedded one at a time: in a joint pass their last bits would depend on which other inputs were
        missing from the cache, and with them the result of the run on the number of workers.
        """
        key = (pair.id, side)
        cached = self._cache.get(key)
        if cached is not None:
            return cached
        content: Side = getattr(pair, side)
        (embedded,) = self.backbone.embed_inputs(
            [self.backbone.preprocessor(content, f"{side} of row {pair.id!r}")]
        )
        self._cache.put(key, embedded)
        return embedded


class _DropRecorder:
    """A policy of one input that remembers which layer dropped each token (-1: none)."""

    def __init__(self, policy: Policy, length: int) -> None:
        self._policy = policy
        self.gate_flops_per_token = policy.gate_flops_per_token
        self.dropped_at_L = torch.full((length,), -1, dtype=torch.long)

    def bypass(self, layer: int, emb_Sd: Tensor, pack: Pack) -> Bypass | None:
        return bypass_of(self._policy, layer, emb_Sd, pack)

    def decide(self, layer: int, x_Td: Tensor, signals: Signals, pack: Pack) -> Decision:
        decision = self._policy.decide(layer, x_Td, signals, pack)
        if decision.drop_T is not None:
            self.dropped_at_L[pack.token_index_T[decision.drop_T].cpu()] = layer
        return decision


def _decisions(records: Sequence[RecordedLayer]) -> Decisions:
    """Recorded layers, joined in order."""
    layers = [torch.full_like(record.actions_T, layer) for layer, record in enumerate(records)]
    return Decisions(
        features_RF=_numpy(torch.cat([r.features_TF.float() for r in records])),
        layers_R=_numpy(torch.cat(layers)),
        actions_R=_numpy(torch.cat([r.actions_T for r in records])),
        rollouts_R=_numpy(torch.cat([r.segment_ids_T for r in records])),
        may_drop_R=_numpy(torch.cat([r.may_drop_T for r in records])),
        logprobs_R=_numpy(torch.cat([r.log_probs_T.float() for r in records])),
    )


def _numpy(tensor: Tensor) -> Array:
    array: Array = tensor.detach().cpu().contiguous().numpy()
    return array
