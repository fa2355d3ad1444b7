"""Which points go into which picture of the comparison."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rlcompute.compare.leads import reaches
from rlcompute.compare.pictures import (
    EXPERTS,
    PANELS,
    CurvePoint,
    RateCurve,
    budget_curves,
    firing_rates,
    line_name,
    panel_of,
)
from rlcompute.compare.points import Point
from rlcompute.plots import Picture
from rlcompute.policies.rules import LEARNED, PolicySpec, parse

CURVES_FILE, RATES_FILE = "budget_curves.png", "firing_rates.png"


def pictures(
    points: Sequence[Point], entries: Sequence[dict[str, Any]], budgets: Sequence[float], title: str
) -> dict[str, Picture]:
    """The pictures of a comparison by file name; one without anything to show is left out.

    Args:
        points: full compute first.
        entries: what ``compare.json`` says of each.
        budgets: shares of the language model's FLOPs.
        title: put above.
    """
    full = points[0]
    curve_points = [_curve_point(x, y, full) for x, y in zip(points[1:], entries[1:], strict=True)]
    rates = [curve for point in _rated(points[1:], budgets) for curve in _rate_curves(point)]
    found = {}
    if curve_points:
        found[CURVES_FILE] = budget_curves(
            curve_points, full_recall=full.recall_at_1, num_experts=full.num_experts, title=title
        )
    if rates:
        found[RATES_FILE] = firing_rates(rates, title)
    return found


def _curve_point(point: Point, entry: dict[str, Any], full: Point) -> CurvePoint:
    spec = parse(point.spec)
    panel, (low, high) = panel_of(spec, point.method), entry["delta_vs_full"]["ci95"]
    assert panel is not None
    return CurvePoint(
        panel=panel,
        policy=_with_folders(spec) if point.learned else line_name(spec),
        saved_percent=100.0 * point.lm_saved,
        recall=point.recall_at_1,
        low=full.recall_at_1 + low,
        high=full.recall_at_1 + high,
        experts=point.num_experts if panel == EXPERTS else None,
        joined=not point.learned,
    )


def _with_folders(spec: PolicySpec) -> str:
    """Name of the line, with the folder that tells one group of gates from another."""
    paths = (Path(str(rule.values["path"])) for rule in spec.rules if rule.name in LEARNED)
    folders = (path.parent.name if path.name == "export" else path.name for path in paths)
    return " ".join([line_name(spec), *folders])


def _rated(points: Sequence[Point], budgets: Sequence[float]) -> list[Point]:
    """Of each kind of action and method of training the policy with the highest accuracy at the middle budget."""
    middle = sorted(budgets)[len(budgets) // 2] if budgets else 0.0
    chosen = []
    for panel in (name for name in PANELS if name != EXPERTS):
        able = [
            point
            for point in points
            if panel_of(parse(point.spec), point.method) == panel and reaches(point.lm_saved, middle)
        ]
        if able:
            chosen.append(max(able, key=lambda point: point.recall_at_1))
    return chosen


def _rate_curves(point: Point) -> list[RateCurve]:
    rates = zip(point.modalities, point.drop_rate_NG.T, point.skip_rate_NG.T, strict=True)
    spec = parse(point.resolved)
    # Spaces are where a long title may break.
    readable = point.resolved.replace("+", " + ").replace(",", ", ")
    name = f"{point.method} {_with_folders(spec)}" if point.learned else readable
    return [RateCurve(name, modality, drop_N, skip_N) for modality, drop_N, skip_N in rates]
