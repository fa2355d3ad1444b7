"""Claims of the paper on β, the write strength of Gated DeltaNet, against attention (§5.3, App. F).

Every figure is a mean over inputs of what is measured within one input, by kind of input
(:mod:`rlcompute.compare.strength_study`). Where two figures are divided or subtracted that the study has not paired,
the interval takes their ends at their worst, which is wider than it need be.
"""

from __future__ import annotations

import math

from rlcompute.compare.claims_evidence import Evidence
from rlcompute.compare.claims_model import Claim, Figure, Finding, above, all_of, at_least, at_most
from rlcompute.compare.strength_measures import Name, Signal, Tokens
from rlcompute.compare.strength_study import ALL_KINDS, StrengthStudy

VISUAL_KINDS = ("image", "video", "visdoc")


def _figure(
    study: StrengthStudy,
    name: Name,
    signal: Signal,
    tokens: Tokens,
    *,
    kind: str = ALL_KINDS,
    layers: tuple[int, ...] = (),
) -> Figure:
    """A figure of the study; NaN where it is not defined on its sample."""
    found = study.find(name, signal, kind, tokens, layers)
    where = f" in layer {layers[0]}" if layers else ""
    words = f"{name.replace('_', ' ')} of {signal.replace('_', ' ')}{where}, {tokens} tokens, {kind} inputs"
    words = words.replace(f", {ALL_KINDS} inputs", "")
    if found is None or found.mean is None or found.low is None or found.high is None:
        return Figure(words, math.nan, math.nan, math.nan)
    return Figure(words, found.mean, found.low, found.high)


def _ratio(name: str, one: Figure, other: Figure) -> Figure:
    return Figure(name, one.value / other.value, one.low / other.high, one.high / other.low)


def _mean(name: str, figures: list[Figure]) -> Figure:
    count = max(1, len(figures))
    ends = [sum(getattr(x, end) for x in figures) / count for end in ("value", "low", "high")]
    return Figure(name, *ends)


def _difference(name: str, one: Figure, other: Figure) -> Figure:
    return Figure(name, one.value - other.value, one.low - other.high, one.high - other.low)


def _log_fold(one: Figure, other: Figure) -> Figure:
    """How far apart two levels are, as |log ratio|."""
    ratio = _ratio("", one, other)
    low, high = math.log(ratio.low), math.log(ratio.high)
    nearest = 0.0 if low <= 0.0 <= high else min(abs(low), abs(high))
    return Figure("", abs(math.log(ratio.value)), nearest, max(abs(low), abs(high)))


def _smoother(evidence: Evidence) -> Finding:
    study = evidence.laboratory.strength
    own = _figure(study, "variation", "strength", "all")
    attention = _figure(study, "variation", "received_attention", "all")
    ratio = _ratio("variation of attention / of β", attention, own)
    return Finding(at_least(ratio, 2.0), (ratio, own, attention))


def _stable(evidence: Evidence, over: str, wanted: float, kind: str) -> Finding:
    study = evidence.laboratory.strength
    cosine: Name = "layer_cosine" if over == "layers" else "frame_cosine"
    correlation: Name = "layer_correlation" if over == "layers" else "frame_correlation"
    signals: tuple[Signal, ...] = ("strength", "emb_attention")
    gap = _figure(study, cosine, "strength - emb_attention", "visual", kind=kind)
    without_mean = _figure(study, correlation, "strength - emb_attention", "visual", kind=kind)
    each = [_figure(study, name, x, "visual", kind=kind) for name in (cosine, correlation) for x in signals]
    return Finding(all_of(at_least(gap, wanted), above(without_mean)), (gap, without_mean, *each))


def _incoming(evidence: Evidence) -> Finding:
    study = evidence.laboratory.strength
    mean = _figure(study, "spearman", "received_attention", "all")
    each = [_figure(study, "spearman", "received_attention", "all", kind=kind) for kind in study.inputs]
    return Finding(at_least(mean, 0.27), (mean, *each))


def _emb(evidence: Evidence) -> Finding:
    study = evidence.laboratory.strength
    mean = _figure(study, "spearman", "emb_attention", "all")
    each = [_figure(study, "spearman", "emb_attention", "all", kind=kind) for kind in study.inputs]
    pearson = _figure(study, "pearson", "emb_attention", "all")
    return Finding(at_most(mean, 0.5), (mean, *each, pearson))


def _profile(evidence: Evidence) -> Finding:
    study = evidence.laboratory.strength
    layers = study.strength_layers
    border = max(1, len(layers) // 3)
    levels = [_figure(study, "mean", "strength", "all", layers=(layer,)) for layer in layers]
    early, later = _mean("early", levels[:border]), _mean("later", levels[border:])
    gap = _difference(f"mean β in the first {border} of {len(layers)} layers − in the rest", early, later)
    return Finding(above(gap), (gap, *levels))


def _even(evidence: Evidence) -> Finding:
    study = evidence.laboratory.strength
    spreads: dict[Signal, Figure] = {}
    for signal in ("strength", "emb_attention"):
        folds = [
            _log_fold(
                _figure(study, "mean", signal, "text", kind=kind),
                _figure(study, "mean", signal, "visual", kind=kind),
            )
            for kind in VISUAL_KINDS
            if kind in study.inputs
        ]
        spreads[signal] = _mean(f"|log(text / visual)| of {signal.replace('_', ' ')}", folds)
    gap = _difference("attention's − β's", spreads["emb_attention"], spreads["strength"])
    return Finding(above(gap), (gap, *spreads.values()))


def write_strength() -> list[Claim]:
    """All of them."""
    return [
        Claim(
            "beta_smoother",
            "β is smooth over tokens, attention is spiky.",
            "coefficient of variation 0.226 against 2.316 of incoming attention (App. F)",
            "the same two within inputs; their ratio",
            "agrees if attention's is at least twice β's (the paper's ratio is 10)",
            _smoother,
        ),
        Claim(
            "beta_stable_depth",
            "β marks the same tokens through depth, <emb> attention moves on.",
            "cosine between layers 0.989 against 0.752 (App. F, Fig. 14)",
            "the same over visual tokens; also the correlation, because maps that are flat have a cosine near 1 "
            "whatever they mark",
            "agrees if the cosines differ by at least 0.12 (half of the paper's) and β's correlation is the higher too",
            lambda evidence: _stable(evidence, "layers", 0.12, ALL_KINDS),
        ),
        Claim(
            "beta_stable_frames",
            "β marks the same places in every frame, <emb> attention less so.",
            "cosine between frames 0.992 against 0.744 (App. F, Fig. 14)",
            "the same for video inputs, with the correlation beside it",
            "agrees if the cosines differ by at least 0.12 (half of the paper's) and β's correlation is the higher too",
            lambda evidence: _stable(evidence, "frames", 0.12, "video"),
        ),
        Claim(
            "beta_incoming_attention",
            "Tokens with high β receive more attention in the layer after.",
            "Spearman 0.546 image, 0.619 text, 0.491 video, 0.524 visual document (App. F)",
            "Spearman of β with attention received in the next layer, within inputs",
            "agrees if the mean is at least 0.27 (half of the paper's)",
            _incoming,
        ),
        Claim(
            "beta_emb_attention",
            "β agrees only weakly with what <emb> attends to: it is a signal of its own.",
            "Spearman and Pearson 0.19–0.42 by modality (Fig. 10)",
            "Spearman of β with <emb> attention in the next layer, within inputs",
            "agrees if the interval of the mean lies below 0.5 (0.6 at first, which is not weak)",
            _emb,
        ),
        Claim(
            "beta_depth_profile",
            "Tokens write strongly in early blocks and weakly in middle and deep ones.",
            "layer means between 0.596 and 0.196 (App. F, Fig. 13)",
            "mean β in the first third of the Gated DeltaNet layers minus the mean in the rest",
            "agrees if it is above 0",
            _profile,
        ),
        Claim(
            "beta_even",
            "β treats kinds of token evenly, attention concentrates on text.",
            "bars of Fig. 10 (right), without figures in the text",
            "distance of text from visual tokens of the same input, as |log ratio| of mean levels",
            "agrees if attention's is above β's",
            _even,
        ),
    ]
