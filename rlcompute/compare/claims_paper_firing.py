"""Claims of the paper on where policies drop tokens and skip experts (Fig. 9): by layer and kind of token.

Counts of all trained policies are added up. Layers are split as the paper's 40 are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce

from rlcompute.compare.claims_evidence import Evidence, Scale, percent, with_gates
from rlcompute.compare.claims_firing import DECIDED, DROPPED, KINDS, RUN, SLOTS, Firing
from rlcompute.compare.claims_model import Claim, Figure, Finding, above, all_of, at_most
from rlcompute.metrics import FloatArray

_TEXT, _IMAGE, _VIDEO, _VISDOC, _EMB = range(len(KINDS))
_VISUAL = (_IMAGE, _VIDEO, _VISDOC)


def _gates_firing(evidence: Evidence) -> Firing:
    """Counts of all gates together."""
    policies = [point.resolved for ours in evidence.learned.values() for point in ours]
    return reduce(Firing.__add__, [evidence.laboratory.firing(policy) for policy in policies])


def _drop_rate(counts_BNY4: FloatArray, layers: slice, kinds: Sequence[int]) -> FloatArray:
    chosen = counts_BNY4[:, layers][:, :, list(kinds)]
    rate_BY: FloatArray = chosen[..., DROPPED].sum(1) / chosen[:, 0, :, DECIDED]
    return rate_BY.mean(1)


def _skip_rate(counts_BNY4: FloatArray, layers: slice, kinds: Sequence[int]) -> FloatArray:
    chosen = counts_BNY4[:, layers][:, :, list(kinds)].sum(1)
    rate_BY: FloatArray = 1.0 - chosen[..., RUN] / chosen[..., SLOTS]
    return rate_BY.mean(1)


def where_policies_fire(scale: Scale) -> list[Claim]:
    """All of them."""
    first = slice(0, max(1, scale.num_layers // 4))
    early = slice(0, max(1, round(0.6 * scale.num_layers)))
    half = slice(0, max(1, scale.num_layers // 2))
    later = slice(max(1, scale.num_layers // 2), scale.num_layers - 1)
    all_but_last = slice(0, scale.num_layers - 1)

    def drops_early(evidence: Evidence) -> Finding:
        firing = _gates_firing(evidence)
        share = percent(
            evidence,
            firing,
            f"share of all drops that fall in the first {first.stop} of {scale.num_layers} layers",
            lambda x: x[:, first, :, DROPPED].sum((1, 2)) / x[..., DROPPED].sum((1, 2)),
        )
        return Finding(above(share, 50.0), (share,))

    def pictures_first(evidence: Evidence) -> Finding:
        firing = _gates_firing(evidence)

        def gap(kind: int) -> Figure:
            return percent(
                evidence,
                firing,
                f"dropped in the first {first.stop} layers: image and video tokens − {KINDS[kind]} tokens",
                lambda x: _drop_rate(x, first, (_IMAGE, _VIDEO)) - _drop_rate(x, first, (kind,)),
            )

        gaps = [gap(kind) for kind in (_TEXT, _VISDOC)]

        def dropped(kind: int) -> Figure:
            return percent(evidence, firing, f"{KINDS[kind]} tokens", lambda x: _drop_rate(x, first, (kind,)))

        each = [dropped(kind) for kind in range(_EMB)]
        return Finding(all_of(*map(above, gaps)), (*gaps, *each))

    def last_layer(evidence: Evidence) -> Finding:
        firing = _gates_firing(evidence)
        last = percent(
            evidence,
            firing,
            "experts skipped by <emb> in the last layer",
            lambda x: _skip_rate(x, slice(scale.num_layers - 1, None), (_EMB,)),
        )
        before = percent(
            evidence, firing, "by <emb> in the layers before", lambda x: _skip_rate(x, all_but_last, (_EMB,))
        )
        return Finding(at_most(last, 5.0), (last, before))

    def text_skips_early(evidence: Evidence) -> Finding:
        gap = percent(
            evidence,
            _gates_firing(evidence),
            f"experts skipped in the first {early.stop} layers: text − visual tokens",
            lambda x: _skip_rate(x, early, (_TEXT,)) - _skip_rate(x, early, _VISUAL),
        )
        return Finding(above(gap), (gap,))

    def text_keeps_experts(evidence: Evidence) -> Finding:
        firing = evidence.laboratory.firing("modes:skip=0.5")

        def gap(layers: slice) -> Callable[[FloatArray], FloatArray]:
            return lambda x: _skip_rate(x, layers, _VISUAL) - _skip_rate(x, layers, (_TEXT,))

        here = percent(
            evidence, firing, f"skipped in the first {half.stop} layers: visual − text tokens", gap(half)
        )
        there = percent(evidence, firing, "in the later layers", gap(later))
        return Finding(above(here), (here, there))

    return [
        Claim(
            "drops_early",
            "GRPO drops tokens mainly in the first layers.",
            "prune rates of Fig. 9, §5.3",
            "where the drops of all gates fall",
            "agrees if more than half fall in the first quarter of the layers",
            with_gates(drops_early),
        ),
        Claim(
            "pictures_dropped_first",
            "Image and video tokens are dropped at once, documents and text are kept longer.",
            "prune rates of Fig. 9, §5.3",
            "share of tokens dropped in the first quarter of the layers, by kind",
            "agrees if the mean of image and video is above that of text, and above that of documents",
            with_gates(pictures_first),
        ),
        Claim(
            "last_layer_keeps_experts",
            "Expert skipping is near zero in the last layer, which makes the embedding.",
            "skip rates of Fig. 9, §5.3",
            "experts skipped by <emb> in the last layer, where it is the only token, by all gates; training here "
            "starts with a bias for skipping in the later half (policy.late_skip_bias), unless configured otherwise",
            "agrees if at most 5 % are",
            with_gates(last_layer),
        ),
        Claim(
            "text_skips_early",
            "In earlier layers text skips more experts than pictures do.",
            "skip rates of Fig. 9, layers below 24 of 40 (§5.3)",
            "skip rate of text minus that of visual tokens in the first 60 % of the layers, all gates",
            "agrees if it is above 0",
            with_gates(text_skips_early),
        ),
        Claim(
            "text_keeps_experts",
            "Adaptive top-k gives text more experts than pictures in early layers.",
            "Fig. 9 (MoDES), §5.3",
            "MoDES at 50 %: skip rate of visual minus that of text tokens in the first half of the layers",
            "agrees if it is above 0",
            text_keeps_experts,
        ),
    ]
