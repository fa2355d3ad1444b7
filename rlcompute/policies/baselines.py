"""Policies that were not trained: the controls that a learned policy has to beat.

Shape legend: T tokens, S segments.
"""

from __future__ import annotations

from torch import Tensor

from rlcompute.decision import Decision, Signals
from rlcompute.pack import TEXT, Pack
from rlcompute.policies.draws import uniform
from rlcompute.policies.gates import Droppable


class RandomActions:
    """SKIP and DROP at fixed probabilities, the same in every layer: the control for "which tokens"."""

    gate_flops_per_token = 0.0

    def __init__(
        self, keys_S: Tensor, *, skip: float, drop: float, droppable: Droppable, num_layers: int
    ) -> None:
        """Args:
        keys_S: int64 key per segment (:func:`rlcompute.policies.draws.rollout_key`).
        skip: probability that a token skips its routed experts.
        drop: probability that a token leaves, where it may.
        droppable: "all" or "visual"; ``<emb>`` always stays.
        num_layers: layers of the backbone; nothing is dropped in the last.
        """
        self._keys_S, self._skip, self._drop = keys_S, skip, drop
        self._droppable, self._last = droppable, num_layers - 1

    def decide(self, layer: int, x_Td: Tensor, signals: Signals, pack: Pack) -> Decision:
        """One draw per token: below ``drop`` it leaves, in the next ``skip`` of the interval it skips."""
        draw_T = uniform(self._keys_S[pack.segment_ids_T], layer, pack.token_index_T)
        may_drop_T = ~pack.is_emb_T()
        if self._droppable == "visual":
            may_drop_T &= pack.modality_T != TEXT
        drop_T = (draw_T < self._drop) & may_drop_T & (layer != self._last)
        skip_T = (draw_T >= self._drop) & (draw_T < self._drop + self._skip)
        return Decision(drop_T=drop_T, keep=~skip_T)
