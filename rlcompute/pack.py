"""Packed batches: many inputs of any length in one row of tokens, without padding.

Shape legend: T tokens in the pack, S segments (one segment per input or rollout), L tokens of one input,
d hidden size, r rotary width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

TEXT, IMAGE, VIDEO = 0, 1, 2
MODALITY_NAMES = ("text", "image", "video")
"""Names of the kinds of token above, in their order."""


@dataclass(frozen=True)
class EmbeddedInput:
    """One input after token embedding and vision tower, ready to be packed any number of times.

    Attributes:
        hidden_Ld: input of the first decoder layer, in the backbone's dtype.
        position_ids_3L: int64 temporal, height and width positions of the multimodal rotary embedding.
        modality_L: int8, TEXT, IMAGE or VIDEO per token.
        vision_flops: FLOPs that the vision tower spent on this input.
    """

    hidden_Ld: Tensor
    position_ids_3L: Tensor
    modality_L: Tensor
    vision_flops: float

    @property
    def length(self) -> int:
        """Number of tokens, the closing ``<emb>`` token included."""
        return int(self.hidden_Ld.shape[0])

    @property
    def nbytes(self) -> int:
        """Bytes of memory that the tensors hold."""
        return sum(
            x.numel() * x.element_size() for x in (self.hidden_Ld, self.position_ids_3L, self.modality_L)
        )


@dataclass(frozen=True)
class Alive:
    """Which tokens of a pack still count, where all tokens travel on (training, spec §4).

    Attributes:
        mass_T: floating [T], what the token's keys, values, state and routed output weigh for the others: 1 alive,
            0 dropped, with the gradient of the decisions that made it so. ``<emb>`` tokens have 1.
        is_alive_T: bool [T], true at the tokens that a packed forward would still hold.
    """

    mass_T: Tensor
    is_alive_T: Tensor

    def take(self, index: Tensor) -> Alive:
        """Those at the rows ``index``."""
        return Alive(self.mass_T[index], self.is_alive_T[index])


@dataclass(frozen=True)
class Pack:
    """Where every surviving token of a batch belongs; the hidden states travel beside it.

    Attributes:
        cu_seqlens: int64 [S+1] on the CPU, whatever the device of the tokens, so that reading lengths never waits;
            segment s owns the tokens cu_seqlens[s]:cu_seqlens[s+1]. The last token of a segment is its ``<emb>``
            token; it is never removed. A segment without tokens passes a layer that the pack goes through
            (:class:`rlcompute.decision.Bypass`).
        segment_ids_T: int64, the segment of each token.
        token_index_T: int64, the token's place in the original input; survives compaction, so that whatever is
            derived from it does not depend on what was dropped or on the rest of the batch.
        modality_T: int8, TEXT, IMAGE or VIDEO.
        cos_Tr, sin_Tr: rotary factors in the dtype of the hidden states.
        alive: the tokens that still count, where dropped ones stay in the pack; None: all of them do.
    """

    cu_seqlens: Tensor
    segment_ids_T: Tensor
    token_index_T: Tensor
    modality_T: Tensor
    cos_Tr: Tensor
    sin_Tr: Tensor
    alive: Alive | None = None

    @property
    def num_segments(self) -> int:
        return int(self.cu_seqlens.shape[0]) - 1

    @property
    def lengths_S(self) -> Tensor:
        """int64 [S] on the CPU, tokens per segment."""
        return self.cu_seqlens.diff()

    @cached_property
    def emb_index_S(self) -> Tensor:
        """int64 [S], the row of each segment's ``<emb>`` token (its last); segments without tokens have none."""
        last_S = self.cu_seqlens[1:] - 1
        return last_S[self.lengths_S > 0].to(self.segment_ids_T.device, non_blocking=True)

    @cached_property
    def emb_cu_seqlens(self) -> Tensor:
        """int64 [S+1] on the CPU, bounds of the segments in the pack of their ``<emb>`` tokens alone."""
        return torch.nn.functional.pad((self.lengths_S > 0).cumsum(0), (1, 0))

    def is_emb_T(self) -> Tensor:
        """bool [T], true at ``<emb>`` tokens."""
        mask = torch.zeros_like(self.segment_ids_T, dtype=torch.bool)
        mask[self.emb_index_S] = True
        return mask

    def take(self, index: Tensor, cu_seqlens: Tensor) -> Pack:
        """The pack of the tokens at ``index`` (int64, ascending), whose segment bounds are ``cu_seqlens``."""
        return replace(
            self,
            cu_seqlens=cu_seqlens,
            segment_ids_T=self.segment_ids_T[index],
            token_index_T=self.token_index_T[index],
            modality_T=self.modality_T[index],
            cos_Tr=self.cos_Tr[index],
            sin_Tr=self.sin_Tr[index],
            alive=None if self.alive is None else self.alive.take(index),
        )

    def emb_only(self) -> Pack:
        """The pack of the ``<emb>`` tokens alone, which are always alive: at most one token a segment."""
        return replace(self, alive=None).take(self.emb_index_S, self.emb_cu_seqlens)


def concatenate(inputs: Sequence[EmbeddedInput]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Hidden states [T,d], positions [3,T], modality [T] and CPU cu_seqlens [S+1] of inputs laid end
    to end."""
    hidden = torch.cat([x.hidden_Ld for x in inputs])
    positions = torch.cat([x.position_ids_3L for x in inputs], dim=1)
    modality = torch.cat([x.modality_L for x in inputs])
    lengths = torch.tensor([0, *(x.length for x in inputs)], dtype=torch.long)
    return hidden, positions, modality, lengths.cumsum(0)
