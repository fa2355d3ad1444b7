"""Where a policy drops tokens and skips experts: by layer and kind of token, with intervals over pairs.

Shape legend: T tokens, S segments, P pairs, N layers, Y kinds of token, B resamples, 4 counts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from rlcompute.backbones.base import Backbone
from rlcompute.compare.claims_model import Figure, Unit
from rlcompute.decision import Bypass, Decision, Policy, Signals, bypass_of
from rlcompute.encoder import encode
from rlcompute.metrics import FloatArray
from rlcompute.pack import IMAGE, VIDEO, EmbeddedInput, Pack

KINDS = ("text", "image", "video", "visdoc", "emb")
"""Kinds of token: text, pictures, frames, the pictures of visual documents, and ``<emb>`` by itself."""
DECIDED, DROPPED, SLOTS, RUN = range(4)
"""Counts: tokens that reach the decision, those dropped there, the survivors' expert slots, and those that run. A token
that passes the layer unchanged counts as one that reached it and skipped all its experts."""


@dataclass(frozen=True)
class Firing:
    """Counts of one policy, int64 [P,N,Y,4]."""

    counts_PNY4: npt.NDArray[np.int64]

    def __add__(self, other: Firing) -> Firing:
        """Counts of two policies on the same pairs."""
        return Firing(self.counts_PNY4 + other.counts_PNY4)

    def figure(
        self,
        name: str,
        statistic: Callable[[FloatArray], FloatArray],
        *,
        samples: int,
        seed: int,
        unit: Unit = "",
    ) -> Figure:
        """A figure with the 95 % interval over resampled pairs.

        Args:
            name: of the figure.
            statistic: from total counts [B,N,Y,4] to [B]; NaN where it is not defined.
            samples, seed: of the bootstrap.
            unit: of the figure.
        """
        pairs = len(self.counts_PNY4)
        shape = self.counts_PNY4.shape[1:]
        flat_PC = self.counts_PNY4.reshape(pairs, -1).astype(np.float64)
        draws_BP = np.random.default_rng(seed).multinomial(pairs, np.full(pairs, 1.0 / pairs), size=samples)
        with np.errstate(invalid="ignore", divide="ignore"):
            value = float(statistic(flat_PC.sum(0).reshape(1, *shape))[0])
            drawn_B = statistic((draws_BP @ flat_PC).reshape(samples, *shape))
        low, high = np.quantile(drawn_B, [0.025, 0.975])
        return Figure(name, value, float(low), float(high), unit)


def kind_T(pack: Pack, is_visdoc_S: Tensor) -> Tensor:
    """Place in :data:`KINDS` of every token, int64 [T]."""
    kinds = torch.zeros_like(pack.segment_ids_T)
    image_T = pack.modality_T == IMAGE
    kinds[image_T] = 1
    kinds[image_T & is_visdoc_S.to(kinds.device)[pack.segment_ids_T]] = 3
    kinds[pack.modality_T == VIDEO] = 2
    kinds[pack.emb_index_S] = 4
    return kinds


class _Recorder:
    """Counts what a policy decides."""

    def __init__(
        self, policy: Policy, pair_S: Tensor, is_visdoc_S: Tensor, counts_PNY4: Tensor, top_k: int
    ) -> None:
        self._policy, self._pair_S, self._is_visdoc_S = policy, pair_S, is_visdoc_S
        self._counts_PNY4, self._top_k = counts_PNY4, top_k
        self.gate_flops_per_token = policy.gate_flops_per_token

    def decide(self, layer: int, x_Td: Tensor, signals: Signals, pack: Pack) -> Decision:
        decision = self._policy.decide(layer, x_Td, signals, pack)
        none_T = torch.zeros_like(pack.segment_ids_T, dtype=torch.bool)
        dropped_T = none_T if decision.drop_T is None else decision.drop_T & ~pack.is_emb_T()
        limit = self._top_k if decision.top_k is None else decision.top_k
        run_T = torch.full_like(pack.segment_ids_T, limit)
        if decision.keep is not None:
            keep = decision.keep
            run_T = keep.long() * limit if keep.ndim == 1 else keep[:, :limit].sum(dim=1)
        stays_T = (~dropped_T).long()
        counted_T4 = torch.stack(
            (torch.ones_like(run_T), dropped_T.long(), stays_T * self._top_k, stays_T * run_T), dim=1
        )
        self._add(layer, counted_T4, pack)
        return decision

    def bypass(self, layer: int, emb_Sd: Tensor, pack: Pack) -> Bypass | None:
        bypass = bypass_of(self._policy, layer, emb_Sd, pack)
        if bypass is not None:
            deciding = pack.emb_only() if layer == self._counts_PNY4.shape[1] - 1 else pack
            passes_T1 = bypass.skip_S[deciding.segment_ids_T].long()[:, None]
            self._add(layer, passes_T1 * passes_T1.new_tensor([1, 0, self._top_k, 0]), deciding)
        return bypass

    def _add(self, layer: int, counted_T4: Tensor, pack: Pack) -> None:
        where = (self._pair_S[pack.segment_ids_T.cpu()], kind_T(pack, self._is_visdoc_S).cpu())
        self._counts_PNY4[:, layer].index_put_(where, counted_T4.cpu(), accumulate=True)


def firing(
    backbone: Backbone,
    make: Callable[[Sequence[str]], Policy],
    batches: Iterable[tuple[list[str], list[EmbeddedInput]]],
    groups: Sequence[str],
) -> Firing:
    """Counts over inputs.

    Args:
        backbone: that the policy runs on.
        make: the policy for a pack of inputs with the given names.
        batches: names and embedded inputs, all queries and then all targets.
        groups: modality of each pair.
    """
    counts_PNY4 = torch.zeros(len(groups), backbone.num_layers, len(KINDS), 4, dtype=torch.int64)
    place = 0
    for names, inputs in batches:
        numbers = torch.arange(place, place + len(inputs)) % len(groups)
        is_visdoc_S = torch.tensor([groups[number] == "visdoc" for number in numbers])
        hidden_Td, pack = backbone.pack(inputs)
        encode(
            backbone,
            hidden_Td,
            pack,
            _Recorder(make(names), numbers, is_visdoc_S, counts_PNY4, backbone.top_k),
        )
        place += len(inputs)
    return Firing(counts_PNY4.numpy())
