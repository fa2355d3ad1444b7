"""What is read from an export and the run folder around it."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlcompute.compare.claims_straight import fewest
from rlcompute.compare.claims_training import Curves, Training, straight_through_runs, training_of
from rlcompute.compare.points import Point
from rlcompute.errors import DataError
from rlcompute.policies.checkpoint import HEADS, METHODS, STRAIGHT_THROUGH, save_gates
from rlcompute.policies.ste_expert_skip import ExpertSkip
from rlcompute.policies.ste_gates import StraightThroughGates
from rlcompute.policies.ste_pruner import TokenPruner
from tests.compare.measured import make_point

BACKBONE = {"path": "somewhere", "family": "tiny", "hash": "0" * 64}


def run_folder(root: Path, extra: Mapping[str, Any], rows: Sequence[Mapping[str, Any]] | None) -> str:
    """A run with an export of two gates; the policy that it is."""
    folder = root / "ste_both" / "export"
    folder.mkdir(parents=True)
    save_gates(folder, StraightThroughGates([TokenPruner(1, 4, 8), ExpertSkip(4, 8)]), BACKBONE, dict(extra))
    if rows is not None:
        lines = "".join(json.dumps(row) + "\n" for row in rows)
        (folder.parent / "metrics.jsonl").write_text(lines, encoding="utf-8")
    return f"gates:path={folder}"


def test_a_training_is_read_from_its_export_and_run(tmp_path: Path) -> None:
    rows = [{"iteration": i, "time": "now", "a": float(i), "b": None} for i in range(1, 7)]
    found = training_of(run_folder(tmp_path, {"iteration": 4, "combination": "shared"}, rows))
    assert (found.name, tuple(found.gates), found.combination) == (
        "ste_both",
        ("token_pruner", "expert_skip"),
        "shared",
    )
    assert found.gates["token_pruner"]["layer"] == 1
    assert found.curves is not None
    # What was trained after the export is not in it.
    assert list(found.curves.values["a"]) == [1.0, 2.0, 3.0, 4.0]
    assert math.isnan(found.curves.first("b"))
    with pytest.raises(DataError, match=r"metrics\.jsonl: no scalar 'c'"):
        found.curves.last("c")


def test_an_export_by_itself_has_no_curves(tmp_path: Path) -> None:
    found = training_of(run_folder(tmp_path, {}, None))
    assert found.curves is None
    assert found.combination is None


@pytest.mark.parametrize("row", [{"a": 1.0}, {"iteration": 1, "a": "much"}])
def test_damaged_curves_are_refused(tmp_path: Path, row: dict[str, Any]) -> None:
    with pytest.raises(DataError, match="damaged metrics"):
        training_of(run_folder(tmp_path, {"iteration": 1}, [row]))


def test_curves_are_means_over_a_tenth_of_what_is_known() -> None:
    values = np.arange(20.0)
    values[1] = np.nan
    curves = Curves(Path("x"), {"a": values})
    assert curves.first("a") == 0.0
    assert curves.middle("a") == 9.5
    assert curves.last("a") == 18.5
    assert len(curves.smooth("a")) == 19


def test_seeds_of_one_entry_are_one_group_and_moved_gates_are_none() -> None:
    def point(spec: str, resolved: str, method: str = METHODS[STRAIGHT_THROUGH]) -> Point:
        return make_point(resolved, 0.2, {"image": [0]}, spec=spec, method=method)

    def training(policy: str) -> Training:
        gates = {"halt_beta": {"rate": 0.2}} if "halt" in policy else {"expert_skip": {"is": [True]}}
        return Training(policy[-1], gates, None, None)

    found = straight_through_runs(
        [
            point("gates:path=*", "gates:path=skip1"),
            point("gates:path=*", "gates:path=halt"),
            point("gates:path=*", "gates:path=skip2"),
            point("gates:path=skip3", "gates:path=skip3"),
            point("gates:path=g", "gates:path=g", METHODS[HEADS]),
            point("gates:path=m,shift=1", "gates:path=m,shift=1"),
            point("gates:path=m+uniform_topk:k=1", "gates:path=m+uniform_topk:k=1"),
        ],
        training,
    )
    assert [(x.name, x.actions, len(x.points)) for x in found] == [
        ("1, 2", ("expert_skip",), 2),
        ("t", ("halt_beta",), 1),
        ("3", ("expert_skip",), 1),
    ]
    assert found[0].lm_saved == pytest.approx(0.2)
    assert found[0].curves == []


def test_the_fewest_layers_of_a_part() -> None:
    shares = np.array([[0.1, 0.9, 0.0], [0.5, 0.5, 0.5], [0.0, 0.0, 0.0]])
    with np.errstate(invalid="ignore"):
        counts = fewest(shares, 0.9)
    assert list(counts[:2]) == [1.0, 3.0]
    assert math.isnan(counts[2])
