"""One-shot token pruning: a trained gate removes visual tokens after one layer's mixer (spec §4).

Shape legend: T tokens, d hidden size.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor

from rlcompute.decision import Decision, Signals
from rlcompute.errors import ConfigError
from rlcompute.pack import Pack
from rlcompute.policies.gates import Droppable
from rlcompute.policies.ste_gate import (
    START_LOGIT,
    LinearHeads,
    SteGate,
    StepContext,
    alive_weight,
    relaxed,
    visual_tokens,
)
from rlcompute.soft_decision import Carry, SoftDecision


class TokenPruner(SteGate):
    """Keeps a visual token where its logit lies above the threshold; text and ``<emb>`` stay.

    Terms, in its layer alone: ``kept`` [1], sum of the masses of visual tokens that were alive; ``tokens`` [1], their
    number.
    """

    kind: ClassVar[str] = "token_pruner"
    droppable: Droppable | None = "visual"
    saves_above: ClassVar[bool] = False

    def __init__(self, layer: int, num_layers: int, hidden_size: int) -> None:
        """Args:
        layer: where tokens leave, 0..num_layers-2.
        num_layers: layers of the backbone.
        hidden_size: d.

        Raises:
            ConfigError: no such layer.
        """
        super().__init__()
        if not 0 <= layer <= num_layers - 2:
            raise ConfigError(
                f"ste.prune_layer={layer} cannot prune: this backbone has {num_layers} layers, and in the last only "
                f"<emb> is left; it must lie in 0..{num_layers - 2}"
            )
        self.layer, self.num_layers = layer, num_layers
        self.heads = LinearHeads(1, hidden_size, START_LOGIT)

    def describe(self) -> dict[str, Any]:
        hidden_size = self.heads.weight_nd.shape[1]
        return {"layer": self.layer, "num_layers": self.num_layers, "hidden_size": hidden_size}

    def summary(self) -> str:
        return (
            f"One-shot token pruner: a linear gate after layer {self.layer} of {self.num_layers} removes visual tokens "
            f"whose logit does not exceed {float(self.threshold):.3f}."
        )

    def soft(
        self, layer: int, x_Td: Tensor, signals: Signals, pack: Pack, tokens: Carry, context: StepContext
    ) -> SoftDecision | None:
        """Stay masses under the concrete relaxation."""
        if layer != self.layer:
            return None
        signals.charge(self.heads.flops_per_row)
        keys_T = None if context.keys_S is None else context.keys_S[pack.segment_ids_T]
        logits_T = self.heads(0, x_Td) - self.threshold
        mass_T = relaxed(logits_T, layer, keys_T, pack.token_index_T, context.temperature)
        visual_T = visual_tokens(pack)
        counted_T = visual_T * alive_weight(pack, mass_T)
        terms = {"kept": (mass_T * counted_T).sum()[None], "tokens": counted_T.sum()[None]}
        return SoftDecision(stay=torch.where(visual_T, mass_T, torch.ones_like(mass_T)), terms=terms)

    def hard(self, layer: int, x_Td: Tensor, signals: Signals, pack: Pack) -> Decision | None:
        """Drop visual tokens at or below the threshold."""
        if layer != self.layer:
            return None
        signals.charge(self.heads.flops_per_row)
        # The same difference as in training, whose rounding decides where a logit meets the threshold.
        keep_T = self.heads(0, x_Td) - self.threshold > 0
        return Decision(drop_T=visual_tokens(pack) & ~keep_T)

    def open_logits(self, layer: int, x_Td: Tensor, signals: Signals, pack: Pack) -> Tensor | None:
        """Logits of the visual tokens."""
        return self.heads(0, x_Td)[visual_tokens(pack)] if layer == self.layer else None
