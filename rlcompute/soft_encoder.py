"""The forward that gates are trained through: every token computed, decisions as masses (spec §4).

The same layers as :mod:`rlcompute.encoder`, over all tokens in every layer. What a token does to others is multiplied
by its mass, so that masses of 0 and 1 give what the packed forward computes on the survivors, and what a dropped token
would have done still has a gradient. Mixers read the masses from :attr:`rlcompute.pack.Pack.alive`.

Shape legend: T tokens of the pack, S segments, R tokens of a layer's decision (T, and S in the last layer), N layers,
d hidden size, k selected experts, n sums of one name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from rlcompute.backbones.base import Backbone, BackboneLayer, Selection
from rlcompute.decision import ACTION_NAMES, DROP, ROUTE, SKIP
from rlcompute.encoder import LayerSignals
from rlcompute.pack import MODALITY_NAMES, Alive, Pack
from rlcompute.soft_decision import Carry, SoftDecision, SoftPolicy, Terms
from rlcompute.trace import Trace


@dataclass(frozen=True)
class SoftEncoded:
    """Result of one pass, everything with gradients.

    Attributes:
        embeddings_Sd: unit norm, float32 at least.
        trace: counts as masses, float64; for masses of 0 and 1 equal to the packed forward's.
            ``expert_rows_NE`` has no columns.
        actions_NM3: int64 decisions by layer, modality (text, image, video) and action; a bypassed token counts as
            skipped.
        terms: what the gates summed up, by name: [L,n] with a row for each layer that gave that name, in order.
    """

    embeddings_Sd: Tensor
    trace: Trace
    actions_NM3: Tensor
    terms: Mapping[str, Tensor]


@dataclass(frozen=True)
class _State:
    """What goes from layer to layer."""

    h_Td: Tensor
    mass_T: Tensor
    tokens: Carry
    segments: Carry


@dataclass(frozen=True)
class _Layer:
    """What a layer leaves besides its state; the counts are rows of a :class:`Trace`."""

    counts: Mapping[str, Tensor]
    actions_M3: Tensor
    terms: Terms


def _by_segment(mass_R: Tensor, pack: Pack) -> Tensor:
    """Masses of the pack's tokens added up, float64 [S]."""
    zeros_S = mass_R.new_zeros(pack.num_segments, dtype=torch.float64)
    return zeros_S.index_add(0, pack.segment_ids_T, mass_R.double())


def _actions(reached_R: Tensor, decided_R: Tensor, stays_R: Tensor, executes_R: Tensor, pack: Pack) -> Tensor:
    """Decisions by modality and action, int64 [3,3], from what is true of each token."""
    action_R = torch.where(decided_R & executes_R, ROUTE, SKIP)
    action_R = torch.where(decided_R & ~stays_R, DROP, action_R)
    cell_R = pack.modality_T.long() * len(ACTION_NAMES) + action_R
    size = len(MODALITY_NAMES) * len(ACTION_NAMES)
    return torch.bincount(cell_R[reached_R], minlength=size).view(len(MODALITY_NAMES), -1)


def _routed(
    backbone: Backbone, layer: BackboneLayer, x_Rd: Tensor, chosen: Selection, decision: SoftDecision
) -> tuple[Tensor, Tensor]:
    """Output of the routed experts, masses applied [R,d], and the masses of the slots [R,k]."""
    ids_Rk, weights_Rk = chosen.expert_ids_Tk, chosen.weights_Tk
    mass = decision.experts
    if mass is None:
        slots_Rk = torch.ones_like(weights_Rk)
    else:
        slots_Rk = mass.to(weights_Rk.dtype)
        slots_Rk = slots_Rk[:, None].expand_as(weights_Rk) if slots_Rk.ndim == 1 else slots_Rk
    weights_Rk = weights_Rk * slots_Rk
    if decision.renormalize:
        total_R1 = weights_Rk.sum(dim=-1, keepdim=True)
        # A token that keeps nothing has nothing to divide by: its gradient is that of the plain sum.
        weights_Rk = weights_Rk / torch.where(total_R1.detach() > 0, total_R1, torch.ones_like(total_R1))
    plan = backbone.kernels.routing_plan(ids_Rk, None, backbone.num_experts)
    experts = layer.experts
    out_Rd = backbone.kernels.experts(x_Rd, plan, weights_Rk, experts.gate_up_E2Fd, experts.down_EdF)
    return out_Rd, slots_Rk


def _layer(
    backbone: Backbone, index: int, state: _State, pack: Pack, policy: SoftPolicy
) -> tuple[_State, _Layer]:
    """One layer for all tokens; its counts are float64 [S]."""
    layer, is_last = backbone.layers[index], index == backbone.num_layers - 1
    h_Td, mass_T = state.h_Td, state.mass_T
    entering = replace(pack, alive=Alive(mass_T, mass_T.detach() > 0.5))
    bypass = policy.bypass(index, h_Td[pack.emb_index_S], entering, state.segments)
    run_S = mass_T.new_ones(pack.num_segments) if bypass is None else bypass.run_S.to(mass_T.dtype)

    rows_R: Tensor | slice = pack.emb_index_S if is_last else slice(None)
    deciding = pack.emb_only() if is_last else pack
    # Who decides counts the tokens that are there and whose segment runs the layer.
    reached_R, run_R = mass_T[rows_R], run_S[deciding.segment_ids_T]
    decided_R = reached_R * run_R
    deciding = replace(deciding, alive=Alive(decided_R, decided_R.detach() > 0.5))
    tokens = {name: carried[rows_R] for name, carried in state.tokens.items()}
    mixed_Rd = layer.mix_emb(h_Td, entering) if is_last else layer.mix(h_Td, entering)
    x_Rd = layer.moe_input(mixed_Rd)
    signals = LayerSignals(layer, x_Rd, h_Td, entering, is_last)
    decision = policy.decide(index, x_Rd, signals, deciding, tokens)
    reads_router = signals.computed
    routed_Rd, slots_Rk = _routed(backbone, layer, x_Rd, signals.selection, decision)
    out_Rd = mixed_Rd + layer.shared(x_Rd) + routed_Rd

    run_T = run_S[pack.segment_ids_T]
    if bypass is not None:
        out_Rd = h_Td[rows_R] + run_R[:, None].to(out_Rd.dtype) * (out_Rd - h_Td[rows_R])
    stay_R = torch.ones_like(run_R) if decision.stay is None else decision.stay.to(mass_T.dtype)
    # A bypassed token is counted nowhere in this layer, a dropped one leaves before the experts.
    survived_R = decided_R * stay_R
    decided_S = _by_segment(decided_R, deciding)
    executing_R = survived_R * slots_Rk.amax(dim=1)
    flops_S = signals.token_flops * decided_S + signals.flops_S.to(decided_S)
    counts = {
        "entered_NS": _by_segment(mass_T * run_T, pack),
        "decided_NS": decided_S,
        "survived_NS": _by_segment(survived_R, deciding),
        "routed_NS": decided_S if reads_router else _by_segment(executing_R, deciding),
        "rows_NS": _by_segment(survived_R * slots_Rk.sum(dim=1), deciding),
        "bypassed_NS": _by_segment(mass_T * (1.0 - run_T), pack),
        "signal_flops_NS": flops_S if bypass is None else flops_S + bypass.flops_per_segment,
    }
    mass_R = reached_R * (1.0 - run_R * (1.0 - stay_R))
    terms = {**({} if bypass is None else bypass.terms), **decision.terms}
    segments = state.segments if bypass is None else bypass.segments
    actions_M3 = _actions(
        reached_R.detach() > 0.5,
        decided_R.detach() > 0.5,
        stay_R.detach() > 0.5,
        slots_Rk.detach().amax(dim=1) > 0.5,
        deciding,
    )
    return _State(out_Rd, mass_R, decision.tokens, segments), _Layer(counts, actions_M3, terms)


def encode_soft(
    backbone: Backbone, hidden_Td: Tensor, pack: Pack, policy: SoftPolicy, *, recompute: bool = False
) -> SoftEncoded:
    """Embed every segment of a pack with gradients into the policy.

    Args:
        backbone: the frozen model (or one with trainable adapters).
        hidden_Td: inputs of the first layer, [T,d], from :meth:`Backbone.pack`.
        pack: where the tokens belong.
        policy: decides; ``<emb>`` tokens must have mass 1.
        recompute: keep only each layer's input for the backward pass and compute the layer again there.
    """
    wide = torch.promote_types(hidden_Td.dtype, torch.float32)
    mass_T = torch.ones(len(hidden_Td), dtype=wide, device=hidden_Td.device)
    state, layers = _State(hidden_Td, mass_T, {}, {}), []
    for index in range(backbone.num_layers):
        if recompute:
            state, layer = checkpoint(_layer, backbone, index, state, pack, policy, use_reentrant=False)
        else:
            state, layer = _layer(backbone, index, state, pack, policy)
        layers.append(layer)
    normed = backbone.final_norm(state.h_Td)
    counts = {name: torch.stack([layer.counts[name] for layer in layers]) for name in layers[0].counts}
    no_experts = torch.zeros(len(layers), 0, dtype=torch.int64)
    terms: dict[str, list[Tensor]] = {}
    for layer in layers:
        for name, values in layer.terms.items():
            terms.setdefault(name, []).append(values)
    return SoftEncoded(
        F.normalize(normed.to(wide), dim=-1),
        Trace(expert_rows_NE=no_experts, **counts),
        torch.stack([layer.actions_M3 for layer in layers]),
        {name: torch.stack(values) for name, values in terms.items()},
    )
