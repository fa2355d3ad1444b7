"""From measured points to ``compare.json``, ``compare.md``, pictures and tables.

``compare.json``: accuracy in points of 100, savings as shares of full compute.

========================  ======================================================================================
key                       meaning
========================  ======================================================================================
``suite``, ``backbone``   what was measured, in words
``budgets``               shares of the language model's FLOPs to save
``points``                one entry for each policy and budget, full compute first; see below
``not_reached``           policies whose knob does not reach a budget: ``policy``, ``budget``, and the ``least`` and
                          the ``most`` that its settings save
``leads``                 fields of :class:`rlcompute.compare.leads.Lead`, and its ``verdict``
========================  ======================================================================================

An entry of ``points`` holds ``policy`` as configured and ``resolved`` as it ran; ``kind`` (``full``, ``rule``,
``learned``) and ``method``, what trained it, or null; ``budget`` and ``knob``, null where none was solved;
``mean_recall_at_1``; ``delta_vs_full`` with ``mean`` and paired ``ci95``; ``modalities``, each with ``recall_at_1``,
``recall_at_10``, ``ndcg_at_10``, ``n`` and ``delta_recall_at_1``; ``flops`` with ``lm_executed_saved``,
``executed_saved``, ``logical_saved`` and ``hardware_saved``, the vision tower included but in the first;
``inputs_per_second``, ``speedup``, ``speedup_range`` (slowest and fastest round); ``conversion`` (share of time saved
for each share of executed FLOPs saved, null where hardly any are); ``experts_per_token``, routed experts that ran, mean
over layers and the tokens left there; ``layers_run``, the share of tokens and layers that was not bypassed;
``drop_rate`` and ``skip_rate`` by modality and layer, null where no token is left.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from rlcompute.compare import curves, tables
from rlcompute.compare.leads import Lead, leads, paired
from rlcompute.compare.points import FloatArray, Missed, Point
from rlcompute.compare.strength_pictures import (
    strength_and_attention,
    strength_by_layer,
    strength_stability,
)
from rlcompute.compare.strength_study import StrengthStudy
from rlcompute.config import Config
from rlcompute.evaluation_report import print_wide, write_json
from rlcompute.held_out import suite_name
from rlcompute.metrics import bootstrap_interval
from rlcompute.plots import write_png

RESULT_FILE, TEXT_FILE, STRENGTH_FILE = "compare.json", "compare.md", "strength.json"


def publish(
    config: Config,
    backbone: str,
    points: Sequence[Point],
    missed: Sequence[Missed],
    strength: StrengthStudy | None,
    out: Path,
) -> dict[str, Any]:
    """Writes the files into ``out``, which is made if it is missing, and prints the tables.

    Args:
        config: of the comparison.
        backbone: what was measured, in words.
        points: full compute first.
        missed: policies that do not reach a budget.
        strength: write strength against attention, for ``strength.json`` and its pictures; None leaves them out.
        out: the folder.

    Returns:
        What ``compare.json`` holds.
    """
    content = report(config, backbone, points, missed)
    pictures = curves.pictures(points, content["points"], config.compare.budgets, content["suite"])
    if strength is not None:
        pictures |= {
            "strength_and_attention.png": strength_and_attention(strength),
            "strength_by_layer.png": strength_by_layer(strength),
            "strength_stability.png": strength_stability(strength),
        }
    out.mkdir(parents=True, exist_ok=True)
    if strength is not None:
        write_json(out / STRENGTH_FILE, strength.values)
    for name, picture in pictures.items():
        write_png(out / name, picture)
    (out / TEXT_FILE).write_text(tables.markdown(content, list(pictures)), encoding="utf-8")
    write_json(out / RESULT_FILE, content)
    print_wide(tables.terminal(content))
    return content


def report(
    config: Config, backbone: str, points: Sequence[Point], missed: Sequence[Missed]
) -> dict[str, Any]:
    """What ``compare.json`` holds."""
    full, samples, seed = points[0], config.evaluation.bootstrap_samples, config.run.seed
    assert full.is_full
    return {
        "suite": suite_name(config, {modality: len(ranks_P) for modality, ranks_P in full.ranks.items()}),
        "backbone": backbone,
        "budgets": list(config.compare.budgets),
        "points": [_entry(point, full, samples, seed) for point in points],
        "not_reached": [
            {"policy": x.spec, "budget": x.budget, "least": x.least, "most": x.most} for x in missed
        ],
        "leads": [_lead(lead) for lead in leads(points, config.compare.budgets, samples, seed)],
    }


def _entry(point: Point, full: Point, samples: int, seed: int) -> dict[str, Any]:
    differences = paired([point], full)
    delta = dict(zip(point.modalities, differences, strict=True))
    return {
        "policy": point.spec,
        "resolved": point.resolved,
        "method": point.method,
        "kind": "full" if point.is_full else "learned" if point.learned else "rule",
        "budget": point.budget,
        "knob": point.knob,
        "mean_recall_at_1": point.recall_at_1,
        "delta_vs_full": {
            "mean": float(np.mean([x.mean() for x in differences])),
            "ci95": list(bootstrap_interval(differences, samples, seed)),
        },
        "modalities": {
            modality: asdict(metrics) | {"delta_recall_at_1": float(delta[modality].mean())}
            for modality, metrics in point.metrics.items()
        },
        "flops": {
            "lm_executed_saved": point.lm_saved,
            "executed_saved": point.executed_saved,
            "logical_saved": point.logical_saved,
            "hardware_saved": point.hardware_saved,
        },
        "inputs_per_second": point.inputs_per_second,
        "speedup": point.speedup,
        "speedup_range": [point.speedup_low, point.speedup_high],
        "conversion": point.conversion,
        "experts_per_token": point.experts_per_token,
        "layers_run": point.layers_run,
        "drop_rate": _by_layer(point, point.drop_rate_NG),
        "skip_rate": _by_layer(point, point.skip_rate_NG),
    }


def _by_layer(point: Point, rate_NG: FloatArray) -> dict[str, list[float | None]]:
    return {
        modality: [None if np.isnan(x) else float(x) for x in rate_NG[:, g]]
        for g, modality in enumerate(point.modalities)
    }


def _lead(lead: Lead) -> dict[str, Any]:
    return asdict(lead) | {"verdict": lead.verdict}
