"""What a straight-through gate is: a decision with gradients in training, the same without them after (spec §4).

Shape legend: T tokens, S segments, n layers with a head, d hidden size.
"""

from __future__ import annotations

from abc import ABC
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from rlcompute.decision import Bypass, Decision, Signals
from rlcompute.errors import CheckpointError
from rlcompute.pack import TEXT, Pack
from rlcompute.policies.draws import uniform
from rlcompute.policies.gates import Droppable
from rlcompute.soft_decision import Carry, SoftBypass, SoftDecision, straight_through

START_LOGIT = 3.0
"""Logit for compute at the start: it is left out with a probability of 5 %, which leaves gradients to learn by."""


@dataclass(frozen=True)
class StepContext:
    """What a training step tells the gates.

    Attributes:
        temperature: of the relaxed decisions, above 0.
        keys_S: int64 noise keys, one a segment (:func:`rlcompute.policies.draws.rollout_key`); None: no noise, so the
            values are what packed inference decides, but for those of expert skip, which fade.
    """

    temperature: float
    keys_S: Tensor | None


class SteGate(nn.Module, ABC):
    """One kind of action: some logits, and a threshold that decides.

    A subclass overrides what its action needs: :meth:`soft` and :meth:`hard` to decide over tokens, :meth:`soft_bypass`
    and :meth:`hard_bypass` over segments. Parameters and buffers are float32; ``threshold`` is a buffer, 0 until
    :meth:`settle`.

    Attributes:
        kind: name of the action in the configuration.
        droppable: which tokens the gate may drop; None if none.
        saves_above: whether a logit above the threshold saves compute, or spends it.
    """

    kind: ClassVar[str]
    droppable: Droppable | None = None
    saves_above: ClassVar[bool] = True
    threshold: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("threshold", torch.zeros(()))

    def soft(
        self, layer: int, x_Td: Tensor, signals: Signals, pack: Pack, tokens: Carry, context: StepContext
    ) -> SoftDecision | None:
        """The decision over tokens with gradients (:meth:`rlcompute.soft_decision.SoftPolicy.decide`); None: no say."""
        return None

    def soft_bypass(
        self, layer: int, emb_Sd: Tensor, pack: Pack, segments: Carry, context: StepContext
    ) -> SoftBypass | None:
        """The decision over segments with gradients (:meth:`rlcompute.soft_decision.SoftPolicy.bypass`)."""
        return None

    def hard(self, layer: int, x_Td: Tensor, signals: Signals, pack: Pack) -> Decision | None:
        """The decision of packed inference; its cost is charged to ``signals``. None: no say in this layer."""
        return None

    def hard_bypass(self, layer: int, emb_Sd: Tensor, pack: Pack) -> Bypass | None:
        """Which segments packed inference takes past this layer; None: no say."""
        return None

    def open_logits(self, layer: int, x_Td: Tensor, signals: Signals, pack: Pack) -> Tensor | None:
        """Logits of the decisions that :meth:`hard` takes in this layer, any shape; what :meth:`settle` reads."""
        return None

    def open_bypass_logits(self, layer: int, emb_Sd: Tensor, pack: Pack) -> Tensor | None:
        """The same of :meth:`hard_bypass`."""
        return None

    def settle(self, logits: Sequence[Tensor], rate: float) -> None:
        """Set the one threshold so that of all these logits a share ``rate`` lies above it.

        Args:
            logits: what :meth:`open_logits` or :meth:`open_bypass_logits` gave, of any layers and inputs.
            rate: share in [0, 1], in the gate's own sense: what ``logit > threshold`` means.
        """
        values = torch.cat([part.flatten() for part in logits]).double().sort(descending=True).values
        above = round(rate * len(values))
        if above == 0:
            settled = values[0]
        elif above == len(values):
            settled = values[-1] - 1.0
        else:
            settled = (values[above - 1] + values[above]) / 2
        self.threshold.copy_(settled)

    def shift(self, amount: float) -> None:
        """Move the threshold towards saving more: as if ``amount`` were added to the logits of what saves."""
        self.threshold += -amount if self.saves_above else amount

    def describe(self) -> dict[str, Any]:
        """The constructor's arguments (JSON)."""
        return {}

    @classmethod
    def create(cls, description: Mapping[str, Any]) -> Self:
        """A gate of the shape that :meth:`describe` told, with initial weights.

        Raises:
            CheckpointError: the description is not one of this kind.
        """
        try:
            return cls(**description)
        except (TypeError, ValueError) as error:
            raise CheckpointError(f"gate {cls.kind!r}: {dict(description)} does not describe it") from error

    def summary(self) -> str:
        """What the gate is, for people: a sentence."""
        return f"{self.kind}: threshold {float(self.threshold):.3f}."


class LinearHeads(nn.Module):
    """One linear logit per layer on standardised inputs ``(x - mean) / scale`` (as the heads of spec §3).

    Weights start at 0, so that the bias alone speaks.
    """

    mean_nd: Tensor
    scale_n: Tensor

    def __init__(self, layers: int, hidden_size: int, start: float) -> None:
        """Args:
        layers: number of heads, n.
        hidden_size: d.
        start: initial logit.
        """
        super().__init__()
        self.weight_nd = nn.Parameter(torch.zeros(layers, hidden_size))
        self.bias_n = nn.Parameter(torch.full((layers,), start))
        self.register_buffer("mean_nd", torch.zeros(layers, hidden_size))
        self.register_buffer("scale_n", torch.ones(layers))

    @property
    def flops_per_row(self) -> float:
        """FLOPs of one logit."""
        return 2.0 * self.weight_nd.shape[1]

    def standardise(self, mean_nd: Tensor, scale_n: Tensor) -> None:
        """Set what inputs are centred and scaled by (:func:`rlcompute.policies.gates.calibrate`)."""
        self.mean_nd.copy_(mean_nd)
        self.scale_n.copy_(scale_n)

    def forward(self, head: int, x_Td: Tensor) -> Tensor:
        """Logits [T] in the heads' dtype."""
        # Standardisation folded into the weights: one product per token, as is charged.
        weight_d = self.weight_nd[head] / self.scale_n[head]
        return torch.addmv(
            self.bias_n[head] - weight_d @ self.mean_nd[head], x_Td.to(weight_d.dtype), weight_d
        )


def logistic_noise(keys_T: Tensor, layer: int, token_index_T: Tensor) -> Tensor:
    """Draws of the logistic distribution, the difference of two Gumbel draws, float64 [T]."""
    # Half a step of the uniform grid keeps zero, whose logarithm is infinite, out.
    return torch.logit(uniform(keys_T, layer, token_index_T) + 2.0**-54)


def relaxed(
    logits: Tensor, layer: int, keys: Tensor | None, token_index: Tensor, temperature: float
) -> Tensor:
    """Straight-through masses of ``logits > 0`` under the concrete relaxation, of the logits' shape.

    With noise, the value is 1 with probability sigmoid(logit), whatever the temperature.

    Args:
        logits: [n], thresholds subtracted.
        layer: of the decision.
        keys: int64 [n] noise keys; None: no noise.
        token_index: int64 [n], the place of each decision's token in its input.
        temperature: of the gradient.
    """
    if keys is not None:
        logits = logits + logistic_noise(keys, layer, token_index).to(logits.dtype)
    return straight_through(logits > 0, torch.sigmoid(logits / temperature))


def visual_tokens(pack: Pack) -> Tensor:
    """Tokens of images and videos, bool [T]; never ``<emb>``."""
    return (pack.modality_T != TEXT) & ~pack.is_emb_T()


def alive_weight(pack: Pack, like: Tensor) -> Tensor:
    """1 at tokens that still count and 0 at dropped ones, [T], in ``like``'s dtype, without gradient.

    Terms are weighted by it, so that the budget of one gate gives no gradient to the gate that dropped the tokens.
    """
    if pack.alive is None:
        return torch.ones_like(pack.segment_ids_T, dtype=like.dtype)
    return pack.alive.is_alive_T.to(like.dtype)
