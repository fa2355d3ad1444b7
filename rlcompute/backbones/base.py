"""The layer contract: what the encoder's loop needs from a transformers family, and nothing else.

Shape legend: T tokens, S segments, L tokens of one input, d hidden size, k selected experts, E experts,
F expert width, r rotary width.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from rlcompute.kernels.registry import Kernels
from rlcompute.pack import EmbeddedInput, Pack, concatenate
from rlcompute.preprocess import ModelInput, Preprocessor


@dataclass(frozen=True)
class ExpertWeights:
    """Routed expert weights in transformers' layout: gate and up stacked [E,2F,d], down [E,d,F]."""

    gate_up_E2Fd: Tensor
    down_EdF: Tensor


class Selection(NamedTuple):
    """A router's choice.

    Attributes:
        expert_ids_Tk: int64, highest weight first.
        weights_Tk: in the hidden dtype, renormalised over the selected experts.
        logits_TE: in the hidden dtype, before the softmax.
    """

    expert_ids_Tk: Tensor
    weights_Tk: Tensor
    logits_TE: Tensor


@dataclass(frozen=True)
class LayerCost:
    """Analytic FLOPs (2 per multiply-add) of one layer; see :mod:`rlcompute.flops` for how they are charged.

    Attributes:
        mix_token: mixer work of every entering token that does not depend on its context.
        mix_query: mixer work of every token whose mixer output is used: all of them, and in the last layer
            ``<emb>`` alone.
        mix_context: attention work per (query, visible key) pair; 0 for recurrent mixers.
        shared_token: shared expert and its gate.
        router_token: router logits.
        expert_row: one routed expert on one token.
        strength_token: write strength of one token; 0 where there is none.
    """

    mix_token: float
    mix_query: float
    mix_context: float
    shared_token: float
    router_token: float
    expert_row: float
    strength_token: float = 0.0


class BackboneLayer(Protocol):
    """One decoder layer with a mixture-of-experts block, on packed tokens."""

    cost: LayerCost
    is_attention: bool
    """Full attention; otherwise Gated DeltaNet."""

    @property
    def experts(self) -> ExpertWeights:
        """Routed experts; with an adapter on them they are multiplied out at each access."""
        ...

    def mix(self, h_Td: Tensor, pack: Pack) -> Tensor:
        """Norm, attention or Gated DeltaNet, residual: [T,d]. Segments never see each other."""
        ...

    def mix_emb(self, h_Td: Tensor, pack: Pack) -> Tensor:
        """Rows of :meth:`mix` at the segments' ``<emb>`` tokens, [S,d], without computing the other rows."""
        ...

    def moe_input(self, h_Td: Tensor) -> Tensor:
        """Post-attention norm: what experts, router and policy read, [T,d]."""
        ...

    def route(self, x_Td: Tensor) -> Selection:
        """Which experts each token goes to."""
        ...

    def write_strength(self, h_Td: Tensor) -> Tensor:
        """β of Gated DeltaNet for the mixer's inputs, [T,V], computed apart from the mixer.

        Raises:
            BackendError: the layer has attention instead.
        """
        ...

    def received_attention(self, h_Td: Tensor, pack: Pack, *, from_emb: bool) -> tuple[Tensor, Tensor]:
        """Attention that each token receives, [T], and FLOPs per segment, float64 [S], from the mixer's inputs.

        See :meth:`rlcompute.decision.Signals.received_attention_T`.

        Raises:
            BackendError: the layer has Gated DeltaNet instead.
        """
        ...

    def shared(self, x_Td: Tensor) -> Tensor:
        """Gated shared expert, [T,d]."""
        ...


class Backbone(ABC):
    """A frozen embedder backbone behind the layer contract.

    Attributes:
        family: transformers ``model_type``.
        path: folder it was loaded from.
        hash: hex digest of configuration and weights (:func:`rlcompute.backbones.fingerprint.checkpoint_hash`).
        preprocessor: turns one side of a pair into model inputs.
        kernels: what the mixers, the encoder and the vision tower run.
        model: the transformers model whose weights it reads.
        adapted: whether a trainable adapter is attached (:func:`rlcompute.backbones.lora.attach`).
    """

    family: str
    path: Path
    hash: str
    preprocessor: Preprocessor
    kernels: Kernels
    layers: Sequence[BackboneLayer]
    hidden_size: int
    num_experts: int
    top_k: int
    dtype: torch.dtype
    device: torch.device
    model: Any
    adapted: bool = False

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @abstractmethod
    def embed_inputs(self, inputs: Sequence[ModelInput]) -> list[EmbeddedInput]:
        """Token embeddings and vision tower, once per input, in one packed pass.

        Without gradients, unless an adapter is attached and torch's gradient mode is on.
        """

    @abstractmethod
    def rotary(self, position_ids_3T: Tensor) -> tuple[Tensor, Tensor]:
        """Rotary cos and sin [T,r] of multimodal positions."""

    @abstractmethod
    def final_norm(self, h_Sd: Tensor) -> Tensor:
        """The norm after the last layer, [S,d]."""

    def pack(self, inputs: Sequence[EmbeddedInput]) -> tuple[Tensor, Pack]:
        """Lay inputs end to end: hidden states [T,d] and their pack. Repeat an input for several rollouts.

        Raises:
            ValueError: no inputs, or one without tokens.
        """
        if not inputs or any(x.length == 0 for x in inputs):
            raise ValueError("a pack needs at least one input, and every input at least its <emb> token")
        hidden, positions, modality, cu_seqlens = concatenate(inputs)
        cos, sin = self.rotary(positions)
        segment_ids = torch.repeat_interleave(torch.arange(len(inputs)), cu_seqlens.diff())
        token_index = torch.arange(hidden.shape[0]) - cu_seqlens[segment_ids]
        segment_ids, token_index = segment_ids.to(hidden.device), token_index.to(hidden.device)
        return hidden, Pack(cu_seqlens, segment_ids, token_index, modality, cos, sin)
