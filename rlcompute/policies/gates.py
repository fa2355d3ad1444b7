"""Linear three-way gate heads: ROUTE, SKIP or DROP per token and layer (spec §3).

Shape legend: N layers, T tokens, S segments, d hidden size, F = d + 1 features (centred, scaled hidden state and
a constant 1), 3 actions.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from rlcompute.backbones.base import Backbone
from rlcompute.decision import DROP, ROUTE, SKIP, Decision, Full, Signals
from rlcompute.encoder import encode
from rlcompute.errors import CheckpointError
from rlcompute.kernels.registry import Kernel
from rlcompute.kernels.score_statistic import segment_score_statistic
from rlcompute.pack import TEXT, EmbeddedInput, Pack
from rlcompute.policies.draws import uniform

Droppable = Literal["all", "visual"]
NUM_ACTIONS = 3


@dataclass(frozen=True)
class GateHeads:
    """One linear head per layer on standardised inputs.

    Attributes:
        weight_N3F: logits = weight @ features; the last feature is the constant 1.
        mean_Nd: what is subtracted from a layer's input.
        scale_N: what it is divided by, one number a layer.
        droppable: which tokens may be dropped; ``<emb>`` never is.
    """

    kind: ClassVar[str] = "route_skip_drop"

    weight_N3F: Tensor
    mean_Nd: Tensor
    scale_N: Tensor
    droppable: Droppable

    def to(self, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> GateHeads:
        """The same heads elsewhere or in another precision."""
        move = {
            name: getattr(self, name).to(device=device, dtype=dtype)
            for name in ("weight_N3F", "mean_Nd", "scale_N")
        }
        return replace(self, **move)

    def tensors(self) -> dict[str, Tensor]:
        """What is written to disk, float32."""
        written = {"weight": self.weight_N3F, "mean": self.mean_Nd, "scale": self.scale_N}
        return {name: tensor.float().contiguous() for name, tensor in written.items()}

    def describe(self) -> dict[str, Any]:
        """What is written to disk beside :meth:`tensors` (JSON)."""
        return {"droppable": self.droppable}

    @classmethod
    def create(cls, description: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> GateHeads:
        """The heads of :meth:`describe` and :meth:`tensors`.

        Raises:
            CheckpointError: the tensors do not fit each other.
            KeyError: something is missing.
        """
        heads = cls(tensors["weight"], tensors["mean"], tensors["scale"], description["droppable"])
        n, _, f = heads.weight_N3F.shape
        if heads.mean_Nd.shape != (n, f - 1) or heads.scale_N.shape != (n,):
            raise CheckpointError("the tensors' shapes do not fit each other; export the gates again")
        return heads

    def policy(self) -> GreedyGates:
        """The most probable action of every token."""
        return GreedyGates(self)

    def shifted(self, amount: float) -> GateHeads:
        """Heads that save more: ``amount`` is added to the logits of SKIP and DROP, not to that of ROUTE."""
        weight_N3F = self.weight_N3F.clone()
        weight_N3F[:, [SKIP, DROP], -1] += amount
        return replace(self, weight_N3F=weight_N3F)

    def summary(self) -> list[str]:
        """What they are, for people."""
        layers, _, features = self.weight_N3F.shape
        return [
            f"Linear ROUTE / SKIP / DROP heads: {layers} layers, {features} features each, droppable tokens: "
            f"{self.droppable}."
        ]

    @property
    def num_layers(self) -> int:
        return int(self.weight_N3F.shape[0])

    @property
    def flops_per_token(self) -> float:
        """FLOPs of one token's logits in one layer."""
        return 2.0 * NUM_ACTIONS * self.mean_Nd.shape[1]

    def features(self, layer: int, x_Td: Tensor) -> Tensor:
        """Head inputs [T,F] in the heads' dtype."""
        features_TF = self.mean_Nd.new_ones(x_Td.shape[0], x_Td.shape[1] + 1)
        standard_Td = features_TF[:, :-1]
        torch.sub(x_Td.to(self.mean_Nd.dtype), self.mean_Nd[layer], out=standard_Td)
        standard_Td /= self.scale_N[layer]
        return features_TF

    def mask_drop(self, layer: int, logits_T3: Tensor, pack: Pack) -> Tensor:
        """Logits with DROP at minus infinity where a token must stay.

        In the last layer there is nothing later to save, and only ``<emb>`` tokens are left anyway.
        """
        must_stay_T = pack.is_emb_T()
        if self.droppable == "visual":
            must_stay_T |= pack.modality_T == TEXT
        if layer == self.num_layers - 1:
            must_stay_T = torch.ones_like(must_stay_T)
        drop_T = logits_T3[:, DROP].masked_fill(must_stay_T, -math.inf)
        return torch.stack([logits_T3[:, ROUTE], logits_T3[:, SKIP], drop_T], dim=1)


def as_decision(actions_T: Tensor) -> Decision:
    """The decision of int64 actions [T]."""
    return Decision(drop_T=actions_T == DROP, keep=actions_T == ROUTE)


class GreedyGates:
    """The most probable action of each head."""

    def __init__(self, heads: GateHeads) -> None:
        self.heads = heads
        self.gate_flops_per_token = heads.flops_per_token
        # Standardisation folded into the weights: one small product per token, as is charged.
        folded_N3d = heads.weight_N3F[..., :-1] / heads.scale_N[:, None, None]
        self._weight_N3d = folded_N3d
        self._bias_N3 = heads.weight_N3F[..., -1] - (folded_N3d @ heads.mean_Nd[:, :, None])[..., 0]

    def decide(self, layer: int, x_Td: Tensor, signals: Signals, pack: Pack) -> Decision:
        """The argmax action of every token."""
        x_Td = x_Td.to(self._weight_N3d.dtype)
        logits_T3 = torch.addmm(self._bias_N3[layer], x_Td, self._weight_N3d[layer].t())
        return as_decision(self.heads.mask_drop(layer, logits_T3, pack).argmax(dim=1))


@dataclass(frozen=True)
class RecordedLayer:
    """What a rollout read and did in one layer, for updates that need the ratio.

    Attributes:
        features_TF: head inputs.
        actions_T: int64 actions taken.
        log_probs_T: log-probability of each under the behaviour policy.
        segment_ids_T: int64 segment of each token.
        may_drop_T: bool, whether DROP was open to the token.
    """

    features_TF: Tensor
    actions_T: Tensor
    log_probs_T: Tensor
    segment_ids_T: Tensor
    may_drop_T: Tensor


class SampledGates:
    """Actions sampled from the heads, with the score statistic kept as the pass goes.

    After :func:`rlcompute.encoder.encode`:

    Attributes:
        statistic_SN3F: gradient with respect to ``weight_N3F`` of each segment's summed log-probability.
        decisions_S: int64, decisions taken (tokens times layers) per segment.
        action_counts_NM3: int64 actions by layer and modality (text, image, video).
        records: one :class:`RecordedLayer` a layer if ``record`` was set.
    """

    def __init__(
        self,
        heads: GateHeads,
        keys_S: Tensor,
        *,
        temperature: float = 1.0,
        record: bool = False,
        score_statistic: Kernel = segment_score_statistic,
    ) -> None:
        """Args:
        heads: the behaviour policy.
        keys_S: int64 rollout keys, one per segment of the pack.
        temperature: logits are divided by it.
        record: keep what :class:`RecordedLayer` lists (memory: one feature row per decision) instead of the
            statistic.
        score_statistic: the kernel that sums up the statistic, :attr:`Kernels.score_statistic`.
        """
        self._score_statistic = score_statistic
        self.heads, self.temperature, self.record = heads, temperature, record
        self.gate_flops_per_token = heads.flops_per_token
        self._keys_S = keys_S
        self._statistics: list[Tensor] = []
        self.decisions_S = torch.zeros_like(keys_S)
        self.records: list[RecordedLayer] = []
        self.action_counts_NM3 = torch.zeros(
            heads.num_layers, 3, NUM_ACTIONS, dtype=torch.int64, device=keys_S.device
        )

    @property
    def statistic_SN3F(self) -> Tensor:
        return torch.stack(self._statistics, dim=1)

    def decide(self, layer: int, x_Td: Tensor, signals: Signals, pack: Pack) -> Decision:
        """Sample by inverse transform of one uniform draw per token."""
        features_TF = self.heads.features(layer, x_Td)
        logits_T3 = features_TF @ self.heads.weight_N3F[layer].t() / self.temperature
        logits_T3 = self.heads.mask_drop(layer, logits_T3, pack)
        log_probs_T3 = logits_T3.log_softmax(dim=1)
        probs_T3 = log_probs_T3.exp()
        draw_T = uniform(self._keys_S[pack.segment_ids_T], layer, pack.token_index_T).to(probs_T3.dtype)
        actions_T = (draw_T >= probs_T3[:, ROUTE]).long()
        may_drop_T = probs_T3[:, DROP] > 0
        actions_T += (draw_T >= probs_T3[:, ROUTE] + probs_T3[:, SKIP]) & may_drop_T
        self._account(layer, features_TF, probs_T3, log_probs_T3, actions_T, may_drop_T, pack)
        return as_decision(actions_T)

    def _account(
        self,
        layer: int,
        features_TF: Tensor,
        probs_T3: Tensor,
        log_probs_T3: Tensor,
        actions_T: Tensor,
        may_drop_T: Tensor,
        pack: Pack,
    ) -> None:
        self.decisions_S += pack.lengths_S.to(self.decisions_S.device, non_blocking=True)
        cell_T = pack.modality_T.long() * NUM_ACTIONS + actions_T
        counts = torch.bincount(cell_T, minlength=3 * NUM_ACTIONS)
        self.action_counts_NM3[layer] += counts.view(3, NUM_ACTIONS)
        if self.record:
            taken_T = log_probs_T3.gather(1, actions_T[:, None])[:, 0]
            self.records.append(
                RecordedLayer(features_TF, actions_T, taken_T, pack.segment_ids_T, may_drop_T)
            )
            return
        # grad_W log pi(a|f) = (onehot(a) - pi) f^T / temperature, spec §3.
        residual_T3 = -probs_T3
        residual_T3.scatter_add_(1, actions_T[:, None], torch.ones_like(residual_T3[:, :1]))
        self._statistics.append(
            self._score_statistic(residual_T3 / self.temperature, features_TF, pack.cu_seqlens)
        )


class _InputMoments:
    """Full compute that sums up what the heads would read."""

    gate_flops_per_token = 0.0

    def __init__(self, num_layers: int, d: int) -> None:
        self.sum_Nd = torch.zeros(num_layers, d, dtype=torch.float64)
        self.square_Nd = torch.zeros(num_layers, d, dtype=torch.float64)
        self.count_N = torch.zeros(num_layers, dtype=torch.float64)

    def decide(self, layer: int, x_Td: Tensor, signals: Signals, pack: Pack) -> Decision:
        x_Td = x_Td.double().cpu()
        self.sum_Nd[layer] += x_Td.sum(0)
        self.square_Nd[layer] += x_Td.square().sum(0)
        self.count_N[layer] += len(x_Td)
        return Full().decide(layer, x_Td, signals, pack)


def calibrate(
    backbone: Backbone, inputs: Sequence[EmbeddedInput], *, batch_size: int = 64
) -> tuple[Tensor, Tensor]:
    """Mean float32 [N,d] and one standard deviation float32 [N] of each head's inputs under full compute."""
    moments = _InputMoments(backbone.num_layers, backbone.hidden_size)
    for start in range(0, len(inputs), batch_size):
        encode(backbone, *backbone.pack(inputs[start : start + batch_size]), moments)
    mean_Nd = moments.sum_Nd / moments.count_N[:, None]
    variance_Nd = moments.square_Nd / moments.count_N[:, None] - mean_Nd.square()
    return mean_Nd.float(), variance_Nd.mean(1).clamp_min(1e-12).sqrt().float()


def init_heads(
    mean_Nd: Tensor,
    scale_N: Tensor,
    *,
    skip: float,
    drop: float,
    late_skip_bias: float,
    droppable: Droppable,
) -> GateHeads:
    """Heads that ignore their input and stay near full compute.

    Args:
        mean_Nd, scale_N: from :func:`calibrate`.
        skip, drop: initial probabilities of SKIP and DROP.
        late_skip_bias: added to the SKIP logit in the later half of the layers, where routed experts matter
            least.
        droppable: which tokens may be dropped.
    """
    num_layers, d = mean_Nd.shape
    weight_N3F = torch.zeros(num_layers, NUM_ACTIONS, d + 1)
    weight_N3F[:, SKIP, -1] = math.log(skip / (1 - skip - drop))
    weight_N3F[:, DROP, -1] = math.log(drop / (1 - skip - drop))
    weight_N3F[num_layers // 2 :, SKIP, -1] += late_skip_bias
    return GateHeads(weight_N3F, mean_Nd, scale_N, droppable)
