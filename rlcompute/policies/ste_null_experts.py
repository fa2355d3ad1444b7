"""Null experts: candidates of the router's top-k that cost nothing (AdaMoE, Zeng et al. 2024; spec §4).

Shape legend: T tokens, N layers, d hidden size, E real experts, Z null experts, k slots.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rlcompute.backbones.base import Backbone
from rlcompute.decision import Decision, Full, Signals
from rlcompute.encoder import encode
from rlcompute.pack import EmbeddedInput, Pack
from rlcompute.policies.ste_gate import SteGate, StepContext, alive_weight
from rlcompute.soft_decision import Carry, SoftDecision, straight_through

FLOOR_SHARE = 0.05
"""Share of tokens that lose an expert to a null at the start."""


class NullExperts(SteGate):
    """The k best of real and null experts together fill a token's slots; what nulls win is not run.

    A null's logit is linear in what the router reads, plus the threshold. The real expert of rank j (from 0) is among
    the k best iff its logit exceeds the (k-j)-th largest null logit, which leaves a prefix of the router's own choice.
    Their weights are renormalised. A token may keep none.

    Terms, per layer, over alive tokens: ``real`` [1], sum of the masses of slots that real experts fill; ``counts``
    [E+1], slots by real expert and, last, those that nulls won divided by the number of nulls, without gradient;
    ``probs`` [E+Z], sums of the softmax over real and null experts; ``tokens`` [1], number of tokens.
    """

    kind: ClassVar[str] = "null_experts"
    saves_above: ClassVar[bool] = False

    def __init__(self, count: int, num_layers: int, hidden_size: int) -> None:
        """Args:
        count: null experts in each layer, at least 1.
        num_layers: layers of the backbone.
        hidden_size: d.
        """
        super().__init__()
        self.weight_NZd = nn.Parameter(torch.zeros(num_layers, count, hidden_size))
        self.bias_NZ = nn.Parameter(torch.zeros(num_layers, count))

    def start_at(self, floor_N: Tensor) -> None:
        """Set the nulls' initial logits of each layer (:func:`router_floor`)."""
        with torch.no_grad():
            self.bias_NZ.copy_(floor_N[:, None].expand_as(self.bias_NZ))

    def describe(self) -> dict[str, Any]:
        num_layers, count, hidden_size = self.weight_NZd.shape
        return {"count": count, "num_layers": num_layers, "hidden_size": hidden_size}

    def summary(self) -> str:
        num_layers, count, _ = self.weight_NZd.shape
        return (
            f"Null experts: {count} beside the real ones in each of {num_layers} layers; slots of the joint top-k that "
            f"they win are not run (their logits are raised by {float(self.threshold):.3f})."
        )

    def _null_logits(self, layer: int, x_Td: Tensor) -> Tensor:
        weight_Zd = self.weight_NZd[layer]
        return torch.addmm(self.bias_NZ[layer], x_Td.to(weight_Zd.dtype), weight_Zd.t())

    def _margins(self, null_TZ: Tensor, signals: Signals) -> Tensor:
        """By how much each selected expert exceeds the null that competes for its slot, [T,k]."""
        real_TE = signals.router_logits_TE.to(null_TZ.dtype)
        real_Tk = real_TE.gather(1, signals.expert_ids_Tk)
        k = real_Tk.shape[1]
        best = null_TZ.topk(min(k, null_TZ.shape[1]), dim=1).values
        # With fewer nulls than slots, nothing competes for the first ones.
        competing_Tk = F.pad(best, (0, k - best.shape[1]), value=-math.inf).flip(1)
        return real_Tk - competing_Tk

    def _charge(self, signals: Signals) -> None:
        signals.charge(2.0 * self.weight_NZd[0].numel())

    def soft(
        self, layer: int, x_Td: Tensor, signals: Signals, pack: Pack, tokens: Carry, context: StepContext
    ) -> SoftDecision | None:
        """Masses of the slots [T,k]; nothing is drawn."""
        self._charge(signals)
        null_TZ = self._null_logits(layer, x_Td)
        margin_Tk = self._margins(null_TZ, signals) - self.threshold
        mass_Tk = straight_through(margin_Tk > 0, torch.sigmoid(margin_Tk / context.temperature))
        terms = self._terms(mass_Tk, null_TZ, signals, alive_weight(pack, mass_Tk))
        return SoftDecision(experts=mass_Tk, renormalize=True, terms=terms)

    def _terms(
        self, mass_Tk: Tensor, null_TZ: Tensor, signals: Signals, alive_T: Tensor
    ) -> dict[str, Tensor]:
        logits_TE = signals.router_logits_TE.to(null_TZ.dtype)
        counted_Tk = mass_Tk * alive_T[:, None]
        zeros_E = counted_Tk.new_zeros(logits_TE.shape[1])
        counts_E = zeros_E.index_add(0, signals.expert_ids_Tk.flatten(), counted_Tk.detach().flatten())
        null_slots = alive_T.sum() * mass_Tk.shape[1] - counts_E.sum()
        probs_TC = torch.cat([logits_TE, null_TZ + self.threshold], dim=1).softmax(dim=1)
        return {
            "real": counted_Tk.sum()[None],
            "counts": torch.cat([counts_E, null_slots[None] / null_TZ.shape[1]]),
            "probs": alive_T @ probs_TC,
            "tokens": alive_T.sum()[None],
        }

    def hard(self, layer: int, x_Td: Tensor, signals: Signals, pack: Pack) -> Decision | None:
        """Run the slots that no null wins."""
        self._charge(signals)
        margin_Tk = self._margins(self._null_logits(layer, x_Td), signals)
        return Decision(keep=margin_Tk - self.threshold > 0, renormalize=True)

    def open_logits(self, layer: int, x_Td: Tensor, signals: Signals, pack: Pack) -> Tensor | None:
        """Margins of the slots that nulls compete for."""
        margin_Tk = self._margins(self._null_logits(layer, x_Td), signals)
        return margin_Tk[margin_Tk.isfinite()]


class _LowestSelected:
    """Full compute that keeps the router's logit of the last slot."""

    gate_flops_per_token = 0.0

    def __init__(self, num_layers: int) -> None:
        self.lowest: list[list[Tensor]] = [[] for _ in range(num_layers)]

    def decide(self, layer: int, x_Td: Tensor, signals: Signals, pack: Pack) -> Decision:
        lowest_T1 = signals.router_logits_TE.gather(1, signals.expert_ids_Tk[:, -1:])
        self.lowest[layer].append(lowest_T1[:, 0].float().cpu())
        return Full().decide(layer, x_Td, signals, pack)


def router_floor(backbone: Backbone, inputs: Sequence[EmbeddedInput], *, batch_size: int = 64) -> Tensor:
    """The logit below which the router's last choice falls for a share :data:`FLOOR_SHARE` of tokens, float32 [N].

    Null experts that start there cost few tokens an expert, whatever the scale of the router's logits.
    """
    seen = _LowestSelected(backbone.num_layers)
    for start in range(0, len(inputs), batch_size):
        encode(backbone, *backbone.pack(inputs[start : start + batch_size]), seen)
    lowest = [torch.cat(layer) for layer in seen.lowest]
    return torch.stack([x_T.kthvalue(math.ceil(FLOOR_SHARE * len(x_T))).values for x_T in lowest])
