"""MoDES: thresholds on router weights, scaled by how much a layer matters (spec §5, arXiv 2511.15690).

A token keeps its selected expert m where ``s * α_m >= τ``, with a scale s for each layer and kind of token and a
threshold τ for each kind of token, text or visual. What differs from the paper:

- An embedder has no answer logits whose KL divergence could be taken: the loss of leaving something out is
  1 - cos to the embedding of full compute, in the scales and in the search for τ alike.
- A skipped slot contributes 0, as everywhere here, and the weights of the others stay as they are. The shared expert
  always runs. A token may be left with no routed expert at all.
- The scales are taken as measured: no temperature reshapes scores or thresholds.
- Candidate thresholds are quantiles of the scores that full compute has, instead of a fixed grid that was shaped for
  other models: a step leaves out about the same number of rows wherever on the grid it is taken. The chosen pair is
  then lowered as far as the target allows (:mod:`rlcompute.policies.modes_search`).

Shape legend: T tokens, k selected experts, S inputs, N layers, M kinds of token (text, visual), d hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from rlcompute.backbones.base import Backbone
from rlcompute.decision import Decision, Full, Signals
from rlcompute.encoder import encode
from rlcompute.pack import TEXT, EmbeddedInput, Pack

TOKEN_KINDS = ("text", "visual")
"""Names of the kinds of token, in their order; image and video tokens are visual, ``<emb>`` is text."""


def token_kind(pack: Pack) -> Tensor:
    """The kind of each token, int64 [T], an index into :data:`TOKEN_KINDS`."""
    return (pack.modality_T != TEXT).long()


class Modes:
    """Keeps the slots whose scaled router weight reaches the threshold of the token's kind."""

    gate_flops_per_token = 0.0

    def __init__(self, scales_NM: Tensor, tau_M: Sequence[float] | Tensor) -> None:
        """Args:
        scales_NM: float64 scale of each layer for each kind of token.
        tau_M: threshold of each kind of token.
        """
        self._scales_NM = scales_NM.double()
        self._tau_M = torch.as_tensor(tau_M, dtype=torch.float64)

    def decide(self, layer: int, x_Td: Tensor, signals: Signals, pack: Pack) -> Decision:
        """Compare in float64; the kept weights are not renormalised."""
        kind_T = token_kind(pack)
        tau_T = self._tau_M.to(x_Td.device)[kind_T]
        return Decision(keep=scaled_weights(self._scales_NM, layer, signals, kind_T) >= tau_T[:, None])


def scaled_weights(scales_NM: Tensor, layer: int, signals: Signals, kind_T: Tensor) -> Tensor:
    """Router weights of the selected experts times the layer's scale, float64 [T,k]."""
    scale_T = scales_NM[layer].to(kind_T.device)[kind_T]
    return signals.weights_Tk.double() * scale_T[:, None]


class _WithoutExperts:
    """Full compute, but for the routed experts of one layer for one kind of token."""

    gate_flops_per_token = 0.0

    def __init__(self, layer: int, kind: int) -> None:
        self._layer, self._kind = layer, kind

    def decide(self, layer: int, x_Td: Tensor, signals: Signals, pack: Pack) -> Decision:
        return Decision(keep=token_kind(pack) != self._kind) if layer == self._layer else Decision()


def cosine_loss(embeddings_Sd: Tensor, full_Sd: Tensor) -> Tensor:
    """1 - cos between unit embeddings, float64 [S] on the CPU, as half their squared distance.

    The difference of 1 and a dot product would lose what a small loss consists of.
    """
    a_Sd, b_Sd = (torch.nn.functional.normalize(x.double(), dim=-1) for x in (embeddings_Sd, full_Sd))
    return ((a_Sd - b_Sd).square().sum(-1) / 2).cpu()


def layer_losses(backbone: Backbone, inputs: Sequence[EmbeddedInput]) -> Tensor:
    """Loss of leaving the routed experts of one layer out for one kind of token, summed over inputs.

    Args:
        backbone: the frozen model.
        inputs: executed in one pack, once for every layer and kind of token.

    Returns:
        float64 [N,M] on the CPU: the sum of 1 - cos to the embedding of full compute.
    """
    hidden_Td, pack = backbone.pack(inputs)
    full_Sd = encode(backbone, hidden_Td, pack, Full()).embeddings_Sd
    losses_NM = torch.zeros(backbone.num_layers, len(TOKEN_KINDS), dtype=torch.float64)
    present = token_kind(pack).unique().tolist()
    last_present = token_kind(pack.emb_only()).unique().tolist()
    for layer in range(backbone.num_layers):
        for kind in last_present if layer == backbone.num_layers - 1 else present:
            embeddings_Sd = encode(backbone, hidden_Td, pack, _WithoutExperts(layer, kind)).embeddings_Sd
            losses_NM[layer, kind] = cosine_loss(embeddings_Sd, full_Sd).sum()
    return losses_NM


def layer_scales(losses_NM: Tensor) -> Tensor:
    """Scales [N,M] from the losses of layers: their share of the sum over layers, for each kind of token.

    Where no layer matters, as for a kind that the sample does not have, all layers get the same share.
    """
    total_M = losses_NM.sum(0)
    even_NM = torch.full_like(losses_NM, 1.0 / len(losses_NM))
    return torch.where(total_M > 0, losses_NM / total_M.where(total_M > 0, 1.0), even_NM)
