"""Rules that prune visual tokens once, after one layer's mixer, without training (spec §5).

Each scores the tokens and keeps the same share of every input's visual tokens, those with the highest score. Text and
``<emb>`` are never pruned, nor counted. A token dropped in a layer also skips that layer's experts, whose output for it
nobody reads: pruning "after decoder block K" is a drop in layer K.

Shape legend: T tokens of the pack in this layer, S segments, V value heads of Gated DeltaNet.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection
from typing import Literal

import torch
from torch import Tensor

from rlcompute.backbones.base import Backbone
from rlcompute.decision import Decision, Signals
from rlcompute.errors import ConfigError
from rlcompute.pack import TEXT, Pack
from rlcompute.policies.draws import uniform


def lowest_visual(score_T: Tensor, pack: Pack, keep: float) -> Tensor:
    """Visual tokens that are not among their segment's highest, bool [T].

    Of n visual tokens ``floor(keep * n + 1/2)`` stay; of equal scores the earlier token's counts as higher.

    Args:
        score_T: finite scores; those of text and ``<emb>`` are ignored.
        pack: the tokens.
        keep: share to keep, in [0, 1].
    """
    visual_T = (pack.modality_T != TEXT) & ~pack.is_emb_T()
    # Sorted by segment, then by score from high to low, then by place; what is not visual comes last.
    order_T = score_T.masked_fill(~visual_T, -torch.inf).argsort(descending=True, stable=True)
    order_T = order_T[pack.segment_ids_T[order_T].argsort(stable=True)]
    starts_S = pack.cu_seqlens[:-1].to(score_T.device, non_blocking=True)
    rank_T = torch.empty_like(order_T)
    rank_T[order_T] = torch.arange(len(order_T), device=order_T.device)
    rank_T -= starts_S[pack.segment_ids_T]
    visual_S = torch.zeros_like(starts_S).index_add_(0, pack.segment_ids_T, visual_T.long())
    kept_S = (keep * visual_S.double() + 0.5).floor()
    return visual_T & (rank_T >= kept_S[pack.segment_ids_T])


def mean_beta(signals: Signals) -> Tensor:
    """β of the layer, mean over value heads, float64 [T]."""
    return signals.write_strength_TV.double().mean(dim=1)


class RunningScore:
    """A sum per token over layers, found again after tokens were removed, whoever removed them."""

    def begin(self, pack: Pack) -> None:
        """Start at zero for a new pass.

        Args:
            pack: the tokens of layer 0, where none is missing yet.
        """
        self._starts_S = pack.cu_seqlens[:-1].to(pack.segment_ids_T.device, non_blocking=True)
        self._sum_T = torch.zeros_like(pack.segment_ids_T, dtype=torch.float64)

    def _rows(self, pack: Pack) -> Tensor:
        """Rows that the tokens had in layer 0."""
        return self._starts_S[pack.segment_ids_T] + pack.token_index_T

    def add(self, score_T: Tensor, pack: Pack) -> None:
        """Add a score of each token that is left."""
        self._sum_T[self._rows(pack)] += score_T

    def total(self, pack: Pack) -> Tensor:
        """Sums of the tokens that are left, float64 [T]."""
        return self._sum_T[self._rows(pack)]


def _check(rule: str, layer: int, keep: float, num_layers: int) -> None:
    if not 0 <= layer <= num_layers - 2:
        raise ConfigError(
            f"{rule}: layer {layer} cannot prune: this backbone has {num_layers} layers, and in the last only <emb> "
            f"is left; layer must lie in 0..{num_layers - 2}"
        )
    if not 0.0 <= keep <= 1.0:
        raise ConfigError(f"{rule}: keep is the share of visual tokens that stays, in [0, 1]; got {keep}")


class _SignalPruning(ABC):
    """Prunes in one layer by the sum of a signal over the layers in which it was read."""

    gate_flops_per_token = 0.0

    def __init__(self, read_in: Collection[int], *, layer: int, keep: float) -> None:
        self._read_in, self._layer, self._keep = frozenset(read_in), layer, keep
        self._score = RunningScore()

    @abstractmethod
    def _read(self, signals: Signals) -> Tensor:
        """The signal of this layer, [T]."""

    def decide(self, layer: int, x_Td: Tensor, signals: Signals, pack: Pack) -> Decision:
        """Drop in the one layer; nothing elsewhere."""
        if layer == 0:
            self._score.begin(pack)
        if layer in self._read_in:
            self._score.add(self._read(signals), pack)
        if layer != self._layer:
            return Decision()
        return Decision(drop_T=lowest_visual(self._score.total(pack), pack, self._keep))


class BetaPruning(_SignalPruning):
    """Keeps the visual tokens that Gated DeltaNet writes most strongly (β of spec §2, mean over heads)."""

    def __init__(
        self, backbone: Backbone, *, layer: int, keep: float, average: Literal["last", "all"] = "all"
    ) -> None:
        """Args:
        backbone: the model.
        layer: where tokens leave, 0..num_layers-2.
        keep: share of each input's visual tokens that stays.
        average: over "all" Gated DeltaNet layers up to ``layer``, or the "last" of them alone.

        Raises:
            ConfigError: no such layer, a share outside [0, 1], or no Gated DeltaNet up to that layer.
        """
        _check("beta_prune", layer, keep, backbone.num_layers)
        deltas = [i for i in range(layer + 1) if not backbone.layers[i].is_attention]
        if not deltas:
            raise ConfigError(
                f"beta_prune: {backbone.family} at {backbone.path} has no Gated DeltaNet in layers 0..{layer}, so its "
                "tokens have no write strength β there; use a later layer, attention_prune or random_prune"
            )
        super().__init__(deltas if average == "all" else deltas[-1:], layer=layer, keep=keep)

    def _read(self, signals: Signals) -> Tensor:
        # A sum over layers ranks like their mean: every token that is left went through the same layers.
        return mean_beta(signals)


class AttentionPruning(_SignalPruning):
    """Keeps the visual tokens that receive the most attention in the last attention layer up to the pruning layer.

    A reference for what attention maps are worth: no fast kernel yields them, so they are computed again and charged.
    """

    def __init__(
        self, backbone: Backbone, *, layer: int, keep: float, source: Literal["all", "emb"] = "all"
    ) -> None:
        """Args:
        backbone: the model.
        layer: where tokens leave, 0..num_layers-2.
        keep: share of each input's visual tokens that stays.
        source: attention from "all" queries that see the token, or from "emb" alone.

        Raises:
            ConfigError: no such layer, a share outside [0, 1], or no attention up to that layer.
        """
        _check("attention_prune", layer, keep, backbone.num_layers)
        attentions = [i for i in range(layer + 1) if backbone.layers[i].is_attention]
        if not attentions:
            raise ConfigError(
                f"attention_prune: {backbone.family} at {backbone.path} has no full attention in layers 0..{layer}, so "
                "there is no attention map; use a later layer, beta_prune or random_prune"
            )
        super().__init__(attentions[-1:], layer=layer, keep=keep)
        self._from_emb = source == "emb"

    def _read(self, signals: Signals) -> Tensor:
        return signals.received_attention_T(from_emb=self._from_emb)


class RandomPruning:
    """Keeps visual tokens drawn at random: the control for "which tokens"."""

    gate_flops_per_token = 0.0

    def __init__(self, keys_S: Tensor, *, layer: int, keep: float, num_layers: int) -> None:
        """Args:
        keys_S: int64 key per segment (:func:`rlcompute.policies.draws.rollout_key`).
        layer: where tokens leave, 0..num_layers-2.
        keep: share of each input's visual tokens that stays.
        num_layers: layers of the backbone.

        Raises:
            ConfigError: no such layer, or a share outside [0, 1].
        """
        _check("random_prune", layer, keep, num_layers)
        self._keys_S, self._layer, self._keep = keys_S, layer, keep

    def decide(self, layer: int, x_Td: Tensor, signals: Signals, pack: Pack) -> Decision:
        """Drop in the one layer; nothing elsewhere."""
        if layer != self._layer:
            return Decision()
        score_T = uniform(self._keys_S[pack.segment_ids_T], layer, pack.token_index_T)
        return Decision(drop_T=lowest_visual(score_T, pack, self._keep))
