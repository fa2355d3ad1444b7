"""The decision types that policies return, and the words for actions.

Shape legend: T tokens that reach the mixture-of-experts block of a layer, S segments, d hidden size,
k selected experts per token.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from torch import Tensor

from rlcompute.pack import Pack

ROUTE, SKIP, DROP = 0, 1, 2
ACTION_NAMES = ("route", "skip", "drop")


class Signals(Protocol):
    """What a policy may read of a layer besides the hidden states.

    Everything is computed when first read, so a policy that ignores it costs nothing; what is computed for the policy
    alone is charged to it (:attr:`rlcompute.trace.Trace.signal_flops_NS`).
    """

    @property
    def expert_ids_Tk(self) -> Tensor:
        """int64 [T,k], selected experts, highest weight first."""
        ...

    @property
    def weights_Tk(self) -> Tensor:
        """[T,k] in the hidden dtype, renormalised over the selected experts."""
        ...

    @property
    def router_logits_TE(self) -> Tensor:
        """[T,E] in the hidden dtype, what the router's softmax reads."""
        ...

    @property
    def write_strength_TV(self) -> Tensor:
        """β of Gated DeltaNet (spec §2), one a value head, in (0,1).

        Raises:
            BackendError: the layer has no Gated DeltaNet (:attr:`BackboneLayer.is_attention`).
        """
        ...

    def received_attention_T(self, *, from_emb: bool) -> Tensor:
        """Attention probability that each token receives, mean over heads: [T], float32 at least.

        Args:
            from_emb: from the ``<emb>`` token of its segment alone; otherwise the sum over all queries that see it.

        No fast kernel yields it: scores are computed again, query by key.

        Raises:
            BackendError: the layer has no attention map.
        """
        ...

    def charge(self, flops_per_token: float) -> None:
        """Adds the cost of a decision that :attr:`Policy.gate_flops_per_token`, the same in all layers, does not say.

        Charged to every token that reaches this layer's decision, each time it is called.
        """
        ...


@dataclass(frozen=True)
class Decision:
    """What to do with each token in one layer.

    Attributes:
        drop_T: bool, tokens removed here: no experts, shared or routed, in this layer and nothing in later ones.
            None drops nothing. ``<emb>`` tokens stay whatever it says.
        keep: bool, which routed experts run: [T] for all or none of a token's experts, [T,k] slot by slot.
            None runs all. Whatever it says of a dropped token is ignored.
        renormalize: divide the weights of what runs by their sum (what lowering ``num_experts_per_tok`` does).
        top_k: at most this many of a token's experts run, those of the highest weight (``keep`` may then be
            [T,top_k]); None sets no limit.
    """

    drop_T: Tensor | None = None
    keep: Tensor | None = None
    renormalize: bool = False
    top_k: int | None = None

    def take(self, index_U: Tensor) -> Decision:
        """What is left to execute for the tokens at ``index_U`` (int64), once dropped tokens are gone."""
        keep = None if self.keep is None else self.keep[index_U]
        return Decision(keep=keep, top_k=self.top_k, renormalize=self.renormalize)


class Policy(Protocol):
    """Whoever decides. Called once per layer, in order, with what the layer's experts would read.

    A policy may carry what it saw from layer to layer; layer 0 begins a new pass.
    """

    gate_flops_per_token: float
    """FLOPs that one decision costs, charged to every decided token of every layer."""

    def decide(self, layer: int, x_Td: Tensor, signals: Signals, pack: Pack) -> Decision:
        """The decision for the T tokens ``x_Td`` (post-attention-norm hidden states) of layer ``layer``."""
        ...


@dataclass(frozen=True)
class Bypass:
    """Which segments pass a layer unchanged: no mixer, no decision, no experts.

    Attributes:
        skip_S: bool, true for those.
        flops_per_segment: cost of this decision, charged to all S segments.
    """

    skip_S: Tensor
    flops_per_segment: float


@runtime_checkable
class BypassingPolicy(Policy, Protocol):
    """A policy that may also leave whole layers out.

    Where all segments pass a layer, ``decide`` is not called for it. Where some do, it is called with the tokens of the
    others: their segments keep their numbers, those that pass have no tokens in its pack. A policy that carries
    something from layer to layer begins with layer 0, which all segments should therefore run where one takes part.
    """

    def bypass(self, layer: int, emb_Sd: Tensor, pack: Pack) -> Bypass | None:
        """Called before layer ``layer``, the last one too; None if all segments run it.

        Args:
            layer: number of the layer.
            emb_Sd: the ``<emb>`` rows of its input, in the hidden dtype.
            pack: all tokens that are left.
        """
        ...


def bypass_of(policy: Policy, layer: int, emb_Sd: Tensor, pack: Pack) -> Bypass | None:
    """What a policy that may or may not bypass layers says (:meth:`BypassingPolicy.bypass`)."""
    return policy.bypass(layer, emb_Sd, pack) if isinstance(policy, BypassingPolicy) else None


class Full:
    """Full compute: every token runs every selected expert of every layer."""

    gate_flops_per_token = 0.0

    def decide(self, layer: int, x_Td: Tensor, signals: Signals, pack: Pack) -> Decision:
        """Decide nothing away."""
        return Decision()
