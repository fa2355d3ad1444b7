"""Write strength and attention of every token, layer by layer, under full compute.

Shape legend: T tokens of a pack, L tokens of one input, d hidden size, B layers with Gated DeltaNet, A layers with
attention.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from rlcompute.backbones.base import Backbone, BackboneLayer, Selection
from rlcompute.decision import Full
from rlcompute.encoder import encode
from rlcompute.pack import EmbeddedInput, Pack

FloatArray = npt.NDArray[np.float64]


@dataclass(frozen=True)
class InputMaps:
    """One input's maps, without its ``<emb>`` token: L counts the others, which a rule may leave out.

    Attributes:
        modality_L: int8, TEXT, IMAGE or VIDEO.
        strength_BL: β of spec §2, mean over value heads.
        emb_attention_AL: attention probability from ``<emb>``, mean over heads.
        received_attention_AL: attention probability summed over all queries, mean over heads.
    """

    modality_L: npt.NDArray[np.int8]
    strength_BL: FloatArray
    emb_attention_AL: FloatArray
    received_attention_AL: FloatArray


def mixer_layers(backbone: Backbone) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Layers with Gated DeltaNet and layers with attention."""
    numbers = range(backbone.num_layers)
    return (
        tuple(layer for layer in numbers if not backbone.layers[layer].is_attention),
        tuple(layer for layer in numbers if backbone.layers[layer].is_attention),
    )


def input_maps(backbone: Backbone, inputs: Sequence[EmbeddedInput]) -> list[InputMaps]:
    """Maps of the inputs of one pack, in one pass.

    The last layer's are there too, although a policy cannot read them: its mixer has every token as key and value.
    """
    watched = [_WatchedLayer(layer) for layer in backbone.layers]
    watching = copy.copy(backbone)
    watching.layers = watched
    hidden_Td, pack = watching.pack(inputs)
    encode(watching, hidden_Td, pack, Full())
    strength_BT = _stacked([x.strength_T for x in watched if not x.is_attention], pack)
    emb_AT = _stacked([x.emb_attention_T for x in watched if x.is_attention], pack)
    received_AT = _stacked([x.received_attention_T for x in watched if x.is_attention], pack)
    modality_T = pack.modality_T.cpu().numpy()
    return [
        InputMaps(modality_T[own], strength_BT[:, own], emb_AT[:, own], received_AT[:, own])
        for own in _without_emb(pack)
    ]


def _stacked(maps: Sequence[Tensor], pack: Pack) -> FloatArray:
    if not maps:
        return np.zeros((0, len(pack.modality_T)))
    return torch.stack(list(maps)).double().cpu().numpy()


def _without_emb(pack: Pack) -> Iterator[slice]:
    bounds = pack.cu_seqlens.tolist()
    return (slice(start, stop - 1) for start, stop in pairwise(bounds))


@dataclass
class _WatchedLayer:
    """A layer that computes the maps from its mixer's inputs before it mixes."""

    layer: BackboneLayer
    strength_T: Tensor = field(init=False)
    emb_attention_T: Tensor = field(init=False)
    received_attention_T: Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.experts, self.cost, self.is_attention = (
            self.layer.experts,
            self.layer.cost,
            self.layer.is_attention,
        )

    def _watch(self, h_Td: Tensor, pack: Pack) -> None:
        if self.is_attention:
            self.emb_attention_T, _ = self.layer.received_attention(h_Td, pack, from_emb=True)
            self.received_attention_T, _ = self.layer.received_attention(h_Td, pack, from_emb=False)
        else:
            self.strength_T = self.layer.write_strength(h_Td).double().mean(dim=1)

    def mix(self, h_Td: Tensor, pack: Pack) -> Tensor:
        self._watch(h_Td, pack)
        return self.layer.mix(h_Td, pack)

    def mix_emb(self, h_Td: Tensor, pack: Pack) -> Tensor:
        self._watch(h_Td, pack)
        return self.layer.mix_emb(h_Td, pack)

    def moe_input(self, h_Td: Tensor) -> Tensor:
        return self.layer.moe_input(h_Td)

    def route(self, x_Td: Tensor) -> Selection:
        return self.layer.route(x_Td)

    def write_strength(self, h_Td: Tensor) -> Tensor:
        return self.layer.write_strength(h_Td)

    def received_attention(self, h_Td: Tensor, pack: Pack, *, from_emb: bool) -> tuple[Tensor, Tensor]:
        return self.layer.received_attention(h_Td, pack, from_emb=from_emb)

    def shared(self, x_Td: Tensor) -> Tensor:
        return self.layer.shared(x_Td)
