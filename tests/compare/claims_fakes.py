"""Points and evidence that nothing was measured for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from rlcompute.compare.claims_evidence import Evidence, Laboratory, Measure, Scale
from rlcompute.compare.points import Point
from tests.compare.measured import make_point

SCALE = Scale(num_layers=8, num_experts=16, top_k=4)


def fake_point(
    spec: str,
    ranks: Mapping[str, npt.NDArray[Any]],
    *,
    resolved: str | None = None,
    saved: float = 0.0,
    skip: float = 0.0,
) -> Point:
    """A point with these ranks, and savings of the language model's FLOPs and of routed rows."""
    survived_NG = np.full((8, len(ranks)), 1000)
    return make_point(
        resolved or spec,
        saved,
        {modality: list(x) for modality, x in ranks.items()},
        spec=spec,
        top_k=SCALE.top_k,
        num_experts=SCALE.num_experts,
        survived_NG=survived_NG,
        rows_NG=np.round(SCALE.top_k * survived_NG * (1.0 - skip)).astype(np.int64),
        speedup=1.5,
        speedup_low=1.4,
        speedup_high=1.6,
    )


def ranks(recall: float, queries: int = 1000) -> dict[str, npt.NDArray[np.int64]]:
    """Ranks of two modalities of which a share is answered; higher shares answer all that lower ones do."""
    answered = np.arange(queries) < round(recall * queries)
    return {"image": (~answered).astype(np.int64), "visdoc": (~answered).astype(np.int64)}


def fake_evidence(
    points: Mapping[str, Point],
    *,
    measure: Measure | None = None,
    learned: Sequence[str] = (),
    free: Sequence[str] = (),
    laboratory: object = None,
) -> Evidence:
    """Evidence from these points; full compute answers everything if it is not among them."""
    known = {
        "full": fake_point("full", next(iter(points.values())).ranks if points else ranks(1.0)),
        **points,
    }
    perfect = {modality: np.zeros_like(x) for modality, x in known["full"].ranks.items()}
    if "full" not in points:
        known["full"] = fake_point("full", perfect)
    return Evidence(
        SCALE,
        measure or (lambda policies, budgets: [known[policy] for policy in policies]),
        cast(Laboratory, laboratory),
        learned=learned,
        free=free,
        samples=300,
        seed=0,
    )
