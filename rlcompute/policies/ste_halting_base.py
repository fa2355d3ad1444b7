"""Gates under which a token halts after as many layers as it needs (spec §4, "halting").

In every layer but the last a score of the token grows, and where it passes a bound the token halts: it is dropped after
that layer's mixer. ``<emb>`` never halts, and text only where ``droppable`` says so. Training compares the probability
q_l of halting in layer l with a geometric prior and charges the expected number of layers (:class:`Prior`).

Decisions are straight-through on the whole history: the mass with which a token is left after layer l has the value of
the hard decisions and the gradient of the relaxed survival A, taken in layer l, or, of a token that has halted, in the
layer in which it did (layers after that decided nothing).

Shape legend: N layers, T tokens of the pack, d hidden size.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rlcompute.decision import Decision, Signals
from rlcompute.errors import ConfigError
from rlcompute.pack import Pack
from rlcompute.policies.gates import Droppable
from rlcompute.policies.ste_gate import SteGate, StepContext, logistic_noise, visual_tokens
from rlcompute.policies.token_rules import RunningScore
from rlcompute.soft_decision import Carry, SoftDecision, Terms, straight_through


@dataclass(frozen=True)
class Prior:
    """Number of layers before halting, n = 1..N, a priori: P(n) = r (1-r)^(n-1) / (1 - (1-r)^N).

    Attributes:
        rate: r, in (0, 1): how likely it is to halt in a layer.
        num_layers: N.
    """

    rate: float
    num_layers: int

    def __post_init__(self) -> None:
        """Raises:
        ConfigError: a rate outside (0, 1), or fewer than two layers.
        """
        if not 0.0 < self.rate < 1.0:
            raise ConfigError(f"halting: rate of the geometric prior lies in (0, 1); got {self.rate}")
        if self.num_layers < 2:
            raise ConfigError(f"halting needs at least 2 layers; this backbone has {self.num_layers}")

    def log(self, layer: int) -> float:
        """Logarithm of the probability that ``layer`` (from 0) is the last one, n = layer + 1."""
        stay = 1.0 - self.rate
        return (
            math.log(self.rate)
            + layer * math.log(stay)
            - math.log(-math.expm1(self.num_layers * math.log(stay)))
        )

    def divergence(self, q: Tensor, layer: int) -> Tensor:
        """q log(q / P), the layer's part of the Kullback-Leibler divergence; 0 with a finite gradient at q = 0."""
        return q * (q.clamp_min(torch.finfo(q.dtype).tiny).log() - self.log(layer))


def terms_of(steps: Tensor, kl: Tensor, tokens: Tensor) -> Terms:
    """What a halting gate sums up in a layer, each [1].

    Args:
        steps: probabilities of being there when the layer begins. Over all layers they add up to the tokens' expected
            number of layers: E[N_halt] = steps summed over layers / tokens of one layer.
        kl: q_l log(q_l / prior), q_l being the probability of halting in this layer. Its sum over layers is the
            divergence of every token's q from the prior.
        tokens: how many there were when layer 0 began, 1 each; the same in all layers.
    """
    each = {"steps": steps, "kl": kl, "tokens": tokens}
    return {name: values.sum().reshape(1) for name, values in each.items()}


def with_noise(margin_T: Tensor, keys_S: Tensor | None, layer: int, pack: Pack) -> Tensor:
    """Margins plus the logistic noise that the pack's tokens draw in a layer; as they are without keys."""
    if keys_S is None:
        return margin_T
    noise_T = logistic_noise(keys_S[pack.segment_ids_T], layer, pack.token_index_T)
    return margin_T + noise_T.to(margin_T.dtype)


def check_start(kind: str, start: float) -> None:
    """Raises:
    ConfigError: a probability of halting that a gate cannot begin with.
    """
    if not 0.0 < start < 0.5:
        raise ConfigError(f"{kind}: start lies in (0, 1/2), to begin near full compute; got {start}")


@dataclass(frozen=True)
class Chances:
    """Of every token after a layer.

    Attributes:
        over_T: bool, passes the bound in this layer.
        survival_T: A, relaxed probability of having passed it in none; what decisions are differentiated by.
        left_T: 1 - q_0 - ... - q_l.
    """

    over_T: Tensor
    survival_T: Tensor
    left_T: Tensor


class TokenHalting(SteGate):
    """What the gates over tokens have in common: the running score, the bound, and the sums.

    Terms (:func:`terms_of`) are over the tokens that may halt, with q unrelaxed and without noise; q of the last layer
    is what is left. Tokens that another gate drops are counted on.
    """

    def __init__(self, num_layers: int, *, rate: float, start: float, droppable: Droppable) -> None:
        """Args:
        num_layers: layers of the backbone.
        rate: of the geometric prior, in (0, 1).
        start: probability, in (0, 1/2), with which an untrained gate's tokens halt before the last layer.
        droppable: which tokens may halt.

        Raises:
            ConfigError: a number outside its range.
        """
        super().__init__()
        check_start(self.kind, start)
        self.num_layers, self.rate, self.start, self.droppable = num_layers, rate, start, droppable
        self._prior = Prior(rate, num_layers)
        self._running = RunningScore()

    def describe(self) -> dict[str, Any]:
        return {"rate": self.rate, "start": self.start, "droppable": self.droppable}

    def summary(self) -> str:
        tokens = "visual tokens" if self.droppable == "visual" else "all tokens but <emb>"
        return (
            f"Halting ({self.kind}): {tokens} leave in the layer in which their score passes its bound by more than "
            f"{float(self.threshold):.3f}."
        )

    @property
    def _last(self) -> int:
        return self.num_layers - 1

    @abstractmethod
    def _increment(self, layer: int, x_Td: Tensor, signals: Signals) -> Tensor | None:
        """What the layer adds to the tokens' scores, [T]; charges its cost. None: nothing."""

    @abstractmethod
    def _margin(self, layer: int, score_T: Tensor) -> Tensor | None:
        """By how much a token's score, increments of layers 0..``layer``, passes the bound, [T]; positive halts.

        None: in this layer nothing halts.
        """

    @abstractmethod
    def _chances(
        self, layer: int, margin_T: Tensor, before: Carry, pack: Pack, context: StepContext
    ) -> Chances:
        """From the margin and the ``survival`` and ``left`` of the layer before."""

    def _score(self, layer: int, x_Td: Tensor, signals: Signals, before_T: Tensor) -> Tensor:
        increment_T = self._increment(layer, x_Td, signals)
        return before_T if increment_T is None else before_T + increment_T.double()

    def may_halt(self, pack: Pack) -> Tensor:
        """Which tokens the gate is about, bool [T]."""
        return visual_tokens(pack) if self.droppable == "visual" else ~pack.is_emb_T()

    def _begin(self, pack: Pack) -> Carry:
        ones_T = self.threshold.new_ones(len(pack.segment_ids_T))
        over_T = torch.zeros_like(ones_T, dtype=torch.bool)
        return {"score": over_T.double(), "survival": ones_T, "left": ones_T, "over": over_T}

    def soft(
        self, layer: int, x_Td: Tensor, signals: Signals, pack: Pack, tokens: Carry, context: StepContext
    ) -> SoftDecision:
        """Masses with which tokens are left, and the layer's terms."""
        if layer == self._last:
            # Only <emb> tokens are here; the sums of the others were handed on with them.
            return SoftDecision(terms=terms_of(*tokens["last"][0]))
        before = self._begin(pack) if layer == 0 else tokens
        may_T, over_T = self.may_halt(pack), before["over"]
        score_T = self._score(layer, x_Td, signals, before["score"])
        margin_T = self._margin(layer, score_T)
        if margin_T is None:
            now = Chances(torch.zeros_like(over_T), before["survival"], before["left"])
        else:
            now = self._chances(layer, margin_T, before, pack, context)
        halts_T = now.over_T & may_T & ~over_T
        # The product of a token's masses is to change by dA_l, of which the factors before give dA_(l-1) if it stays,
        # and nothing if it halts, because this one is 0 then.
        surrogate_T = now.survival_T - torch.where(halts_T, 0.0, before["survival"])
        stay_T = torch.where(may_T, straight_through(~halts_T, surrogate_T), 1.0)

        may_T = may_T.to(now.left_T.dtype)
        steps_T, left_T = before["left"] * may_T, now.left_T * may_T
        terms = terms_of(steps_T, self._prior.divergence(steps_T - left_T, layer), may_T)
        if layer < self._last - 1:
            carry = {
                "score": score_T,
                "survival": now.survival_T,
                "left": now.left_T,
                "over": over_T | halts_T,
            }
        else:
            last = terms_of(left_T, self._prior.divergence(left_T, self._last), may_T)
            carry = {"last": torch.stack([*last.values()], dim=1).expand(len(x_Td), -1)}
        return SoftDecision(stay=stay_T, terms=terms, tokens=carry)

    @torch.no_grad()
    def hard(self, layer: int, x_Td: Tensor, signals: Signals, pack: Pack) -> Decision | None:
        """Drop the tokens that pass the bound. Scores are kept from layer to layer; layer 0 begins a new pass."""
        if layer == self._last:
            return None
        if layer == 0:
            self._running.begin(pack)
        increment_T = self._increment(layer, x_Td, signals)
        if increment_T is not None:
            self._running.add(increment_T.double(), pack)
        margin_T = self._margin(layer, self._running.total(pack))
        return None if margin_T is None else Decision(drop_T=(margin_T > 0) & self.may_halt(pack))
