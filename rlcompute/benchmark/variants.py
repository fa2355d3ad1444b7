"""What the tables run: swapped kernels, policies that remove a known amount, and the agreement of results.

Shape legend: T tokens, S segments, k selected experts, d hidden size.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor

from rlcompute.backbones.base import Backbone
from rlcompute.decision import Decision, Signals
from rlcompute.errors import BackendError
from rlcompute.kernels.registry import Kernel
from rlcompute.pack import Pack
from rlcompute.policies.draws import as_keys, rollout_key, uniform


@contextmanager
def swapped_kernels(backbone: Backbone, **kernels: Kernel) -> Iterator[None]:
    """Other implementations of some operations, for a while."""
    own = backbone.kernels
    backbone.kernels = replace(own, **kernels)
    try:
        yield
    finally:
        backbone.kernels = own


def segment_keys(segments: int, seed: int, device: torch.device) -> Tensor:
    """Keys of the draws, int64 [S]."""
    return as_keys([rollout_key(seed, 0, str(s), "query", 0) for s in range(segments)], device)


class KeepShare:
    """Drops a random share of all tokens but ``<emb>`` in one layer; everything else runs in full."""

    gate_flops_per_token = 0.0

    def __init__(self, keys_S: Tensor, *, layer: int, keep: float) -> None:
        """Args:
        keys_S: int64 key per segment.
        layer: where tokens leave.
        keep: share of them that stays.
        """
        self._keys_S, self._layer, self._keep = keys_S, layer, keep

    def decide(self, layer: int, x_Td: Tensor, signals: Signals, pack: Pack) -> Decision:
        """One draw per token in the chosen layer, nothing in others."""
        if layer != self._layer:
            return Decision()
        draw_T = uniform(self._keys_S[pack.segment_ids_T], layer, pack.token_index_T)
        return Decision(drop_T=(draw_T >= self._keep) & ~pack.is_emb_T())


class MeanExperts:
    """Keeps the highest-weighted experts of every token: m or m + 1 of them, so that the mean is as asked."""

    gate_flops_per_token = 0.0

    def __init__(self, keys_S: Tensor, *, mean: float, top_k: int) -> None:
        """Args:
        keys_S: int64 key per segment.
        mean: experts a token on average, 0..top_k.
        top_k: experts that the backbone selects.
        """
        self._keys_S, self._fewest, self._share_more = keys_S, int(mean), mean - int(mean)
        self._slots_k = torch.arange(top_k, device=keys_S.device)

    def decide(self, layer: int, x_Td: Tensor, signals: Signals, pack: Pack) -> Decision:
        """One draw per token: below the fraction of the mean it keeps one expert more."""
        draw_T = uniform(self._keys_S[pack.segment_ids_T], layer, pack.token_index_T)
        count_T = self._fewest + (draw_T < self._share_more).long()
        return Decision(keep=self._slots_k < count_T[:, None])


TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-2, torch.bfloat16: 0.3, torch.float16: 0.3}
"""Largest relative difference of embeddings that are meant to be equal, by dtype of the pass. Rounding can flip
the last of a token's experts, which is worth more than the rounding itself."""


def check_agreement(what: str, ours_Sd: Tensor, other_Sd: Tensor, dtype: torch.dtype) -> float:
    """Largest relative difference over rows.

    Raises:
        BackendError: it is above :data:`TOLERANCE`: what was to be compared does not compute the same thing.
    """
    difference = (ours_Sd.double() - other_Sd.double()).norm(dim=-1) / other_Sd.double().norm(dim=-1)
    worst = float(difference.max())
    if not worst <= TOLERANCE[dtype]:
        raise BackendError(
            f"benchmark: {what} differs by {worst:.2g} (tolerance {TOLERANCE[dtype]:.2g} in {dtype}); "
            "timing results that are not the same would compare nothing. Run the parity tests."
        )
    return worst
