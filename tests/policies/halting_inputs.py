"""Halting gates with random weights, made-up layers for them, and a version that follows one token at a time."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rlcompute.pack import TEXT, Pack
from rlcompute.policies.gates import Droppable
from rlcompute.policies.ste_halting import AvitHalting, BetaHalting, CumulativeHalting
from rlcompute.policies.ste_halting_base import TokenHalting
from rlcompute.soft_decision import Carry
from tests.policies.ste_inputs import (
    D,
    FakeSignals,
    context,
    random_layer,
)

DELTA, ATTENTION = "linear_attention", "full_attention"
LAYER_TYPES = (ATTENTION, DELTA, DELTA, ATTENTION, DELTA, DELTA)
IS_ATTENTION = [kind == ATTENTION for kind in LAYER_TYPES]
N = len(LAYER_TYPES)
RATE = 0.3
KINDS = ("halt_avit", "halt_cumulative", "halt_beta")
Token = tuple[int, int]
"""Segment, and place in the original input."""


def make(kind: str, d: int = D, droppable: Droppable = "visual", start: float = 0.1) -> TokenHalting:
    if kind == "halt_beta":
        return BetaHalting(IS_ATTENTION, rate=RATE, start=start, droppable=droppable)
    made = AvitHalting if kind == "halt_avit" else CumulativeHalting
    return made(N, d, rate=RATE, start=start, droppable=droppable)


def drawn(kind: str, seed: int, d: int = D, droppable: Droppable = "visual") -> TokenHalting:
    """Random weights under which some tokens halt in every layer, and some never."""
    generator = torch.Generator().manual_seed(seed)
    gate = make(kind, d, droppable)
    shift = {"halt_avit": -1.0, "halt_cumulative": 0.4, "halt_beta": -0.7}[kind]
    with torch.no_grad():
        for name, parameter in gate.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(noise * (0.6 / math.sqrt(d) if name == "weight_Md" else 0.4))
            if name in ("bias_M", "center_M"):
                parameter.add_(shift)
        if isinstance(gate, BetaHalting):
            gate.mean_M.fill_(0.5)
            gate.scale_M.fill_(0.12)
        elif isinstance(gate, AvitHalting | CumulativeHalting):
            gate.mean_Nd.copy_(torch.rand(gate.mean_Nd.shape, generator=generator) + 0.5)
            gate.scale_N.copy_(torch.rand(N, generator=generator) + 1.5)
    return gate


class Shown(FakeSignals):
    """Signals whose write strengths are made up."""

    def __init__(self, beta_TV: Tensor) -> None:
        super().__init__(torch.zeros(len(beta_TV), 4))
        self._beta_TV = beta_TV

    @property
    def write_strength_TV(self) -> Tensor:
        return self._beta_TV


@dataclass
class Shows:
    """What all layers show a gate when every token is still there, float64."""

    pack: Pack
    x_NTd: Tensor
    beta_NTV: Tensor

    def soft(self, gate: TokenHalting, keys_S: Tensor | None = None) -> tuple[Tensor, dict[str, Tensor]]:
        """Masses after each layer but the last [N-1,T], and terms by name [N]."""
        carry: Carry = {}
        masses, terms = [torch.ones_like(self.x_NTd[0, :, 0])], []
        told = context(keys_S=keys_S, temperature=1.7)
        for layer in range(N):
            pack, rows = (
                (self.pack, slice(None)) if layer < N - 1 else (self.pack.emb_only(), self.pack.emb_index_S)
            )
            signals = Shown(self.beta_NTV[layer][rows])
            carry = {name: value[rows] for name, value in carry.items()}
            made = gate.soft(layer, self.x_NTd[layer][rows], signals, pack, carry, told)
            carry = made.tokens
            terms.append(made.terms)
            if made.stay is not None:
                masses.append(masses[-1] * made.stay)
        return torch.stack(masses[1:]), {name: torch.cat([t[name] for t in terms]) for name in terms[0]}


def shows(seed: int) -> Shows:
    layers = [random_layer(100 * seed + layer, torch.float64) for layer in range(N)]
    generator = torch.Generator().manual_seed(seed)
    beta = torch.rand(N, len(layers[0].x_Td), 3, generator=generator, dtype=torch.float64)
    return Shows(layers[0].pack, torch.stack([layer.x_Td for layer in layers]), beta)


class OneToken:
    """A gate for a single token, in plain numbers, from what the layers show one after another."""

    def __init__(self, gate: TokenHalting) -> None:
        self.values = {name: value.detach().double().tolist() for name, value in gate.state_dict().items()}
        self.gate, self.layer, self.score, self.strengths = gate, -1, 0.0, list[float]()
        self.q, self.left, self.halted_in = list[float](), 1.0, N - 1

    def _linear(self, x: Sequence[float]) -> float:
        at = self.values
        mean, scale = at["mean_Nd"][self.layer], at["scale_N"][self.layer]
        return sum(w * (v - m) / scale for w, v, m in zip(at["weight_Md"][self.layer], x, mean, strict=True))

    def see(self, x: Sequence[float], beta: Sequence[float]) -> bool:
        """The next layer; whether the token leaves in it."""
        self.layer += 1
        l, at = self.layer, self.values  # noqa: E741
        before, over = self.left, False
        if isinstance(self.gate, AvitHalting):
            h = 1 / (1 + math.exp(-(self.gate.gamma * self._linear(x) + at["bias_M"][l])))
            self.score += h
            over = self.score > 1 - self.gate.eps
            if self.halted_in == N - 1:
                self.left = 0.0 if over else self.left - h
        elif isinstance(self.gate, CumulativeHalting):
            self.score += math.log(1 + math.exp(self._linear(x) + at["bias_M"][l]))
            dropped = 1 / (1 + math.exp(-(self.score - self.gate.c)))
            over, self.left = dropped > 0.5, 1 - dropped
        else:
            if not IS_ATTENTION[l]:
                self.strengths.append(sum(beta) / len(beta))
            if self.strengths:
                z = (sum(self.strengths) / len(self.strengths) - at["mean_M"][l]) / at["scale_M"][l]
                p = 1 / (1 + math.exp(math.log(1 + math.exp(at["slope_M"][l])) * (z - at["center_M"][l])))
                over, self.left = p > 0.5, self.left * (1 - p)
        self.q.append(before - self.left)
        if l == N - 2:
            self.q.append(self.left)
        if over and self.halted_in == N - 1:
            self.halted_in = l
            return True
        return False


def one_by_one(gate: TokenHalting, seen: Shows) -> dict[int, OneToken]:
    """Every token that may halt, by its row, after all layers."""
    followed = {}
    is_emb_T = seen.pack.is_emb_T()
    for row in range(len(is_emb_T)):
        if is_emb_T[row] or (gate.droppable == "visual" and seen.pack.modality_T[row] == TEXT):
            continue
        followed[row] = OneToken(gate)
        for layer in range(N - 1):
            followed[row].see(seen.x_NTd[layer, row].tolist(), seen.beta_NTV[layer, row].tolist())
    return followed


def prior(n: int) -> float:
    """Truncated geometric distribution of the number of layers."""
    return RATE * (1 - RATE) ** (n - 1) / sum(RATE * (1 - RATE) ** (m - 1) for m in range(1, N + 1))
