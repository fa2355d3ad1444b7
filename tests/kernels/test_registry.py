from __future__ import annotations

import logging

import pytest

from rlcompute.errors import BackendError
from rlcompute.kernels import registry
from rlcompute.kernels.attention import varlen_attention


@pytest.fixture
def clean_registry(monkeypatch):
    """A registry that the test may add to."""
    for op in registry.PROVIDERS:
        registry.select(op)
    monkeypatch.setattr(registry, "_backends", {op: dict(b) for op, b in registry._backends.items()})
    monkeypatch.setattr(registry, "_logged", set())


@pytest.mark.parametrize("op", registry.PROVIDERS)
def test_every_operation_has_a_torch_backend(op):
    assert registry.select(op, "cpu") is registry.select(op, "cpu", forced="torch")


def test_selects_the_registered_function():
    assert registry.select("attention") is varlen_attention


@pytest.mark.usefixtures("clean_registry")
def test_logs_a_choice_once(caplog):
    with caplog.at_level(logging.INFO, logger="rlcompute.kernels.registry"):
        registry.select("experts")
        registry.select("experts")
        registry.select("compaction")
    assert [r.getMessage() for r in caplog.records] == [
        "kernel experts on cpu: backend torch",
        "kernel compaction on cpu: backend torch",
    ]


@pytest.mark.usefixtures("clean_registry")
def test_a_refusing_backend_is_passed_over_and_named_when_forced():
    registry.register("experts", "fancy", lambda: None, probe=lambda device: f"needs a GPU, not {device}")
    assert registry.select("experts") is registry.select("experts", forced="torch")
    with pytest.raises(
        BackendError, match=r"'fancy'.*available: torch; refused: fancy: needs a GPU, not cpu"
    ):
        registry.select("experts", forced="fancy")


def test_forcing_an_absent_backend_lists_what_there_is():
    with pytest.raises(
        BackendError, match=r"'sonicmoe' of kernel 'experts'.*does not exist; available: torch"
    ):
        registry.select("experts", forced="sonicmoe")


def test_unknown_operation():
    with pytest.raises(BackendError, match=r"'softmax'; known operations: attention, .*score_statistic"):
        registry.select("softmax")


@pytest.mark.usefixtures("clean_registry")
def test_no_backend_accepts_the_device(monkeypatch):
    refusing = registry.Backend("torch", varlen_attention, lambda device: "broken")
    monkeypatch.setitem(registry._backends, "attention", {"torch": refusing})
    with pytest.raises(BackendError, match=r"no backend of kernel 'attention' runs on cpu; available: none"):
        registry.select("attention")
