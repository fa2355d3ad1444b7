"""Sets of straight-through gates: one policy in training and one after it, in one checkpoint (spec §4).

Shape legend: T tokens, S segments, N layers, d hidden size, k selected experts.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from rlcompute.decision import Bypass, BypassingPolicy, Decision, Signals
from rlcompute.errors import CheckpointError
from rlcompute.pack import Pack
from rlcompute.policies.combined import Combined
from rlcompute.policies.gates import Droppable
from rlcompute.policies.ste_early_exit import EarlyExit
from rlcompute.policies.ste_expert_skip import ExpertSkip
from rlcompute.policies.ste_gate import SteGate, StepContext
from rlcompute.policies.ste_halting import AvitHalting, BetaHalting, CumulativeHalting
from rlcompute.policies.ste_layer_skip import LayerSkip
from rlcompute.policies.ste_null_experts import NullExperts
from rlcompute.policies.ste_pruner import TokenPruner
from rlcompute.soft_decision import Carry, SoftBypass, SoftDecision, SoftPolicy

__all__ = ["Observed", "SteGate", "StepContext", "StraightThroughGates"]


_CLASSES: tuple[type[SteGate], ...] = (
    TokenPruner,
    ExpertSkip,
    LayerSkip,
    NullExperts,
    AvitHalting,
    CumulativeHalting,
    BetaHalting,
    EarlyExit,
)
_BY_KIND = {gate.kind: gate for gate in _CLASSES}


class Observed:
    """Logits of the decisions of a pass, by kind, a tensor for each layer that decided and each pass."""

    def __init__(self) -> None:
        self.logits: dict[str, list[Tensor]] = {}

    def add(self, kind: str, logits: Tensor | None) -> None:
        """Note the logits of one layer, if there are any."""
        if logits is not None and logits.numel():
            self.logits.setdefault(kind, []).append(logits.detach().flatten())


class _GatePolicy:
    """One gate in packed inference."""

    gate_flops_per_token = 0.0  # gates charge what they compute, where they do

    def __init__(self, gate: SteGate, observed: Observed | None) -> None:
        self._gate, self._observed = gate, observed

    @torch.no_grad()
    def bypass(self, layer: int, emb_Sd: Tensor, pack: Pack) -> Bypass | None:
        """The gate's decision over segments."""
        if self._observed is not None:
            self._observed.add(self._gate.kind, self._gate.open_bypass_logits(layer, emb_Sd, pack))
        return self._gate.hard_bypass(layer, emb_Sd, pack)

    @torch.no_grad()
    def decide(self, layer: int, x_Td: Tensor, signals: Signals, pack: Pack) -> Decision:
        """The gate's decision over tokens."""
        if self._observed is not None:
            self._observed.add(self._gate.kind, self._gate.open_logits(layer, x_Td, signals, pack))
        return self._gate.hard(layer, x_Td, signals, pack) or Decision()


class _SoftPolicy:
    """All gates in training: masses multiply, so that whoever says no is enough."""

    def __init__(self, gates: Sequence[SteGate], context: StepContext) -> None:
        self._gates, self._context = gates, context

    def bypass(self, layer: int, emb_Sd: Tensor, pack: Pack, segments: Carry) -> SoftBypass | None:
        """Masses of running the layer."""
        merged: SoftBypass | None = None
        for gate in self._gates:
            made = gate.soft_bypass(layer, emb_Sd, pack, _own(segments, gate.kind), self._context)
            if made is None:
                continue
            terms, carry = _named(made.terms, gate.kind), _named(made.segments, gate.kind)
            if merged is None:
                merged = replace(made, terms=terms, segments=carry)
                continue
            merged = SoftBypass(
                run_S=merged.run_S * made.run_S,
                flops_per_segment=merged.flops_per_segment + made.flops_per_segment,
                terms={**merged.terms, **terms},
                segments={**merged.segments, **carry},
            )
        return merged

    def decide(self, layer: int, x_Td: Tensor, signals: Signals, pack: Pack, tokens: Carry) -> SoftDecision:
        """Masses of tokens and of their experts."""
        merged = SoftDecision()
        for gate in self._gates:
            made = gate.soft(layer, x_Td, signals, pack, _own(tokens, gate.kind), self._context)
            if made is None:
                continue
            merged = SoftDecision(
                stay=_product(merged.stay, made.stay),
                experts=_product(merged.experts, made.experts),
                renormalize=merged.renormalize or made.renormalize,
                terms={**merged.terms, **_named(made.terms, gate.kind)},
                tokens={**merged.tokens, **_named(made.tokens, gate.kind)},
            )
        return merged


def _named(values: Carry, kind: str) -> dict[str, Tensor]:
    return {f"{kind}/{name}": value for name, value in values.items()}


def _own(values: Carry, kind: str) -> dict[str, Tensor]:
    """What :func:`_named` named, by its own names again."""
    prefix = f"{kind}/"
    return {name.removeprefix(prefix): value for name, value in values.items() if name.startswith(prefix)}


def _product(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    """Of masses [T] or [T,k]; None is 1."""
    if a is None or b is None:
        return b if a is None else a
    if a.ndim != b.ndim:
        a, b = (mass[:, None] if mass.ndim == 1 else mass for mass in (a, b))
    return a * b


class StraightThroughGates(nn.Module):
    """Gates of different kinds, in the order in which they are trained; float32.

    Terms and carried values of each are named ``kind/name`` (the gates' docstrings list theirs).
    """

    kind: ClassVar[str] = "straight_through"

    def __init__(self, gates: Sequence[SteGate]) -> None:
        """Args:
        gates: at most one of a kind.
        """
        super().__init__()
        self.gates = nn.ModuleDict({gate.kind: gate for gate in gates})

    def _each(self) -> list[SteGate]:
        return [gate for gate in self.gates.values() if isinstance(gate, SteGate)]

    @property
    def droppable(self) -> Droppable:
        """Which tokens the gates may drop between them; "visual" also if they drop none."""
        return "all" if any(gate.droppable == "all" for gate in self._each()) else "visual"

    def soft_policy(self, context: StepContext) -> SoftPolicy:
        """The decisions of one training step, with gradients into the gates."""
        return _SoftPolicy(self._each(), context)

    def policy(self, observed: Observed | None = None) -> BypassingPolicy:
        """The decisions of packed inference.

        Args:
            observed: notes the logits that decide, for :meth:`settle`.
        """
        return Combined([_GatePolicy(gate, observed) for gate in self._each()])

    def settle(self, observed: Mapping[str, Sequence[Tensor]], rates: Mapping[str, float]) -> None:
        """Set thresholds so that hard decisions have the rates that were wanted.

        What one gate decides changes the logits of later layers: observe again to see what became of the rates.

        Args:
            observed: logits by kind, from :class:`Observed`, of all inputs that are to be counted.
            rates: share of logits above the threshold by kind (:meth:`SteGate.settle`); other gates keep theirs.
        """
        for gate in self._each():
            if gate.kind in rates:
                gate.settle(observed[gate.kind], rates[gate.kind])

    def thresholds(self) -> dict[str, Tensor]:
        """Thresholds by kind, scalars."""
        return {gate.kind: gate.threshold for gate in self._each()}

    def shifted(self, amount: float) -> StraightThroughGates:
        """Gates whose thresholds are moved by ``amount`` towards saving more."""
        shifted = copy.deepcopy(self)
        for gate in shifted._each():
            gate.shift(amount)
        return shifted

    def tensors(self) -> dict[str, Tensor]:
        """Parameters and buffers on the CPU, float32, by ``kind.name``."""
        return {
            name: tensor.detach().to("cpu", torch.float32, copy=True).contiguous()
            for name, tensor in self.gates.state_dict().items()
        }

    def describe(self) -> dict[str, Any]:
        """What else they are made of (JSON): constructor's arguments by kind, in order."""
        return {gate.kind: gate.describe() for gate in self._each()}

    @classmethod
    def create(cls, description: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Self:
        """The gates of :meth:`describe` and :meth:`tensors`.

        Raises:
            CheckpointError: an unknown kind, or tensors that do not fit the description.
        """
        unknown = sorted(set(description) - set(_BY_KIND))
        if unknown:
            raise CheckpointError(
                f"unknown kind of gate {unknown[0]!r}: this version has {', '.join(_BY_KIND)}"
            )
        gates = cls([_BY_KIND[kind].create(arguments) for kind, arguments in description.items()])
        try:
            gates.gates.load_state_dict(dict(tensors), strict=True)
        except RuntimeError as error:
            raise CheckpointError(
                f"the tensors do not fit the gates {', '.join(description)}: {error}; export the gates again"
            ) from error
        return gates

    def summary(self) -> list[str]:
        """What the gates are, for people: a sentence each."""
        return [gate.summary() for gate in self._each()]
