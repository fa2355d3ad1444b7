"""From what an evaluation measured to ``evaluation.json``, the tables and the picture.

Shape legend: P pairs of one modality, S inputs (all queries, then all targets).
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from rich.console import Console, Group
from rich.table import Table

from rlcompute.data.schema import Pair
from rlcompute.metrics import RankingMetrics, bootstrap_interval, ranking_metrics
from rlcompute.passes import InputFacts, Measured
from rlcompute.plots import AccuracyPoint
from rlcompute.trace import experts_per_token, layers_run

REFERENCE = "full"
_COMPUTE = (
    "LM",
    "executed",
    "logical",
    "hardware",
    "experts a token",
    "layers run",
    "inputs/s",
    "speedup",
    "conversion",
)
_MOST_WIDTH = 200
"""Columns of the printed tables; a narrower terminal wraps their lines, which a cut-off figure would not survive."""


@dataclass(frozen=True)
class Outcome:
    """Everything that was measured on one sample of pairs.

    Attributes:
        suite, backbone: what was evaluated, in words.
        gates: folder of the measured gates, or None.
        pairs: the pairs by modality, in the inputs' order.
        facts: of the inputs.
        measured: by policy name; ``full`` is always there.
        ranks: by policy name and modality, from 0.
        parameters: what was chosen for a policy here, by policy name.
        rates: inputs (queries or targets) a second by policy name.
        bootstrap_samples, seed: for the intervals.
    """

    suite: str
    backbone: str
    gates: str | None
    pairs: dict[str, list[Pair]]
    facts: InputFacts
    measured: dict[str, Measured]
    ranks: dict[str, dict[str, npt.NDArray[np.int64]]]
    parameters: dict[str, Mapping[str, float]]
    rates: dict[str, float]
    bootstrap_samples: int
    seed: int

    def metrics(self, policy: str) -> dict[str, RankingMetrics]:
        """Accuracy by modality."""
        return {modality: ranking_metrics(ranks) for modality, ranks in self.ranks[policy].items()}

    def mean_recall_at_1(self, policy: str) -> float:
        """Mean over modalities, points of 100."""
        return float(np.mean([x.recall_at_1 for x in self.metrics(policy).values()]))

    def differences(self, policy: str) -> dict[str, npt.NDArray[np.float64]]:
        """Points of recall@1 gained or lost against full compute, query by query, by modality."""
        reference = self.ranks[REFERENCE]
        return {
            modality: 100.0 * ((ranks < 1).astype(np.float64) - (reference[modality] < 1))
            for modality, ranks in self.ranks[policy].items()
        }

    def interval(self, differences: list[npt.NDArray[np.float64]]) -> tuple[float, float]:
        """95 % interval of the mean over modalities of paired differences."""
        return bootstrap_interval(differences, self.bootstrap_samples, self.seed)


def report(outcome: Outcome, policies: Sequence[str]) -> dict[str, Any]:
    """What ``evaluation.json`` holds: accuracy in points of 100, savings as fractions of the full forward."""
    return {
        "suite": outcome.suite,
        "backbone": outcome.backbone,
        "gates": outcome.gates,
        "policies": [_entry(outcome, name) for name in policies],
    }


def _entry(outcome: Outcome, name: str) -> dict[str, Any]:
    differences = list(outcome.differences(name).values())
    savings = _savings(outcome, name)
    speedup = outcome.rates[name] / outcome.rates[REFERENCE]
    saved, trace = savings["executed_saved"], outcome.measured[name].trace
    return {
        "name": name,
        "parameters": dict(outcome.parameters[name]),
        "mean_recall_at_1": outcome.mean_recall_at_1(name),
        "delta_vs_full": {
            "mean": float(np.mean([x.mean() for x in differences])),
            "ci95": list(outcome.interval(differences)),
        },
        "modalities": {modality: asdict(x) for modality, x in outcome.metrics(name).items()},
        "flops": savings,
        "queries_per_second": outcome.rates[name],
        "speedup": speedup,
        "experts_per_token": experts_per_token(trace.rows_NS.numpy(), trace.survived_NS.numpy()),
        "layers_run": layers_run(trace.entered_NS.numpy(), trace.bypassed_NS.numpy()),
        # Share of the wall clock saved for each share of FLOPs saved; null where no FLOPs are saved.
        "conversion": (1.0 - 1.0 / speedup) / saved if saved > 0.0 else None,
    }


def _savings(outcome: Outcome, name: str) -> dict[str, float]:
    """Saved shares of the full forward, vision tower included except in ``lm_executed_saved``."""
    result, full = outcome.measured[name], outcome.measured[REFERENCE]
    vision = float(outcome.facts.vision_flops_S.sum())
    executed, full_executed = float(result.executed_S.sum()), float(full.executed_S.sum())
    logical, full_logical = float(result.logical_S.sum()), float(full.logical_S.sum())
    return {
        "logical_saved": 1.0 - (logical + vision) / (full_logical + vision),
        "executed_saved": 1.0 - (executed + vision) / (full_executed + vision),
        "hardware_saved": 1.0 - (result.hardware_flops + vision) / (full.hardware_flops + vision),
        "lm_executed_saved": 1.0 - executed / full_executed,
    }


def accuracy_points(outcome: Outcome, policies: Sequence[str]) -> list[AccuracyPoint]:
    """Every policy in the mean over modalities and in each modality, for the picture."""
    return [_mean_point(outcome, name) for name in policies] + [
        _modality_point(outcome, name, modality) for modality in outcome.pairs for name in policies
    ]


def _mean_point(outcome: Outcome, name: str) -> AccuracyPoint:
    executed_percent = 100.0 * (1.0 - _savings(outcome, name)["executed_saved"])
    low, high = outcome.interval(list(outcome.differences(name).values()))
    reference = outcome.mean_recall_at_1(REFERENCE)
    recall = outcome.mean_recall_at_1(name)
    return AccuracyPoint(name, "mean", executed_percent, recall, reference + low, reference + high)


def _modality_point(outcome: Outcome, name: str, modality: str) -> AccuracyPoint:
    rows_S = np.array([key == modality for key, pairs in outcome.pairs.items() for _ in pairs] * 2)
    vision = float(outcome.facts.vision_flops_S.numpy()[rows_S].sum())
    executed, full = (float(outcome.measured[which].executed_S[rows_S].sum()) for which in (name, REFERENCE))
    low, high = outcome.interval([outcome.differences(name)[modality]])
    reference = outcome.metrics(REFERENCE)[modality].recall_at_1
    recall = outcome.metrics(name)[modality].recall_at_1
    percent = 100.0 * (executed + vision) / (full + vision)
    return AccuracyPoint(name, modality, percent, recall, reference + low, reference + high)


def write_json(path: Path, content: dict[str, Any]) -> None:
    """All or nothing: a reader never sees half a file."""
    part = path.with_name(path.name + ".part")
    part.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    os.replace(part, path)


def tables(content: dict[str, Any]) -> Group:
    """``evaluation.json`` for the terminal: what was kept, and what was saved."""
    modalities = list(content["policies"][0]["modalities"])
    accuracy = Table(title="Accuracy, points of 100", title_justify="left")
    accuracy.add_column("policy", no_wrap=True)
    for heading in ("recall@1", "vs full [95 % interval]", *modalities, "recall@10", "nDCG@10"):
        accuracy.add_column(heading, justify="right", no_wrap=True)
    compute = Table(
        title="Saved, % of full compute (vision tower included but in LM); what ran; and time",
        title_justify="left",
    )
    compute.add_column("policy", no_wrap=True)
    for heading in _COMPUTE:
        compute.add_column(heading, justify="right", no_wrap=True)
    for entry in content["policies"]:
        accuracy.add_row(*_accuracy_cells(entry))
        compute.add_row(*_compute_cells(entry))
    return Group(_heading(content), accuracy, compute)


def print_wide(tables: Group) -> None:
    """Prints tables as wide as they need, whatever the width of the terminal or log."""
    console = Console()
    wanted = console.measure(tables, options=console.options.update(max_width=_MOST_WIDTH))
    console.width = max(console.width, wanted.maximum)
    console.print(tables)


def _heading(content: dict[str, Any]) -> str:
    """What was evaluated, and what was chosen for the controls."""
    chosen = [
        f"{entry['name']}: " + ", ".join(f"{name} {value:.3g}" for name, value in entry["parameters"].items())
        for entry in content["policies"]
        if entry["parameters"]
    ]
    return "\n".join([content["suite"], content["backbone"], *chosen])


def _accuracy_cells(entry: dict[str, Any]) -> list[str]:
    delta, by_modality = entry["delta_vs_full"], entry["modalities"].values()
    low, high = delta["ci95"]
    return [
        entry["name"],
        f"{entry['mean_recall_at_1']:.1f}",
        f"{delta['mean']:+.2f} [{low:+.2f}, {high:+.2f}]",
        *(f"{x['recall_at_1']:.1f}" for x in by_modality),
        *(f"{np.mean([x[key] for x in by_modality]):.1f}" for key in ("recall_at_10", "ndcg_at_10")),
    ]


def _compute_cells(entry: dict[str, Any]) -> list[str]:
    columns = ("lm_executed_saved", "executed_saved", "logical_saved", "hardware_saved")
    return [
        entry["name"],
        *(f"{100 * entry['flops'][key]:.1f}" for key in columns),
        f"{entry['experts_per_token']:.2f}",
        f"{100 * entry['layers_run']:.0f} %",
        f"{entry['queries_per_second']:.0f}",
        f"{entry['speedup']:.2f}",
        "-" if entry["conversion"] is None else f"{entry['conversion']:.2f}",
    ]
