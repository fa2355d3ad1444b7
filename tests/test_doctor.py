from __future__ import annotations

import pytest
import torch

from rlcompute import doctor
from rlcompute.kernels import registry


@pytest.fixture
def kernel_rows(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)

    def collect():
        rows, problems = doctor._kernels()
        return dict(rows), problems

    return collect


def test_names_the_backend_of_every_operation_and_why_not_the_others(kernel_rows):
    rows, problems = kernel_rows()
    assert problems == []
    assert list(rows) == [f"kernel {op} on cpu, float32" for op in registry.PROVIDERS]
    attention = rows["kernel attention on cpu, float32"]
    assert attention.startswith("torch (")
    assert "torch_varlen: needs a CUDA device, not cpu" in attention
    assert "grouped_mm: also runs here" in rows["kernel experts on cpu, float32"]
    assert rows["kernel routing_plan on cpu, float32"] == "torch"


def test_an_operation_without_a_backend_is_a_problem(kernel_rows, monkeypatch):
    broken = registry.Backend(lambda: None, lambda device, dtype: "broken")
    monkeypatch.setattr(registry, "PROVIDERS", {"attention": (registry.Provider("only", "only"),)})
    monkeypatch.setattr(registry, "_load", lambda provider: broken)
    monkeypatch.setattr(registry, "REFERENCE", "only")
    rows, (problem,) = kernel_rows()
    assert rows == {} and "refused: only: broken" in problem
