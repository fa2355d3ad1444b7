"""Training-free rules that leave out routed experts (spec §5). They drop no token.

Shape legend: T tokens that reach the mixture-of-experts block, S segments, B tokens of the pack that are not
``<emb>``, V value heads of Gated DeltaNet, E experts, k selected experts.
"""

from __future__ import annotations

import math
from typing import Literal, get_args

import torch
from torch import Tensor

from rlcompute.backbones.base import Backbone
from rlcompute.decision import Decision, Signals
from rlcompute.errors import ConfigError
from rlcompute.pack import Pack
from rlcompute.policies.draws import uniform
from rlcompute.policies.otsu import otsu_threshold, pad_segments
from rlcompute.policies.token_rules import RunningScore, mean_beta

SplitScore = Literal["beta", "logit"]


class SkipLayers:
    """No token runs routed experts in a range of layers."""

    gate_flops_per_token = 0.0

    def __init__(self, backbone: Backbone, *, first: int, last: int) -> None:
        """Args:
        backbone: whose layers are meant.
        first: first layer without routed experts.
        last: last one, inclusive.

        Raises:
            ConfigError: the backbone has no such layers.
        """
        if not 0 <= first <= last < backbone.num_layers:
            raise ConfigError(
                f"skip_layers: layers {first}..{last} are not a range within 0..{backbone.num_layers - 1}, the "
                f"layers of {backbone.path}; give 0 <= first <= last <= {backbone.num_layers - 1}"
            )
        self._first, self._last = first, last

    def decide(self, layer: int, x_Td: Tensor, signals: Signals, pack: Pack) -> Decision:
        """Skip every token in the range."""
        if not self._first <= layer <= self._last:
            return Decision()
        return Decision(keep=torch.zeros(x_Td.shape[0], dtype=torch.bool, device=x_Td.device))


class BetaSkip:
    """The tokens that write least to the recurrent state skip their routed experts.

    In every layer with Gated DeltaNet at or before it, tokens are ranked by β (spec §2), averaged over heads and over
    the layers so far, within their input; the lowest ``share`` of them skip, rounded half up. Of equal ones the later
    skips first. ``<emb>`` never skips and is not counted.
    """

    gate_flops_per_token = 0.0

    def __init__(self, backbone: Backbone, *, share: float) -> None:
        """Args:
        backbone: whose layers are meant.
        share: of each input's tokens, in [0, 1].

        Raises:
            ConfigError: ``share`` is no share, or the backbone has no β to rank by.
        """
        self._share = _checked_share("beta_skip", "share", share)
        self._has_beta = _beta_layers("beta_skip", backbone)
        self._first = self._has_beta.index(True)
        self._score = RunningScore()

    def decide(self, layer: int, x_Td: Tensor, signals: Signals, pack: Pack) -> Decision:
        """Skip each input's lowest share."""
        if layer == 0:
            self._score.begin(pack)
        if not self._first <= layer < len(self._has_beta) - 1:
            return Decision()  # no β yet, or nothing but <emb> is left
        if self._has_beta[layer]:
            self._score.add(mean_beta(signals), pack)
        body_B, bounds = _without_emb(pack)
        count_S = torch.floor(bounds.diff().double() * self._share + 0.5).long()
        # A sum over layers ranks as their mean does: every token that is left went through the same layers.
        skip_B = _lowest(self._score.total(pack)[body_B], bounds, count_S)
        return Decision(keep=_all_but(body_B, skip_B, x_Td))


class OtsuSkip:
    """Tokens in the lower class of Otsu's split skip their routed experts, layer by layer and input by input.

    An input is split only where its scores vary: standard deviation over absolute mean above ``min_variation``. At
    most ``cap`` of its tokens skip, the lowest ones; of equal ones the later skips first. ``<emb>`` never skips and is
    in neither class. Scores are those of the layer itself.
    """

    gate_flops_per_token = 0.0

    def __init__(
        self, backbone: Backbone, *, score: SplitScore, min_variation: float = 0.1, cap: float = 0.7
    ) -> None:
        """Args:
        backbone: whose layers are meant.
        score: "beta", the mean of β over heads, in layers with Gated DeltaNet; or "logit", the highest router
            logit, in all layers.
        min_variation: coefficient of variation that a split needs, at least 0.
        cap: most of an input's tokens that may skip in a layer, a share in [0, 1].

        Raises:
            ConfigError: another score, a value out of range, or no β in the backbone.
        """
        if score not in get_args(SplitScore):
            raise ConfigError(f"otsu: score must be one of {', '.join(get_args(SplitScore))}, got {score!r}")
        name = f"otsu_{score}"
        if not 0.0 <= min_variation < math.inf:
            raise ConfigError(f"{name}: min_variation must be a number of at least 0, got {min_variation}")
        self._cap, self._min_variation = _checked_share(name, "cap", cap), min_variation
        self._score = score
        self._applies = (
            _beta_layers(name, backbone)
            if score == "beta"
            else [layer < backbone.num_layers - 1 for layer in range(backbone.num_layers)]
        )

    def decide(self, layer: int, x_Td: Tensor, signals: Signals, pack: Pack) -> Decision:
        """Skip the lower class of each input that varies enough."""
        if not self._applies[layer]:
            return Decision()
        score_T = mean_beta(signals) if self._score == "beta" else signals.router_logits_TE.amax(1).double()
        body_B, bounds = _without_emb(pack)
        score_B, segment_B = score_T[body_B], pack.segment_ids_T[body_B]
        lower_B = score_B <= otsu_threshold(score_B, bounds)[segment_B]
        count_S = torch.zeros(pack.num_segments, dtype=torch.int64, device=x_Td.device)
        count_S.index_add_(0, segment_B, lower_B.long())
        most_S = torch.floor(bounds.diff().double() * self._cap).long().to(x_Td.device, non_blocking=True)
        count_S = count_S.minimum(most_S) * self._varies_enough(score_B, bounds)
        return Decision(keep=_all_but(body_B, _lowest(score_B, bounds, count_S), x_Td))

    def _varies_enough(self, score_B: Tensor, bounds: Tensor) -> Tensor:
        """Whether std / |mean| of each segment exceeds the minimum, bool [S]; false for empty ones."""
        score_SL = pad_segments(score_B, bounds, math.nan)
        mean_S = score_SL.nanmean(dim=1)
        deviation_S = (score_SL - mean_S[:, None]).square().nanmean(dim=1).sqrt()
        return deviation_S > self._min_variation * mean_S.abs()


class UniformTopK:
    """The k highest-weighted experts of every token, as if ``num_experts_per_tok`` were lower."""

    gate_flops_per_token = 0.0

    def __init__(self, k: int, top_k: int) -> None:
        """Args:
        k: experts to run, 1..top_k.
        top_k: experts that the backbone selects.

        Raises:
            ConfigError: ``k`` out of range.
        """
        self._k = _checked_k("uniform_topk", k, top_k)

    def decide(self, layer: int, x_Td: Tensor, signals: Signals, pack: Pack) -> Decision:
        """The first k slots (they are sorted by weight), renormalised."""
        return Decision(top_k=self._k, renormalize=True)


class RandomTopK:
    """Random k of the selected experts of every token: the control for "which of the selected"."""

    gate_flops_per_token = 0.0

    def __init__(self, keys_S: Tensor, *, k: int, top_k: int) -> None:
        """Args:
        keys_S: int64 key per segment (:func:`rlcompute.policies.draws.rollout_key`).
        k: experts to run, 1..top_k.
        top_k: experts that the backbone selects.

        Raises:
            ConfigError: ``k`` out of range.
        """
        self._keys_S, self._k, self._top_k = keys_S, _checked_k("random_topk", k, top_k), top_k

    def decide(self, layer: int, x_Td: Tensor, signals: Signals, pack: Pack) -> Decision:
        """Keep the slots with the k lowest of their own draws, renormalised."""
        keys_T = self._keys_S[pack.segment_ids_T]
        # Negative layer numbers: no draw that another rule makes for a layer with the same keys is used again.
        names = range(-2 - layer * self._top_k, -2 - (layer + 1) * self._top_k, -1)
        draws_Tk = torch.stack([uniform(keys_T, name, pack.token_index_T) for name in names], dim=1)
        rank_Tk = draws_Tk.argsort(dim=1, stable=True).argsort(dim=1)
        return Decision(keep=rank_Tk < self._k, renormalize=True)


class ScoreThreshold:
    """Experts run whose weight, renormalised over the selected, reaches a fixed threshold; maybe none of a token's.

    The weights of those that run stay as they are.
    """

    gate_flops_per_token = 0.0

    def __init__(self, *, tau: float) -> None:
        """Args:
        tau: the threshold, in [0, 1].

        Raises:
            ConfigError: ``tau`` out of range.
        """
        self._tau = _checked_share("threshold", "tau", tau)

    def decide(self, layer: int, x_Td: Tensor, signals: Signals, pack: Pack) -> Decision:
        """Keep the slots that reach the threshold."""
        # Compared in float64: in the weights' own dtype, the threshold would be rounded.
        return Decision(keep=signals.weights_Tk.double() >= self._tau)


def _checked_share(rule: str, name: str, value: float) -> float:
    if not 0.0 <= value <= 1.0:
        raise ConfigError(f"{rule}: {name} must lie in [0, 1], got {value}")
    return value


def _checked_k(rule: str, k: int, top_k: int) -> int:
    if not 1 <= k <= top_k:
        raise ConfigError(f"{rule}: k must lie in 1..{top_k}, the experts that the backbone selects, got {k}")
    return k


def _beta_layers(rule: str, backbone: Backbone) -> list[bool]:
    """Which layers have a β that is of use: Gated DeltaNet, and tokens that may skip."""
    layers = [not layer.is_attention for layer in backbone.layers[:-1]] + [False]
    if not any(layers):
        raise ConfigError(
            f"{rule}: {backbone.path} ({backbone.family}) has no Gated DeltaNet layer before its last, hence no β to "
            "rank tokens by; use a rule that reads the router instead, such as otsu_logit or uniform_topk"
        )
    return layers


def _without_emb(pack: Pack) -> tuple[Tensor, Tensor]:
    """Rows that are not ``<emb>``, int64 [B], and their segments' bounds, int64 [S+1] on the CPU."""
    size = len(pack.segment_ids_T) - len(pack.emb_index_S)
    rows_B = torch.nonzero_static(~pack.is_emb_T(), size=size).squeeze(1)
    return rows_B, pack.cu_seqlens - pack.emb_cu_seqlens


def _lowest(score_B: Tensor, bounds: Tensor, count_S: Tensor) -> Tensor:
    """The ``count_S`` lowest scores of each segment, bool [B]; of equal ones the later first.

    Args:
        score_B: scores, segment after segment.
        bounds: int64 [S+1] on the CPU.
        count_S: int64, at most the segment's length.
    """
    lengths_S, device = bounds.diff(), score_B.device
    segment_B = torch.repeat_interleave(torch.arange(len(lengths_S)), lengths_S)
    rank_B = (torch.arange(len(segment_B)) - bounds[:-1][segment_B]).to(device, non_blocking=True)
    segment_B = segment_B.to(device, non_blocking=True)
    order_B = len(score_B) - 1 - score_B.flip(0).argsort(stable=True)
    order_B = order_B[segment_B[order_B].argsort(stable=True)]
    # Sorted by segment, the n-th place belongs to the same segment as the n-th row.
    chosen_B = torch.empty(len(score_B), dtype=torch.bool, device=device)
    chosen_B[order_B] = rank_B < count_S.to(device, non_blocking=True)[segment_B]
    return chosen_B


def _all_but(rows_B: Tensor, skip_B: Tensor, x_Td: Tensor) -> Tensor:
    """True for every token except where ``skip_B`` says otherwise of ``rows_B``, bool [T]."""
    keep_T = torch.ones(x_Td.shape[0], dtype=torch.bool, device=x_Td.device)
    keep_T[rows_B] = ~skip_B
    return keep_T
