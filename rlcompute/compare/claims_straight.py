"""What the checks of claims on straight-through gates have in common."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce

import numpy as np

from rlcompute.compare.claims_evidence import Evidence, skip_share
from rlcompute.compare.claims_firing import DECIDED, DROPPED, KINDS, RUN, SLOTS, Firing
from rlcompute.compare.claims_model import Figure, Finding, Judgement, all_of, exact
from rlcompute.compare.claims_training import Runs
from rlcompute.config_ste import Action
from rlcompute.metrics import FloatArray

VISUAL = [place for place, kind in enumerate(KINDS) if kind in ("image", "video", "visdoc")]
EMB = KINDS.index("emb")


def on_gates(action: Action, check: Callable[[Evidence, Runs], Finding]) -> Callable[[Evidence], Finding]:
    """The check of a claim on gates of one action that were trained alone: all entries must pass it."""
    reason = (
        f"compare.policies names no gates that were trained straight through for {action} alone: train them with "
        f"run.method=ste, ste.actions=[{action}], export, and add gates:path=<run folder>/export"
    )

    def whole(evidence: Evidence) -> Finding:
        found = [check(evidence, runs) for runs in evidence.straight_through if runs.actions == (action,)]
        if not found:
            return Finding(Judgement("undecided", reason), ())
        judgement = all_of(*(finding.judgement for finding in found))
        return Finding(judgement, tuple(figure for finding in found for figure in finding.figures))

    return whole


def without_curves(runs: Runs) -> Judgement:
    """Undecided: the claim is about training itself."""
    return Judgement(
        "undecided",
        f"{runs.name}: no metrics.jsonl beside the export, which holds the curves of training; export into the run's "
        "own folder",
    )


def saved(runs: Runs) -> Figure:
    """Share of the language model's FLOPs that some gates save on the held-out pairs."""
    return exact(f"LM FLOPs saved by {runs.name}", 100.0 * runs.lm_saved, "%")


def skipped_by(evidence: Evidence, runs: Runs) -> Figure:
    """Share of the survivors' routed rows that some gates leave out."""
    shares = [skip_share(point, evidence.scale.top_k) for point in runs.points]
    return exact(f"rows skipped by {runs.name}", 100.0 * float(np.mean(shares)), "%")


def firing_of(evidence: Evidence, runs: Runs) -> Firing:
    """Where some gates drop and skip, counts of all trainings together."""
    return reduce(Firing.__add__, [evidence.laboratory.firing(point.resolved) for point in runs.points])


def visual_drops(counts_BNY4: FloatArray) -> FloatArray:
    """Visual tokens dropped in each layer, [B,N]."""
    drops_BN: FloatArray = counts_BNY4[:, :, VISUAL, DROPPED].sum(2)
    return drops_BN


def visual_dropped(counts_BNY4: FloatArray) -> FloatArray:
    """Share of the visual tokens that are dropped in any layer, [B]."""
    share_B: FloatArray = visual_drops(counts_BNY4).sum(1) / counts_BNY4[:, 0, VISUAL, DECIDED].sum(1)
    return share_B


def inputs_skipping(counts_BNY4: FloatArray, first: int = 0) -> FloatArray:
    """Share of the inputs that pass each layer from ``first`` on unchanged, by their <emb>, [B,N-first]."""
    emb_BN4 = counts_BNY4[:, first:, EMB]
    share_BN: FloatArray = 1.0 - emb_BN4[..., RUN] / emb_BN4[..., SLOTS]
    return share_BN


def ahead(evidence: Evidence, name: str, rule: str, runs: Runs) -> Figure:
    """Points by which a rule is ahead of some gates."""
    share = -1.0 / len(runs.points)
    return evidence.contrast(name, (1.0, evidence.point(rule)), *((share, point) for point in runs.points))


def fewest(shares_BN: FloatArray, part: float) -> FloatArray:
    """How many of the layers, the largest first, make up a part of the sum over all of them, [B]; NaN without a sum."""
    total_B1 = shares_BN.sum(1, keepdims=True)
    largest_BN = -np.sort(-shares_BN, axis=1)
    # Rounded, so that a sum of nine tenths is not just below nine tenths.
    missing_BN = np.round(largest_BN.cumsum(1) / total_B1, 9) < part
    return np.where(total_B1[:, 0] > 0.0, 1.0 + missing_BN.sum(1), np.nan)


def runs_missing(names: Sequence[str]) -> Judgement:
    """Undecided: there are no gates of these combinations."""
    return Judgement(
        "undecided",
        f"compare.policies names no straight-through gates of several actions trained {' or '.join(names)}: train them "
        "with run.method=ste, ste.actions=[token_pruner,expert_skip,layer_skip] and that ste.combination, export, and "
        "add gates:path=<run folder>/export",
    )
