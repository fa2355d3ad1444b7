"""Straight-through gates, and GRPO's beside them, that nothing was trained for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from rlcompute.compare.claims_evidence import Evidence
from rlcompute.compare.claims_firing import DECIDED, DROPPED, KINDS, RUN, SLOTS, Firing
from rlcompute.compare.claims_model import Claim
from rlcompute.compare.claims_straight import EMB, VISUAL
from rlcompute.compare.claims_training import Curves, Training
from rlcompute.compare.points import Point
from rlcompute.metrics import FloatArray
from rlcompute.policies.checkpoint import HEADS, METHODS, STRAIGHT_THROUGH
from tests.compare.claims_fakes import SCALE, fake_evidence, fake_point, ranks

ITERATIONS = 100
FULL = 0.90
"""Recall of full compute."""


@dataclass(frozen=True)
class FakeGates:
    """What measuring some gates would give.

    Attributes:
        gates: by action; none: trained by GRPO.
        moved: recall after their threshold was moved to a budget; None: they do not reach it.
        curves: of training, by tag, start and end of a straight line, or every iteration; None: not on record.
        skipping: share of the inputs that skip each layer.
        dropping: share of the visual tokens dropped in each layer.
    """

    gates: Mapping[str, Mapping[str, Any]]
    recall: float = FULL
    saved: float = 0.0
    skip: float = 0.0
    moved: float | None = None
    combination: str | None = None
    curves: Mapping[str, Sequence[float]] | None = None
    skipping: Sequence[float] = field(default=(0.0,) * SCALE.num_layers)
    dropping: Sequence[float] = field(default=(0.0,) * SCALE.num_layers)


class _Laboratory:
    def __init__(self, gates: Mapping[str, FakeGates]) -> None:
        self._gates = gates

    def training(self, policy: str) -> Training:
        ours = self._gates[policy]
        curves = None
        if ours.curves is not None:
            curves = Curves(Path("metrics.jsonl"), {tag: _line(x) for tag, x in ours.curves.items()})
        return Training(policy.removeprefix("gates:path="), ours.gates, ours.combination, curves)

    def firing(self, policy: str) -> Firing:
        ours = self._gates[policy]
        counts = np.zeros((30, SCALE.num_layers, len(KINDS), 4), dtype=np.int64)
        left = 1000
        for layer, (skip, drop) in enumerate(zip(ours.skipping, ours.dropping, strict=True)):
            dropped = round(1000 * drop)
            counts[:, layer, VISUAL, DECIDED], counts[:, layer, VISUAL, DROPPED] = left, dropped
            left -= dropped
            counts[:, layer, EMB, SLOTS] = 1000
            counts[:, layer, EMB, RUN] = 1000 - round(1000 * skip)
        return Firing(counts)


def _line(values: Sequence[float]) -> FloatArray:
    return np.linspace(values[0], values[1], ITERATIONS) if len(values) == 2 else np.array(values)


def straight_evidence(
    gates: Mapping[str, FakeGates], rules: Mapping[str, float] | None = None, *, off: float = 0.0
) -> Evidence:
    """Evidence of gates by the names of their runs.

    Args:
        gates: what compare.policies names.
        rules: recalls of training-free policies.
        off: by how much the share of rows that MoDES skips misses what it was asked for.
    """
    known = {f"gates:path={name}": ours for name, ours in gates.items()}
    recalls = {"full": FULL, **(rules or {})}

    def measure(policies: Sequence[str], budgets: Sequence[float]) -> list[Point]:
        found = []
        for policy in policies:
            base = policy.removesuffix(",shift=*")
            if base != policy:
                moved, (budget,) = known[base].moved, budgets
                if moved is not None:
                    found.append(fake_point(policy, ranks(moved), saved=budget))
            elif policy in known:
                ours = known[policy]
                method = METHODS[STRAIGHT_THROUGH if ours.gates else HEADS]
                point = fake_point(policy, ranks(ours.recall), saved=ours.saved, skip=ours.skip)
                found.append(replace(point, method=method))
            else:
                skip = float(policy.split("=")[1]) + off if policy.startswith("modes") else 0.0
                saved = 0.3 if policy.startswith("random_prune") else 0.0
                found.append(fake_point(policy, ranks(recalls[policy]), saved=saved, skip=skip))
        return found

    return fake_evidence({}, measure=measure, learned=tuple(known), laboratory=_Laboratory(known))


def verdict(claim: Claim, evidence: Evidence) -> str:
    return claim.check(evidence).judgement.verdict


def reason(claim: Claim, evidence: Evidence) -> str:
    return claim.check(evidence).judgement.reason
