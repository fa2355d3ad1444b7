"""What each routed expert does under full compute: how often it is chosen, with what weight, how large its outputs are.

Measured over a calibration sample; the saliencies of expert pruning (spec §5) are ratios of these sums.

Shape legend: T tokens, k selected experts, R = T * k (token, slot) rows, n rows of one expert, S inputs, G groups of
inputs, N layers, E experts, d hidden size.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from rlcompute.backbones.base import Backbone, ExpertWeights
from rlcompute.decision import Decision, Signals
from rlcompute.encoder import encode
from rlcompute.errors import CheckpointError
from rlcompute.kernels.routing_plan import RoutingPlan
from rlcompute.pack import EmbeddedInput, Pack

_PER_EXPERT = ("visits_GNE", "mass_GNE", "norm_GNE", "square_GNE", "weighted_GNE")
_NAMES = (*_PER_EXPERT, "tokens_GN")


def _shape(name: str, shape_GNE: Sequence[int]) -> tuple[int, ...]:
    return tuple(shape_GNE if name in _PER_EXPERT else shape_GNE[:2])


def _dtype(name: str) -> torch.dtype:
    return torch.int64 if name in ("visits_GNE", "tokens_GN") else torch.float64


@dataclass(frozen=True)
class ExpertStatistics:
    """Sums over the tokens that a layer's router saw, on the CPU, by group of inputs.

    In the last layer those are the ``<emb>`` tokens alone, for which alone its experts run (:mod:`rlcompute.encoder`).
    Sums of parts of a sample add up to those of the whole.

    Attributes:
        modalities: names of the groups, the pairs' modalities, in the order of the first dimension.
        visits_GNE: int64, tokens routed to the expert.
        mass_GNE: float64, sum of the router's probability, softmax over all E experts, over all tokens.
        norm_GNE: float64, sum of ``‖o‖`` over the tokens routed to the expert, ``o = FFN_e(x)``.
        square_GNE: float64, sum of ``‖o‖²`` over them.
        weighted_GNE: float64, sum of ``α‖o‖`` over them; the weights α of a token's selected experts sum to 1.
        tokens_GN: int64, tokens routed.
    """

    modalities: tuple[str, ...]
    visits_GNE: Tensor
    mass_GNE: Tensor
    norm_GNE: Tensor
    square_GNE: Tensor
    weighted_GNE: Tensor
    tokens_GN: Tensor

    @classmethod
    def zeros(cls, modalities: Sequence[str], num_layers: int, num_experts: int) -> ExpertStatistics:
        """Statistics of no inputs."""
        shape = (len(modalities), num_layers, num_experts)
        return cls(
            tuple(modalities),
            **{name: torch.zeros(_shape(name, shape), dtype=_dtype(name)) for name in _NAMES},
        )

    def tensors(self) -> dict[str, Tensor]:
        """All tensors by name, to be stored; :meth:`from_tensors` reads them."""
        return {name: getattr(self, name) for name in _NAMES}

    @classmethod
    def from_tensors(cls, modalities: Sequence[str], tensors: Mapping[str, Tensor]) -> ExpertStatistics:
        """Statistics from what :meth:`tensors` gave; other tensors are ignored.

        Raises:
            CheckpointError: a tensor is missing, or has another shape or dtype than its name and the rest tell.
        """
        missing = [name for name in _NAMES if name not in tensors]
        if missing:
            raise CheckpointError(f"expert statistics without {', '.join(missing)}: calibrate again")
        shape = tensors["visits_GNE"].shape
        for name in _NAMES:
            found = tensors[name]
            fits = found.shape == _shape(name, shape) and found.dtype == _dtype(name)
            if not fits or len(shape) != 3 or shape[0] != len(modalities):
                raise CheckpointError(
                    f"expert statistics: {name} is {found.dtype} {list(found.shape)}, which does not fit "
                    f"{len(modalities)} modalities and visits of shape {list(shape)}: calibrate again"
                )
        return cls(tuple(modalities), **{name: tensors[name] for name in _NAMES})

    def __add__(self, other: ExpertStatistics) -> ExpertStatistics:
        """Statistics of both samples together; modalities that only ``other`` has come last.

        Raises:
            ValueError: the numbers of layers or experts differ.
        """
        if self.visits_GNE.shape[1:] != other.visits_GNE.shape[1:]:
            raise ValueError(
                f"statistics of different backbones: layers and experts are {list(self.visits_GNE.shape[1:])} "
                f"and {list(other.visits_GNE.shape[1:])}"
            )
        modalities = tuple(dict.fromkeys(self.modalities + other.modalities))
        total = ExpertStatistics.zeros(modalities, *self.visits_GNE.shape[1:])
        for part in (self, other):
            rows_G = torch.tensor([modalities.index(name) for name in part.modalities], dtype=torch.int64)
            for name in _NAMES:
                getattr(total, name).index_add_(0, rows_G, getattr(part, name))
        return total


def collect(
    backbone: Backbone, inputs: Sequence[EmbeddedInput], groups: Sequence[str], batch_size: int
) -> ExpertStatistics:
    """Statistics of a sample under full compute.

    They do not depend on how the inputs are packed, up to the rounding of the hidden states.

    Args:
        backbone: the frozen model.
        inputs: the sample, embedded.
        groups: the group of each input, the modality of its pair.
        batch_size: inputs of one pack.

    Raises:
        ValueError: not as many groups as inputs, or ``batch_size`` below 1.
    """
    if batch_size < 1:
        raise ValueError(f"batch_size must be at least 1, got {batch_size}")
    if len(groups) != len(inputs):
        raise ValueError(f"{len(inputs)} inputs but {len(groups)} groups: give the group of each input")
    modalities = tuple(dict.fromkeys(groups))
    total = ExpertStatistics.zeros(modalities, backbone.num_layers, backbone.num_experts)
    for start in range(0, len(inputs), batch_size):
        part = slice(start, start + batch_size)
        group_S = torch.tensor([modalities.index(name) for name in groups[part]], device=backbone.device)
        recorder = _Recorder(backbone, group_S, total)
        encode(backbone, *backbone.pack(inputs[part]), recorder)
    return total


class _Recorder:
    """Full compute that adds what it sees of the experts to statistics."""

    gate_flops_per_token = 0.0

    def __init__(self, backbone: Backbone, group_S: Tensor, total: ExpertStatistics) -> None:
        """Args:
        backbone: the frozen model.
        group_S: int64, the group of each segment.
        total: what is added to.
        """
        self._backbone, self._group_S, self._total = backbone, group_S, total

    def decide(self, layer: int, x_Td: Tensor, signals: Signals, pack: Pack) -> Decision:
        """Record, and decide nothing away."""
        total, experts = self._total, self._backbone.num_experts
        groups, ids_Tk = len(total.modalities), signals.expert_ids_Tk
        group_T = self._group_S[pack.segment_ids_T]
        total.tokens_GN[:, layer] += group_T.bincount(minlength=groups).cpu()
        probability_TE = signals.router_logits_TE.double().softmax(dim=-1)
        mass_GE = probability_TE.new_zeros(groups, experts).index_add_(0, group_T, probability_TE)
        total.mass_GNE[:, layer] += mass_GE.cpu()

        plan = self._backbone.kernels.routing_plan(ids_Tk, None, experts)
        norm_R = _output_norms(x_Td, plan, self._backbone.layers[layer].experts)
        weight_R = signals.weights_Tk[plan.token_rows, plan.slots].double()
        # One cell a (group, expert).
        cell_R = group_T[plan.token_rows] * experts + ids_Tk[plan.token_rows, plan.slots]
        total.visits_GNE[:, layer] += cell_R.bincount(minlength=groups * experts).view(groups, experts).cpu()
        sums = (
            (total.norm_GNE, norm_R),
            (total.square_GNE, norm_R.square()),
            (total.weighted_GNE, weight_R * norm_R),
        )
        for sum_GNE, value_R in sums:
            cells = norm_R.new_zeros(groups * experts).index_add_(0, cell_R, value_R)
            sum_GNE[:, layer] += cells.view(groups, experts).cpu()
        return Decision()


def _output_norms(x_Td: Tensor, plan: RoutingPlan, weights: ExpertWeights) -> Tensor:
    """Norm of the expert's output in every row of the plan, before the router's weight: float64 [R]."""
    norms = []
    rows = plan.token_rows.split(plan.counts.tolist())
    for rows_n, gate_up_2Fd, down_dF in zip(rows, weights.gate_up_E2Fd, weights.down_EdF, strict=True):
        gate_nF, up_nF = F.linear(x_Td[rows_n], gate_up_2Fd).chunk(2, dim=-1)
        out_nd = F.linear(F.silu(gate_nF) * up_nF, down_dF)
        norms.append(torch.linalg.vector_norm(out_nd, dim=-1, dtype=torch.float64))
    return torch.cat(norms)
