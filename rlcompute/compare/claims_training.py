"""How straight-through gates were trained and how that went: what their export says, and the curves of its run.

Shape legend: I iterations.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from rlcompute.errors import DataError
from rlcompute.metrics import FloatArray
from rlcompute.policies.checkpoint import METHODS, STRAIGHT_THROUGH, load_gates
from rlcompute.policies.rules import parse
from rlcompute.runlog import RunFolder, read_metrics

if TYPE_CHECKING:
    from rlcompute.compare.points import Point

WINDOW = 0.1
"""Share of a run's iterations over which its curves are averaged."""


@dataclass(frozen=True)
class Curves:
    """What a run logged.

    Attributes:
        path: of its ``metrics.jsonl``.
        values: by tag, float64 [I]; NaN where a value was not defined.
    """

    path: Path
    values: Mapping[str, FloatArray]

    def smooth(self, tag: str) -> FloatArray:
        """Means over every window of a tenth of the iterations, from the first to the last; NaN in an empty one.

        Raises:
            DataError: the run did not log it.
        """
        if tag not in self.values:
            raise DataError(f"{self.path}: no scalar {tag!r}; train these gates with this version")
        values_I = self.values[tag]
        width = max(1, round(WINDOW * len(values_I)))
        kernel, known_I = np.ones(width), np.isfinite(values_I)
        sums = np.convolve(np.where(known_I, values_I, 0.0), kernel, mode="valid")
        counts = np.convolve(known_I, kernel, mode="valid")
        return np.where(counts > 0.5, sums / np.maximum(counts, 1.0), np.nan)

    def first(self, tag: str) -> float:
        """Mean over the first tenth of the iterations."""
        return float(self.smooth(tag)[0])

    def middle(self, tag: str) -> float:
        """Mean over the tenth of the iterations in the middle."""
        smooth = self.smooth(tag)
        return float(smooth[len(smooth) // 2])

    def last(self, tag: str) -> float:
        """Mean over the last tenth of the iterations."""
        return float(self.smooth(tag)[-1])


@dataclass(frozen=True)
class Training:
    """One training of straight-through gates.

    Attributes:
        name: of the run.
        gates: constructor's arguments of the gates by action, in the order of training.
        combination: how several actions were trained (``ste.combination``); None for one action, or if not on record.
        curves: None if the run's ``metrics.jsonl`` is not beside the export.
    """

    name: str
    gates: Mapping[str, Mapping[str, Any]]
    combination: str | None
    curves: Curves | None


def training_of(policy: str) -> Training:
    """Reads the training of ``gates:path=…`` from the export's description and the run folder around it.

    Raises:
        CheckpointError: the gates cannot be loaded.
        DataError: the curves are damaged.
    """
    (rule,) = parse(policy).rules
    folder = Path(str(rule.values["path"]))
    saved = load_gates(folder)
    gates = saved.gates.describe()
    return Training(
        name=folder.resolve().parent.name if folder.name == RunFolder(folder).export.name else folder.name,
        gates=gates,
        combination=saved.extra.get("combination") if len(gates) > 1 else None,
        curves=_curves(RunFolder(folder.resolve().parent).metrics, saved.extra.get("iteration")),
    )


def _curves(path: Path, iterations: int | None) -> Curves | None:
    """The curves up to the iteration that was exported; None without a file, or before the first iteration."""
    if not path.is_file():
        return None
    try:
        rows = [row for row in read_metrics(path) if iterations is None or row["iteration"] <= iterations]
        tags = {tag for row in rows for tag in row} - {"iteration", "time"}
        # A scalar that is not finite is logged as null.
        values = {tag: np.array([row.get(tag) for row in rows], dtype=np.float64) for tag in sorted(tags)}
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(f"{path}: damaged metrics ({error!r}); train these gates again") from error
    return Curves(path, values) if rows else None


@dataclass(frozen=True)
class Runs:
    """Trainings of one entry of ``compare.policies`` that differ by their seed alone.

    Attributes:
        points: their measured policies, at least one.
        trainings: in the order of ``points``.
    """

    points: Sequence[Point]
    trainings: Sequence[Training]

    @property
    def name(self) -> str:
        """Names of the runs."""
        return ", ".join(training.name for training in self.trainings)

    @property
    def gates(self) -> Mapping[str, Mapping[str, Any]]:
        """See :class:`Training`."""
        return self.trainings[0].gates

    @property
    def actions(self) -> tuple[str, ...]:
        """What was trained."""
        return tuple(self.gates)

    @property
    def combination(self) -> str | None:
        """See :class:`Training`."""
        return self.trainings[0].combination

    @property
    def curves(self) -> Sequence[Curves]:
        """Of the trainings that have them."""
        return [training.curves for training in self.trainings if training.curves is not None]

    @property
    def lm_saved(self) -> float:
        """Mean share of the language model's executed FLOPs saved."""
        return float(np.mean([point.lm_saved for point in self.points]))

    def curve(self, measure: Callable[[Curves], float]) -> float:
        """Mean of what is read off the curves; there must be some."""
        return float(np.mean([measure(curves) for curves in self.curves]))


def straight_through_runs(points: Sequence[Point], training: Callable[[str], Training]) -> list[Runs]:
    """Groups straight-through gates that run alone, with the thresholds that training set.

    Args:
        points: trained policies of any kind.
        training: of a policy as it ran.
    """
    groups: dict[tuple[object, ...], list[tuple[Point, Training]]] = {}
    for point in points:
        rules = parse(point.resolved).rules
        if point.method == METHODS[STRAIGHT_THROUGH] and len(rules) == 1 and "shift" not in rules[0].values:
            found = training(point.resolved)
            described = sorted((kind, sorted(values.items())) for kind, values in found.gates.items())
            key = (point.spec, str(described), found.combination)
            groups.setdefault(key, []).append((point, found))
    return [Runs([p for p, _ in group], [t for _, t in group]) for group in groups.values()]
