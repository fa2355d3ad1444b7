"""The one decision type that every policy returns, and the words for actions.

Shape legend: T tokens that reach the mixture-of-experts block of a layer, k selected experts per token.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from rlcompute.pack import Pack

ROUTE, SKIP, DROP = 0, 1, 2
ACTION_NAMES = ("route", "skip", "drop")


class Routing(Protocol):
    """The layer's own expert selection; computed when first read, so a policy that ignores it costs nothing."""

    @property
    def expert_ids_Tk(self) -> Tensor:
        """int64 [T,k], selected experts, highest weight first."""
        ...

    @property
    def weights_Tk(self) -> Tensor:
        """[T,k] in the hidden dtype, renormalised over the selected experts."""
        ...


@dataclass(frozen=True)
class Decision:
    """What to do with each token in one layer.

    Attributes:
        drop_T: bool, tokens removed here: no experts, shared or routed, in this layer and nothing in later ones.
            None drops nothing. ``<emb>`` tokens stay whatever it says.
        keep: bool, which routed experts run: [T] for all or none of a token's experts, [T,k] slot by slot.
            None runs all. Whatever it says of a dropped token is ignored.
        renormalize: divide the kept slots' weights by their sum (what lowering ``num_experts_per_tok`` does).
    """

    drop_T: Tensor | None = None
    keep: Tensor | None = None
    renormalize: bool = False

    def take(self, index_U: Tensor) -> Decision:
        """What is left to execute for the tokens at ``index_U`` (int64), once dropped tokens are gone."""
        keep = None if self.keep is None else self.keep[index_U]
        return Decision(keep=keep, renormalize=self.renormalize)


class Policy(Protocol):
    """Whoever decides. Called once per layer, in order, with what the layer's experts would read."""

    gate_flops_per_token: float
    """FLOPs that one decision costs, charged to every decided token of every layer."""

    def decide(self, layer: int, x_Td: Tensor, routing: Routing, pack: Pack) -> Decision:
        """The decision for the T tokens ``x_Td`` (post-attention-norm hidden states) of layer ``layer``."""
        ...


class Full:
    """Full compute: every token runs every selected expert of every layer."""

    gate_flops_per_token = 0.0

    def decide(self, layer: int, x_Td: Tensor, routing: Routing, pack: Pack) -> Decision:
        """Decide nothing away."""
        return Decision()
