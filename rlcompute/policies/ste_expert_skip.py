"""Expert skipping: a trained gate per layer says which tokens run no routed experts (spec §4).

Shape legend: T tokens, N layers, d hidden size.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor

from rlcompute.decision import Decision, Signals
from rlcompute.pack import Pack
from rlcompute.policies.ste_gate import START_LOGIT, LinearHeads, SteGate, StepContext, alive_weight
from rlcompute.soft_decision import Carry, SoftDecision


class ExpertSkip(SteGate):
    """Skips where ``p = sigmoid(logit - threshold)`` lies above one half.

    Trained as a soft fade, ``h = v + (1 - p) u`` with the routed output u and the rest v of a layer; nothing is drawn.

    Terms, per layer: ``skipped`` [1], sum over alive tokens of what is taken from the routed output (p, or its
    straight-through decision where the context is hard); ``tokens`` [1], their number.
    """

    kind: ClassVar[str] = "expert_skip"
    saves_above: ClassVar[bool] = True

    def __init__(self, num_layers: int, hidden_size: int) -> None:
        """Args:
        num_layers: layers of the backbone.
        hidden_size: d.
        """
        super().__init__()
        self.heads = LinearHeads(num_layers, hidden_size, -START_LOGIT)

    def describe(self) -> dict[str, Any]:
        num_layers, hidden_size = self.heads.weight_nd.shape
        return {"num_layers": num_layers, "hidden_size": hidden_size}

    def summary(self) -> str:
        return (
            f"Expert skipping: a linear gate in each of {len(self.heads.bias_n)} layers; tokens whose logit exceeds "
            f"{float(self.threshold):.3f} run no routed experts there."
        )

    def soft(
        self, layer: int, x_Td: Tensor, signals: Signals, pack: Pack, tokens: Carry, context: StepContext
    ) -> SoftDecision | None:
        """Masses of the routed output, 1 - p."""
        signals.charge(self.heads.flops_per_row)
        logits_T = self.heads(layer, x_Td) - self.threshold
        mass_T = torch.sigmoid(-logits_T)
        counted_T = alive_weight(pack, mass_T)
        terms = {"skipped": ((1.0 - mass_T) * counted_T).sum()[None], "tokens": counted_T.sum()[None]}
        return SoftDecision(experts=mass_T, terms=terms)

    def hard(self, layer: int, x_Td: Tensor, signals: Signals, pack: Pack) -> Decision | None:
        """Run the experts of tokens at or below the threshold."""
        signals.charge(self.heads.flops_per_row)
        return Decision(keep=self.heads(layer, x_Td) - self.threshold <= 0)

    def open_logits(self, layer: int, x_Td: Tensor, signals: Signals, pack: Pack) -> Tensor | None:
        """Logits of all tokens."""
        logits_T: Tensor = self.heads(layer, x_Td)
        return logits_T
