from __future__ import annotations

import importlib.util
import math
import sys

import pytest
import torch

from rlcompute import benchmark
from rlcompute.benchmark import parity
from rlcompute.benchmark.parity import ParityResult
from rlcompute.kernels import registry


@pytest.fixture
def gpu_check(repository, monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    spec = importlib.util.spec_from_file_location("gpu_check", repository / "benchmarks" / "gpu_check.py")
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "gpu_check", module)
    monkeypatch.setattr(sys, "path", list(sys.path))
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def only_attention(monkeypatch):
    monkeypatch.setattr(registry, "PROVIDERS", {"attention": registry.PROVIDERS["attention"]})


@pytest.fixture
def stub_tables(monkeypatch):
    """``rlcompute.benchmark.run`` writes a report at once; table ii fails."""

    def run(*, geometry, out, tables, device, dtype, budget_s):
        if tables == ["ii"]:
            raise RuntimeError("out of | memory")
        conditions = "# Benchmark\n\n- kernels: torch\n- load: 3\n"
        table = f"## Table {tables[0]}\n\n{geometry.name} {dtype} {budget_s}\n\n![p](p.png)\n"
        (out / "benchmark.md").write_text(f"{conditions}\n{table}")

    monkeypatch.setattr(benchmark, "run", run)


@pytest.mark.usefixtures("only_attention", "stub_tables")
def test_reports_parity_refusals_and_tables(gpu_check, tmp_path, capsys):
    out = tmp_path / "check.md"
    assert gpu_check.main(["--out", str(out), "--tables", "i,v", "--budget-s", "8"]) == 0
    text = out.read_text()
    assert "- device: cpu" in text and f"torch {torch.__version__}" in text
    assert "- not here: attention torch_varlen: needs a CUDA device, not cpu" in text
    assert "| attention | torch | float32 | 12 of 12 |" in text
    assert "| attention | torch | bfloat16 | 12 of 12 |" in text
    assert (
        "## Table i\n\n- kernels: torch\n\ndemo float32 4.0\n\n## Table v\n\n- kernels: torch\n\ndemo float32 4.0\n"
        in text
    )
    assert "everything passed" in text
    assert capsys.readouterr().out.rstrip().endswith("everything passed.")


@pytest.mark.usefixtures("only_attention", "stub_tables")
def test_goes_on_after_failures_and_says_so_in_the_exit_code(gpu_check, tmp_path, monkeypatch):
    def check(op, backend, device, dtype, cases):
        if cases == ["one token"]:
            raise ValueError("illegal | memory access")
        return [ParityResult(cases[0], 0.5 if cases == ["no tokens"] else 0.0, 1e-2)]

    monkeypatch.setattr(parity, "check", check)
    out = tmp_path / "check.md"
    assert gpu_check.main(["--out", str(out), "--tables", "ii,v"]) == 1
    text = out.read_text()
    assert "FAILED, 10 of 12 | 5.0e-01 |" in text
    assert "one token: ValueError: illegal / memory access; no tokens: error 5.0e-01" in text
    assert "## Table ii\n\nFAILED: RuntimeError: out of / memory" in text
    assert "## Table v\n\n- kernels: torch\n\ndemo" in text
    assert "table ii: RuntimeError" in text.splitlines()[-1]


@pytest.mark.usefixtures("only_attention")
def test_a_case_that_is_declined_counts_as_passed_and_one_not_reached_does_not(gpu_check, monkeypatch):
    declined = ParityResult("any", math.nan, 1e-5, "width 33")
    monkeypatch.setattr(parity, "check", lambda *arguments: [declined])
    device, dtype = torch.device("cpu"), torch.float32
    checked = gpu_check._check("attention", "torch", device, dtype, math.inf)
    assert checked.ok and checked.error == 0.0 and "mixed lengths: declined" in checked.remarks
    late = gpu_check._check("attention", "torch", device, dtype, 0.0)
    assert not late.ok and late.remarks == ("time is up: 12 cases not reached",)


def test_kernels_are_tuned_again_after_the_check(gpu_check):
    autotuner = pytest.importorskip("triton.runtime.autotuner").Autotuner
    tuned = autotuner.run
    with gpu_check._untuned():
        assert autotuner.run is not tuned
    assert autotuner.run is tuned
