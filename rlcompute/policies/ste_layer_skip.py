"""Layer skipping: a trained gate at the ``<emb>`` token says which inputs pass a layer unchanged (spec §4).

Shape legend: S segments, d hidden size.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor

from rlcompute.decision import Bypass
from rlcompute.errors import ConfigError
from rlcompute.pack import Pack
from rlcompute.policies.ste_gate import START_LOGIT, LinearHeads, SteGate, StepContext, relaxed
from rlcompute.soft_decision import Carry, SoftBypass


class LayerSkip(SteGate):
    """Skips mixer and experts of a layer for a whole input where the logit lies above the threshold.

    The logit is linear in the ``<emb>`` row that enters the layer, divided by its root mean square; it needs no other
    standardisation.

    Terms, per layer that may be skipped: ``skipped`` [1], sum over inputs of the masses that do not run it; ``inputs``
    [1], their number.
    """

    kind: ClassVar[str] = "layer_skip"
    saves_above: ClassVar[bool] = True

    def __init__(self, first: int, num_layers: int, hidden_size: int) -> None:
        """Args:
        first: first layer that may be skipped, 0..num_layers-1.
        num_layers: layers of the backbone.
        hidden_size: d.

        Raises:
            ConfigError: no such layer.
        """
        super().__init__()
        if not 0 <= first < num_layers:
            raise ConfigError(
                f"ste.layer_first={first}: this backbone has the layers 0..{num_layers - 1}; give one of them"
            )
        self.first, self.num_layers = first, num_layers
        self.heads = LinearHeads(num_layers - first, hidden_size, -START_LOGIT)

    def describe(self) -> dict[str, Any]:
        hidden_size = self.heads.weight_nd.shape[1]
        return {"first": self.first, "num_layers": self.num_layers, "hidden_size": hidden_size}

    def summary(self) -> str:
        return (
            f"Layer skipping: a linear gate at <emb> before each of the layers {self.first} to {self.num_layers - 1}; "
            f"inputs whose logit exceeds {float(self.threshold):.3f} pass the layer unchanged."
        )

    def _logits(self, layer: int, emb_Sd: Tensor) -> Tensor:
        emb_Sd = emb_Sd.to(self.heads.weight_nd.dtype)
        square_S1 = emb_Sd.square().mean(dim=1, keepdim=True)
        logits_S: Tensor = self.heads(
            layer - self.first, emb_Sd / square_S1.sqrt().clamp_min(torch.finfo(emb_Sd.dtype).eps)
        )
        return logits_S

    def soft_bypass(
        self, layer: int, emb_Sd: Tensor, pack: Pack, segments: Carry, context: StepContext
    ) -> SoftBypass | None:
        """Masses of running the layer, under the concrete relaxation."""
        if layer < self.first:
            return None
        logits_S = self._logits(layer, emb_Sd) - self.threshold
        index_S = pack.token_index_T[pack.emb_index_S]
        skip_S = relaxed(logits_S, layer, context.keys_S, index_S, context.temperature)
        terms = {"skipped": skip_S.sum()[None], "inputs": torch.ones_like(skip_S).sum()[None]}
        return SoftBypass(1.0 - skip_S, self.heads.flops_per_row, terms)

    def hard_bypass(self, layer: int, emb_Sd: Tensor, pack: Pack) -> Bypass | None:
        """Skip the layer for inputs above the threshold."""
        if layer < self.first:
            return None
        return Bypass(self._logits(layer, emb_Sd) - self.threshold > 0, self.heads.flops_per_row)

    def open_bypass_logits(self, layer: int, emb_Sd: Tensor, pack: Pack) -> Tensor | None:
        """Logits of all inputs."""
        return self._logits(layer, emb_Sd) if layer >= self.first else None
