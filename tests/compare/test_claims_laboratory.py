"""What the claims measure beside the comparison's points, on a tiny checkpoint."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from rlcompute.backbones import load_backbone
from rlcompute.benchmark.timing import Timing
from rlcompute.compare import claims_laboratory
from rlcompute.compare.claims_firing import RUN, SLOTS
from rlcompute.compare.claims_laboratory import PairLaboratory
from rlcompute.compare.contenders import Builder
from rlcompute.compare.suite import Suite
from rlcompute.encoder import encode
from rlcompute.held_out import items_of, read_sample
from rlcompute.passes import InputBatches
from rlcompute.policies.checkpoint import load_gates
from tests.compare.measured import make_config


def nothing(*_: object) -> None:
    raise AssertionError("not calibrated for this test")


@pytest.fixture(scope="module")
def laboratory(suite_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> PairLaboratory:
    config = make_config(suite_folder, tmp_path_factory.mktemp("cache"))
    backbone = load_backbone(suite_folder / "tiny")
    builder = Builder(config, backbone, nothing, nothing)  # type: ignore[arg-type]
    strength = Suite(config, backbone).study()
    assert strength is not None
    return PairLaboratory(config, backbone, builder, read_sample(config), strength)


def test_learned_skips_leave_out_what_the_gates_leave_out_and_drop_nothing(
    laboratory: PairLaboratory, suite_folder: Path, tmp_path: Path
) -> None:
    found = laboratory.skip_only(f"gates:path={suite_folder}/gates_0")
    pairs = read_sample(make_config(suite_folder, tmp_path))
    backbone = load_backbone(suite_folder / "tiny")
    gates = load_gates(suite_folder / "gates_0").gates.policy()
    for place, (modality, group) in enumerate(pairs.items()):
        ((_, inputs),) = InputBatches(backbone, items_of(group), 100)
        trace = encode(backbone, *backbone.pack(inputs), gates).trace
        assert (trace.survived_NS.sum(1) < trace.decided_NS.sum(1)).any(), "these gates drop nothing"
        # In the first layer both see the same tokens; a dropped one runs no experts there either way.
        assert found.rows_NG[0, place] == int(trace.rows_NS[0].sum())
        tokens = sum(x.length for x in inputs)
        assert found.survived_NG[:, place].tolist() == [tokens] * (backbone.num_layers - 1) + [len(inputs)]
        assert len(found.ranks[modality]) == len(group)


def test_firing_is_of_the_sample_and_measured_once(laboratory: PairLaboratory) -> None:
    found = laboratory.firing("uniform_topk:k=1")
    assert laboratory.firing("uniform_topk:k=1") is found
    total = found.counts_PNY4.sum((0, 1, 2))
    assert total[SLOTS] == 3 * total[RUN] > 0


def test_masked_execution_runs_beside_packed(
    laboratory: PairLaboratory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(claims_laboratory, "CLOCK_S", 0.0)
    for figure in laboratory.execution("beta_prune:layer=1,keep=0.5"):
        assert 0.0 < figure.low <= figure.value <= figure.high


def test_expert_bytes_are_counted(laboratory: PairLaboratory) -> None:
    layers, experts, hidden, width = 4, 8, 32, 16
    assert laboratory.expert_bytes("full") == layers * experts * 3 * hidden * width * 4


@pytest.mark.parametrize(("rounds", "low", "high"), [(3, 0, 2), (6, 0, 5), (10, 1, 8), (30, 9, 20)])
def test_the_interval_of_rounds_is_the_binomial_one(rounds: int, low: int, high: int) -> None:
    """Ranks of the order statistics that hold the median with at least 95 %: from tables, for 6 rounds and more."""
    ratios = np.random.default_rng(0).permutation(rounds) + 1.0
    reference, own = Timing(tuple(ratios)), Timing(tuple(np.ones(rounds)))
    figure = claims_laboratory._speedup("x", own, reference)
    assert (figure.low, figure.value, figure.high) == (low + 1, np.median(ratios), high + 1)


def test_torch_is_left_as_it_was(laboratory: PairLaboratory) -> None:
    kernels = laboratory._backbone.kernels
    laboratory.firing("full")
    assert laboratory._backbone.kernels is kernels
    assert torch.get_num_threads() == 1
