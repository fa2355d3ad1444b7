"""Inputs that leave before the last layer (spec §4, paper M App. E.1, "learned early exit" of Table 12).

Shape legend: N layers, M = N - 1 layers before which an input can exit, S segments, d hidden size.
"""

from __future__ import annotations

import math
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from rlcompute.decision import Bypass
from rlcompute.pack import Pack
from rlcompute.policies.ste_gate import SteGate, StepContext
from rlcompute.policies.ste_halting_base import Prior, check_start, terms_of, with_noise
from rlcompute.soft_decision import Carry, SoftBypass, straight_through


class EarlyExit(SteGate):
    """Once an input exits, it passes all later layers unchanged: its embedding is made of its ``<emb>`` row as it is.

    Before layer l >= 1 an input that is left exits with probability e_l = sigmoid(w_l . h/rms(h) + b_l), h its
    ``<emb>`` row, and in inference where e_l > 1/2. The mass of running layer l has the value of the hard decisions
    and the gradient of the relaxed survival, the product of sigmoid(-(logit + noise) / temperature) over layers 1..l,
    or, once an input has exited, over those up to its exit.

    Terms (:func:`rlcompute.policies.ste_halting_base.terms_of`) are over inputs, with e unrelaxed and without noise:
    ``steps`` of layer l is the probability of running it; ``kl`` compares that of exiting before it, in the last layer
    also that of running it, with the prior of as many layers.
    """

    kind: ClassVar[str] = "early_exit"

    def __init__(self, num_layers: int, d: int, *, rate: float, start: float = 0.1) -> None:
        """Args:
        num_layers, d: layers and hidden size of the backbone.
        rate: of the geometric prior over the number of layers that run, in (0, 1).
        start: probability, in (0, 1/2), with which an untrained gate's inputs exit at all.

        Raises:
            ConfigError: a number outside its range.
        """
        super().__init__()
        check_start(self.kind, start)
        self.num_layers, self.rate, self.start = num_layers, rate, start
        self._prior = Prior(rate, num_layers)
        hazard = 1.0 - (1.0 - start) ** (1.0 / (num_layers - 1))
        self.weight_Md = nn.Parameter(torch.zeros(num_layers - 1, d))
        self.bias_M = nn.Parameter(torch.full((num_layers - 1,), math.log(hazard / (1.0 - hazard))))

    def describe(self) -> dict[str, Any]:
        d = self.weight_Md.shape[1]
        return {"num_layers": self.num_layers, "d": d, "rate": self.rate, "start": self.start}

    def summary(self) -> str:
        return (
            f"Early exit: a linear gate at <emb> before each layer but the first; inputs whose logit exceeds "
            f"{float(self.threshold):.3f} pass all later layers unchanged."
        )

    @property
    def _flops(self) -> float:
        return 2.0 * self.weight_Md.shape[1]

    def _margin(self, layer: int, emb_Sd: Tensor) -> Tensor:
        """The logit of exiting before ``layer``, less the threshold, [S]."""
        h_Sd = emb_Sd.to(self.weight_Md.dtype)
        h_Sd = h_Sd * h_Sd.square().mean(dim=1, keepdim=True).clamp_min(1e-12).rsqrt()
        return h_Sd @ self.weight_Md[layer - 1] + self.bias_M[layer - 1] - self.threshold

    def soft_bypass(
        self, layer: int, emb_Sd: Tensor, pack: Pack, segments: Carry, context: StepContext
    ) -> SoftBypass:
        """Masses of running the layer, and its terms. All run the first layer."""
        if layer == 0:
            ones_S = self.threshold.new_ones(pack.num_segments)
            begin = {"run": ones_S, "survival": ones_S, "left": ones_S}
            return SoftBypass(ones_S, 0.0, terms_of(ones_S, torch.zeros_like(ones_S), ones_S), begin)
        margin_S = self._margin(layer, emb_Sd)
        noisy_S = with_noise(margin_S, context.keys_S, layer, pack.emb_only())
        survival_S = segments["survival"] * torch.sigmoid(-noisy_S / context.temperature)
        runs_S = straight_through(noisy_S <= 0, survival_S)
        run_S = torch.where(segments["run"].detach() > 0.5, runs_S, segments["run"])

        left_S = segments["left"] * torch.sigmoid(-margin_S)
        kl_S = self._prior.divergence(segments["left"] - left_S, layer - 1)
        if layer == self.num_layers - 1:
            kl_S = kl_S + self._prior.divergence(left_S, layer)
        terms = terms_of(left_S, kl_S, torch.ones_like(left_S))
        return SoftBypass(run_S, self._flops, terms, {"run": run_S, "survival": survival_S, "left": left_S})

    @torch.no_grad()
    def hard_bypass(self, layer: int, emb_Sd: Tensor, pack: Pack) -> Bypass | None:
        """Skip the layer for the inputs that have exited. They are remembered; layer 0 begins a new pass."""
        if layer == 0:
            self._exited_S = torch.zeros(pack.num_segments, dtype=torch.bool, device=emb_Sd.device)
            return None
        self._exited_S |= self._margin(layer, emb_Sd) > 0
        return Bypass(self._exited_S.clone(), self._flops)
