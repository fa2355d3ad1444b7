"""The token gates among the paper's negative results (spec §4, paper M App. E.1, Table 12).

What they share is in :mod:`rlcompute.policies.ste_halting_base`; whole inputs exit in
:mod:`rlcompute.policies.ste_early_exit`.

Shape legend: N layers, M = N - 1 layers in which tokens can halt, T tokens of the pack, d hidden size.
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
from rlcompute.errors import ConfigError
from rlcompute.pack import EmbeddedInput, Pack
from rlcompute.policies.gates import Droppable
from rlcompute.policies.ste_gate import StepContext
from rlcompute.policies.ste_halting_base import Chances, TokenHalting, with_noise
from rlcompute.soft_decision import Carry


class _LearnedHalting(TokenHalting):
    """Scores from a linear head per layer on the standardised input x of the experts."""

    def __init__(self, num_layers: int, d: int, *, rate: float, start: float, droppable: Droppable) -> None:
        super().__init__(num_layers, rate=rate, start=start, droppable=droppable)
        self.weight_Md = nn.Parameter(torch.zeros(num_layers - 1, d))
        self.bias_M = nn.Parameter(torch.zeros(num_layers - 1))
        self.register_buffer("mean_Nd", torch.zeros(num_layers, d))
        self.register_buffer("scale_N", torch.ones(num_layers))
        self.mean_Nd: Tensor
        self.scale_N: Tensor

    def describe(self) -> dict[str, Any]:
        num_layers, d = self.mean_Nd.shape
        return {"num_layers": num_layers, "d": d, **super().describe()}

    def _head(self, layer: int, x_Td: Tensor, signals: Signals) -> Tensor:
        """w . x, [T], without the bias."""
        signals.charge(2.0 * x_Td.shape[1])
        x_Td = (x_Td.to(self.mean_Nd.dtype) - self.mean_Nd[layer]) / self.scale_N[layer]
        return x_Td @ self.weight_Md[layer]


class AvitHalting(_LearnedHalting):
    """A-ViT (Yin et al., 2022) with a learned projection where it reads the first channel.

    In every layer a token adds h_l = sigmoid(gamma (w_l . x) + beta_l), and halts in the layer D in which the sum H_l
    passes 1 - eps. q_l = h_l before D, the remainder 1 - H_(D-1) in D. A_l = 1 - H_l. Nothing is drawn.
    """

    kind: ClassVar[str] = "halt_avit"

    def __init__(
        self,
        num_layers: int,
        d: int,
        *,
        rate: float,
        start: float = 0.1,
        gamma: float = 5.0,
        eps: float = 0.01,
        droppable: Droppable = "visual",
    ) -> None:
        """Args:
        num_layers, d: layers and hidden size of the backbone.
        rate, start, droppable: see :class:`TokenHalting`; ``start`` is an untrained sum of h.
        gamma: sharpness of h, A-ViT's gate scale.
        eps: distance of the bound from 1, in (0, 1).

        Raises:
            ConfigError: a number outside its range.
        """
        super().__init__(num_layers, d, rate=rate, start=start, droppable=droppable)
        if not 0.0 < eps < 1.0:
            raise ConfigError(f"{self.kind}: eps lies in (0, 1); got {eps}")
        self.gamma, self.eps = gamma, eps
        h = start / (num_layers - 1)
        nn.init.constant_(self.bias_M, math.log(h / (1.0 - h)))

    def describe(self) -> dict[str, Any]:
        return {**super().describe(), "gamma": self.gamma, "eps": self.eps}

    def _increment(self, layer: int, x_Td: Tensor, signals: Signals) -> Tensor:
        return torch.sigmoid(self.gamma * self._head(layer, x_Td, signals) + self.bias_M[layer])

    def _margin(self, layer: int, score_T: Tensor) -> Tensor:
        return score_T.to(self.threshold.dtype) - (1.0 - self.eps) - self.threshold

    def _chances(
        self, layer: int, margin_T: Tensor, before: Carry, pack: Pack, context: StepContext
    ) -> Chances:
        survival_T = self.eps - self.threshold - margin_T
        over_T = margin_T > 0
        return Chances(over_T, survival_T, survival_T.clamp_min(0.0).masked_fill(over_T, 0.0))


class CumulativeHalting(_LearnedHalting):
    """A drop logit that only grows.

    A layer adds softplus(w_l . x + b_l) to the logit z, which begins at -c; a token halts once sigmoid(z) passes 1/2.
    q_l is the growth of sigmoid(z), A_l = sigmoid(-(z + n) / temperature) with noise n drawn once for all layers, so
    that a token halts in layer l with probability q_l.
    """

    kind: ClassVar[str] = "halt_cumulative"

    def __init__(
        self,
        num_layers: int,
        d: int,
        *,
        rate: float,
        start: float = 0.1,
        c: float = 4.0,
        droppable: Droppable = "visual",
    ) -> None:
        """Args:
        num_layers, d: layers and hidden size of the backbone.
        rate, start, droppable: see :class:`TokenHalting`.
        c: how far the logit begins below zero.

        Raises:
            ConfigError: a number outside its range; c is to leave room below ``start``.
        """
        super().__init__(num_layers, d, rate=rate, start=start, droppable=droppable)
        growth = c + math.log(start / (1.0 - start))
        if growth <= 0.0:
            raise ConfigError(f"{self.kind}: sigmoid(-c) must lie below start {start}; got c {c}")
        self.c = c
        nn.init.constant_(self.bias_M, math.log(math.expm1(growth / (num_layers - 1))))

    def describe(self) -> dict[str, Any]:
        return {**super().describe(), "c": self.c}

    def _increment(self, layer: int, x_Td: Tensor, signals: Signals) -> Tensor:
        return F.softplus(self._head(layer, x_Td, signals) + self.bias_M[layer])

    def _margin(self, layer: int, score_T: Tensor) -> Tensor:
        return score_T.to(self.threshold.dtype) - self.c - self.threshold

    def _chances(
        self, layer: int, margin_T: Tensor, before: Carry, pack: Pack, context: StepContext
    ) -> Chances:
        noisy_T = with_noise(margin_T, context.keys_S, self.num_layers, pack)
        return Chances(noisy_T > 0, torch.sigmoid(-noisy_T / context.temperature), torch.sigmoid(-margin_T))


class BetaHalting(TokenHalting):
    """Halts tokens that Gated DeltaNet writes weakly.

    z is the standardised mean over the Gated DeltaNet layers so far of the write strength beta (mean over heads). In
    layer l a token that is left halts with probability p_l = sigmoid(-softplus(a_l) (z - b_l)): low beta first,
    whatever is learned. A layer with attention reads the mean as it is; before any Gated DeltaNet nothing halts.
    q_l = p_l (1-p_0) ... (1-p_(l-1)); A_l is the product of the relaxed 1 - p, with noise drawn anew in each layer.
    """

    kind: ClassVar[str] = "halt_beta"

    def __init__(
        self,
        is_attention: Sequence[bool],
        *,
        rate: float,
        start: float = 0.1,
        droppable: Droppable = "visual",
    ) -> None:
        """Args:
        is_attention: of each layer of the backbone, whether it has attention instead of Gated DeltaNet.
        rate, start, droppable: see :class:`TokenHalting`; ``start`` is that of a token of mean beta.

        Raises:
            ConfigError: a number outside its range, or no Gated DeltaNet before the last layer.
        """
        super().__init__(len(is_attention), rate=rate, start=start, droppable=droppable)
        self.is_attention = tuple(is_attention)
        if all(self.is_attention[:-1]):
            raise ConfigError(
                f"{self.kind}: no layer before the last has a write strength; use another halting gate"
            )
        deciding = self.num_layers - 1 - self.is_attention.index(False)
        hazard = 1.0 - (1.0 - start) ** (1.0 / deciding)
        # softplus(a) begins at 1, so that a token of mean beta (z = 0) halts with the logit b.
        self.slope_M = nn.Parameter(torch.full((self.num_layers - 1,), math.log(math.expm1(1.0))))
        self.center_M = nn.Parameter(torch.full((self.num_layers - 1,), math.log(hazard / (1.0 - hazard))))
        self.register_buffer("mean_M", torch.zeros(self.num_layers - 1))
        self.register_buffer("scale_M", torch.ones(self.num_layers - 1))
        self.mean_M: Tensor
        self.scale_M: Tensor

    def describe(self) -> dict[str, Any]:
        return {"is_attention": list(self.is_attention), **super().describe()}

    def calibrate(self, backbone: Backbone, inputs: Sequence[EmbeddedInput], *, batch_size: int = 64) -> None:
        """Set the mean and standard deviation by which beta's running mean is standardised, under full compute."""
        moments = _StrengthMoments(self)
        for begin in range(0, len(inputs), batch_size):
            encode(backbone, *backbone.pack(inputs[begin : begin + batch_size]), moments)
        mean_M = moments.sum_M / moments.count_M.clamp_min(1.0)
        variance_M = moments.square_M / moments.count_M.clamp_min(1.0) - mean_M.square()
        self.mean_M.copy_(mean_M)
        self.scale_M.copy_(variance_M.clamp_min(1e-12).sqrt())

    def mean_strength(self, layer: int, score_T: Tensor) -> Tensor | None:
        """Running mean of beta, [T], from its sum; None before the first Gated DeltaNet."""
        count = self.is_attention[: layer + 1].count(False)
        return score_T / count if count else None

    def _increment(self, layer: int, x_Td: Tensor, signals: Signals) -> Tensor | None:
        if self.is_attention[layer]:
            return None
        return signals.write_strength_TV.to(self.mean_M.dtype).mean(dim=1)

    def _margin(self, layer: int, score_T: Tensor) -> Tensor | None:
        strength_T = self.mean_strength(layer, score_T)
        if strength_T is None:
            return None
        z_T = (strength_T.to(self.mean_M.dtype) - self.mean_M[layer]) / self.scale_M[layer]
        return -F.softplus(self.slope_M[layer]) * (z_T - self.center_M[layer]) - self.threshold

    def _chances(
        self, layer: int, margin_T: Tensor, before: Carry, pack: Pack, context: StepContext
    ) -> Chances:
        noisy_T = with_noise(margin_T, context.keys_S, layer, pack)
        return Chances(
            noisy_T > 0,
            before["survival"] * torch.sigmoid(-noisy_T / context.temperature),
            before["left"] * torch.sigmoid(-margin_T),
        )


class _StrengthMoments:
    """Full compute that sums up the running means of beta over the tokens that may halt."""

    gate_flops_per_token = 0.0

    def __init__(self, gate: BetaHalting) -> None:
        self._gate = gate
        self.sum_M = torch.zeros(gate.num_layers - 1, dtype=torch.float64)
        self.square_M, self.count_M = self.sum_M.clone(), self.sum_M.clone()

    def decide(self, layer: int, x_Td: Tensor, signals: Signals, pack: Pack) -> Decision:
        if layer == 0:
            self._score_T = torch.zeros(len(x_Td), dtype=torch.float64)
        if layer < self._gate.num_layers - 1:
            if not self._gate.is_attention[layer]:
                self._score_T += signals.write_strength_TV.double().mean(dim=1).cpu()
            strength_T = self._gate.mean_strength(layer, self._score_T)
            if strength_T is not None:
                chosen = strength_T[self._gate.may_halt(pack).cpu()]
                self.sum_M[layer] += chosen.sum()
                self.square_M[layer] += chosen.square().sum()
                self.count_M[layer] += len(chosen)
        return Full().decide(layer, x_Td, signals, pack)
