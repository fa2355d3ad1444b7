"""The one loop that every policy runs through.

Packed tokens go through the layers; in each, the policy decides which tokens leave and which routed experts
run, and only what is left is computed. A policy may also let segments pass a layer unchanged: then the others go
through it by themselves. In the last layer nothing but the ``<emb>`` rows is computed, for every policy alike, because
nothing else is read.

Shape legend: T tokens before the decision, U tokens after it, R tokens that go to the router, P tokens of segments
that run a layer, S segments, N layers, d hidden size, k selected experts, E experts.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor

from rlcompute.backbones.base import Backbone, BackboneLayer, Selection
from rlcompute.decision import BypassingPolicy, Decision, Policy
from rlcompute.pack import Pack
from rlcompute.trace import Trace


@dataclass(frozen=True)
class Encoded:
    """Result of one pass: unit-norm embeddings, float32 at least, [S,d], and what was executed."""

    embeddings_Sd: Tensor
    trace: Trace


class LayerSignals:
    """What the policy may read of a layer (:class:`rlcompute.decision.Signals`), computed when first read.

    Attributes:
        flops_S: float64, cost of attention maps.
        token_flops: cost of everything else that was read or charged, for each token that reaches the decision.
    """

    def __init__(
        self, layer: BackboneLayer, x_Td: Tensor, entering_Ud: Tensor, entering: Pack, is_last: bool
    ) -> None:
        """Args:
        layer: the layer.
        x_Td: what its experts read.
        entering_Ud: hidden states before its mixer.
        entering: their pack. In the last layer only the ``<emb>`` tokens of it are among the T.
        is_last: whether this is the last layer.
        """
        self._layer, self._x_Td = layer, x_Td
        self._entering_Ud, self._entering, self._is_last = entering_Ud, entering, is_last
        self.flops_S = torch.zeros(entering.num_segments, dtype=torch.float64)
        self.token_flops = 0.0

    @cached_property
    def selection(self) -> Selection:
        """The router's choice."""
        return self._layer.route(self._x_Td)

    @property
    def computed(self) -> bool:
        """Whether the policy has read the router's choice."""
        return "selection" in self.__dict__

    @property
    def expert_ids_Tk(self) -> Tensor:
        return self.selection.expert_ids_Tk

    @property
    def weights_Tk(self) -> Tensor:
        return self.selection.weights_Tk

    @property
    def router_logits_TE(self) -> Tensor:
        return self.selection.logits_TE

    @cached_property
    def write_strength_TV(self) -> Tensor:
        h_Td = self._entering_Ud[self._entering.emb_index_S] if self._is_last else self._entering_Ud
        self.charge(self._layer.cost.strength_token)
        return self._layer.write_strength(h_Td)

    def received_attention_T(self, *, from_emb: bool) -> Tensor:
        pack = self._entering
        received_T, flops_S = self._layer.received_attention(self._entering_Ud, pack, from_emb=from_emb)
        self.flops_S += flops_S
        return received_T[pack.emb_index_S] if self._is_last else received_T

    def charge(self, flops_per_token: float) -> None:
        self.token_flops += flops_per_token


class _Chosen:
    """What the experts run on: of all tokens if the policy has read it, otherwise computed for those that are left."""

    def __init__(self, layer: BackboneLayer, x_Td: Tensor, known: tuple[Tensor, Tensor] | None) -> None:
        self._layer, self._x_Td, self._known = layer, x_Td, known

    def experts(self) -> tuple[Tensor, Tensor]:
        """Expert numbers int64 [T,k] and weights [T,k]."""
        return self._known or self._layer.route(self._x_Td)[:2]

    def take(self, index_U: Tensor, x_Ud: Tensor) -> _Chosen:
        """The same of some tokens: routing the others is dead work unless the policy asked for it."""
        known = None if self._known is None else (self._known[0][index_U], self._known[1][index_U])
        return _Chosen(self._layer, x_Ud, known)


def _executing_rows(keep: Tensor) -> Tensor | None:
    """Tokens that go to the router, int64 [R]; None for all.

    On a CPU those that run at least one expert. Elsewhere their number would have to be waited for: all tokens go,
    and the plan leaves out what is not kept.
    """
    if keep.device.type != "cpu":
        return None
    rows_R = (keep if keep.ndim == 1 else keep.any(dim=1)).nonzero().squeeze(1)
    return rows_R if len(rows_R) < len(keep) else None


def _routed_experts(
    backbone: Backbone, layer: BackboneLayer, x_Rd: Tensor, chosen: _Chosen, decision: Decision
) -> tuple[Tensor, Tensor, Tensor]:
    """Outputs of the kept experts [R,d], kept experts per token [R], and rows per expert [E]."""
    (ids_Rk, weights_Rk), keep = chosen.experts(), decision.keep
    if decision.top_k is not None:
        ids_Rk, weights_Rk = ids_Rk[:, : decision.top_k], weights_Rk[:, : decision.top_k]
        keep = keep if keep is None or keep.ndim == 1 else keep[:, : decision.top_k]
    if keep is not None and keep.ndim == 1:
        # On a CPU only tokens that keep all their experts are here.
        keep = None if keep.device.type == "cpu" else keep[:, None].expand_as(ids_Rk)
    if decision.renormalize:
        weights_Rk = weights_Rk if keep is None else weights_Rk * keep
        smallest = torch.finfo(weights_Rk.dtype).tiny
        weights_Rk = weights_Rk / weights_Rk.sum(dim=-1, keepdim=True).clamp_min(smallest)
    kernels, experts = backbone.kernels, layer.experts
    plan = kernels.routing_plan(ids_Rk, keep, backbone.num_experts)
    out_Rd = kernels.experts(x_Rd, plan, weights_Rk, experts.gate_up_E2Fd, experts.down_EdF)
    kept_R = ids_Rk.new_full(ids_Rk.shape[:1], ids_Rk.shape[1]) if keep is None else keep.sum(dim=1)
    return out_Rd, kept_R, plan.counts


@dataclass(frozen=True)
class _Stepped:
    """What is left after a layer.

    Attributes:
        h_Ud: hidden states; in the last layer those of ``<emb>`` alone.
        pack: where they belong.
        index_U: their rows among those that reached the decision; None if all are left.
        executed: the layer's row of the trace.
    """

    h_Ud: Tensor
    pack: Pack
    index_U: Tensor | None
    executed: Trace


def _step(backbone: Backbone, index: int, h_Td: Tensor, pack: Pack, policy: Policy) -> _Stepped:
    """One layer for all tokens of the pack."""
    layer, is_last = backbone.layers[index], index == backbone.num_layers - 1
    entered_S, entering_Ud, entering = pack.lengths_S, h_Td, pack
    if is_last:
        h_Td, pack = layer.mix_emb(h_Td, pack), pack.emb_only()
    else:
        h_Td = layer.mix(h_Td, pack)
    x_Td = layer.moe_input(h_Td)
    decided_S = pack.lengths_S
    signals = LayerSignals(layer, x_Td, entering_Ud, entering, is_last)
    decision = policy.decide(index, x_Td, signals, pack)
    chosen = _Chosen(layer, x_Td, signals.selection[:2] if signals.computed else None)

    index_U = None
    if decision.drop_T is not None:
        # Dropped tokens leave before the shared expert too: their output of this layer is never read.
        stays_T = ~decision.drop_T
        stays_T[pack.emb_index_S] = True
        index_U, cu_seqlens = backbone.kernels.compaction(stays_T, pack.cu_seqlens)
        h_Td, x_Td, pack = h_Td[index_U], x_Td[index_U], pack.take(index_U, cu_seqlens)
        chosen, decision = chosen.take(index_U, x_Td), decision.take(index_U)
    h_Td = h_Td + layer.shared(x_Td)

    segments_R = pack.segment_ids_T
    rows_R = None if decision.keep is None else _executing_rows(decision.keep)
    if rows_R is not None:
        x_Td, segments_R = x_Td[rows_R], segments_R[rows_R]
        chosen, decision = chosen.take(rows_R, x_Td), decision.take(rows_R)
    out_Rd, kept_R, expert_rows_E = _routed_experts(backbone, layer, x_Td, chosen, decision)
    h_Td = h_Td.add_(out_Rd) if rows_R is None else h_Td.index_add_(0, rows_R, out_Rd)

    zeros_S = kept_R.new_zeros(pack.num_segments)
    routed_S = zeros_S.index_add(0, segments_R, torch.ones_like(segments_R))
    if signals.computed:
        routed_S = decided_S.to(zeros_S.device, non_blocking=True)
    executed = Trace(
        entered_S,
        decided_S,
        survived_NS=pack.lengths_S,
        routed_NS=routed_S,
        rows_NS=zeros_S.index_add(0, segments_R, kept_R),
        expert_rows_NE=expert_rows_E,
        signal_flops_NS=signals.flops_S + signals.token_flops * decided_S,
        bypassed_NS=torch.zeros_like(entered_S),
    )
    return _Stepped(h_Td, pack, index_U, executed)


def _passed(backbone: Backbone, h_Td: Tensor, pack: Pack, is_last: bool) -> _Stepped:
    """A layer that every segment passes unchanged."""
    left = pack.emb_only() if is_last else pack
    zeros_S = torch.zeros_like(pack.cu_seqlens[1:])
    rows_S = zeros_S.to(h_Td.device)
    executed = Trace(
        entered_NS=zeros_S,
        decided_NS=zeros_S,
        survived_NS=zeros_S,
        routed_NS=rows_S,
        rows_NS=rows_S,
        expert_rows_NE=rows_S.new_zeros(backbone.num_experts),
        signal_flops_NS=zeros_S.double(),
        bypassed_NS=pack.lengths_S,
    )
    return _Stepped(h_Td[pack.emb_index_S] if is_last else h_Td, left, None, executed)


def _partly_passed(
    backbone: Backbone, index: int, h_Td: Tensor, pack: Pack, policy: Policy, skip_S: Tensor
) -> _Stepped:
    """A layer that the segments of ``skip_S`` (bool, on the CPU) pass unchanged; the others run it by themselves."""
    lengths_S, device = pack.lengths_S, h_Td.device
    passed_S = lengths_S * skip_S
    passes_T = torch.repeat_interleave(skip_S, lengths_S)
    rows_P = (~passes_T).nonzero().squeeze(1).to(device, non_blocking=True)
    running = pack.take(rows_P, _bounds(lengths_S - passed_S))
    ran = _step(backbone, index, h_Td[rows_P], running, policy)
    executed = replace(ran.executed, bypassed_NS=passed_S)
    if index == backbone.num_layers - 1:
        rows_P = (~skip_S).nonzero().squeeze(1).to(device, non_blocking=True)
        h_Sd = h_Td[pack.emb_index_S].index_copy(0, rows_P, ran.h_Ud)
        return _Stepped(h_Sd, pack.emb_only(), None, executed)
    if ran.index_U is None:
        return _Stepped(h_Td.index_copy(0, rows_P, ran.h_Ud), pack, None, executed)
    rows_P = rows_P[ran.index_U]
    h_Td = h_Td.index_copy(0, rows_P, ran.h_Ud)
    left_T = passes_T.to(device, non_blocking=True).index_fill(0, rows_P, True)
    left_S = passed_S + ran.pack.lengths_S
    index_U = torch.nonzero_static(left_T, size=int(left_S.sum())).squeeze(1)
    return _Stepped(h_Td[index_U], pack.take(index_U, _bounds(left_S)), index_U, executed)


def _bounds(lengths_S: Tensor) -> Tensor:
    """cu_seqlens of segments of these lengths."""
    return F.pad(lengths_S.cumsum(0), (1, 0))


def _bypassing_step(
    backbone: Backbone, index: int, h_Td: Tensor, pack: Pack, policy: BypassingPolicy
) -> _Stepped:
    """One layer of a policy that may let segments pass it."""
    bypass = policy.bypass(index, h_Td[pack.emb_index_S], pack)
    if bypass is None:
        return _step(backbone, index, h_Td, pack, policy)
    skip_S = bypass.skip_S.cpu()
    if bool(skip_S.all()):
        stepped = _passed(backbone, h_Td, pack, index == backbone.num_layers - 1)
    elif bool(skip_S.any()):
        stepped = _partly_passed(backbone, index, h_Td, pack, policy, skip_S)
    else:
        stepped = _step(backbone, index, h_Td, pack, policy)
    flops_S = stepped.executed.signal_flops_NS + bypass.flops_per_segment
    return replace(stepped, executed=replace(stepped.executed, signal_flops_NS=flops_S))


@torch.no_grad()
def encode(backbone: Backbone, hidden_Td: Tensor, pack: Pack, policy: Policy) -> Encoded:
    """Embed every segment of a packed batch under a policy.

    With :class:`rlcompute.decision.Full` the result equals transformers' own forward followed by L2
    normalisation of the ``<emb>`` row (spec §1).

    Args:
        backbone: the frozen model.
        hidden_Td: inputs of the first layer, [T,d], from :meth:`Backbone.pack`.
        pack: where the tokens belong.
        policy: decides per layer; ``<emb>`` tokens stay whatever it says. A :class:`BypassingPolicy` is also asked
            which segments run a layer at all.
    """
    h_Td, steps = hidden_Td, []
    bypassing = policy if isinstance(policy, BypassingPolicy) else None
    for index in range(backbone.num_layers):
        if bypassing is None:
            stepped = _step(backbone, index, h_Td, pack, policy)
        else:
            stepped = _bypassing_step(backbone, index, h_Td, pack, bypassing)
        h_Td, pack = stepped.h_Ud, stepped.pack
        steps.append(stepped.executed)
    normed = backbone.final_norm(h_Td)
    wide = torch.promote_types(normed.dtype, torch.float32)
    trace = Trace(**{f.name: torch.stack([getattr(step, f.name) for step in steps]) for f in fields(Trace)})
    return Encoded(F.normalize(normed.to(wide), dim=-1), trace)
