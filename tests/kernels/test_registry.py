from __future__ import annotations

import logging

import pytest
import torch

from rlcompute.errors import BackendError
from rlcompute.kernels import registry
from rlcompute.kernels.attention import varlen_attention


@pytest.fixture
def provide(monkeypatch):
    """Adds backends: ``provide(op, name, probe)`` puts one before the others, as on a GPU machine."""

    def add(op, name, probe, requires=None):
        monkeypatch.setitem(
            registry.PROVIDERS, op, (registry.Provider(name, name, requires), *registry.PROVIDERS[op])
        )
        load = registry._load
        backend = None if requires else registry.Backend(lambda: name, probe)
        monkeypatch.setattr(registry, "_load", lambda p: backend if p.name == name else load(p))

    return add


@pytest.mark.parametrize("op", registry.PROVIDERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_torch_comes_first_on_a_cpu(op, dtype):
    assert registry.choose(op, "cpu", dtype) == "torch"


def test_resolves_every_operation_and_forces_some():
    kernels = registry.resolve("cpu", torch.float32, {"experts": "torch"})
    assert kernels.attention is varlen_attention
    assert {f for f in registry.PROVIDERS if callable(getattr(kernels, f))} == set(registry.PROVIDERS)


def test_logs_a_choice_once(caplog):
    registry._log_once.cache_clear()
    with caplog.at_level(logging.INFO, logger="rlcompute.kernels.registry"):
        registry.select("experts")
        registry.select("experts")
        registry.select("compaction", forced="torch")
    assert [r.getMessage() for r in caplog.records] == [
        "kernel experts on cpu: backend torch",
        "kernel compaction on cpu: backend torch (forced)",
    ]


def test_a_backend_that_runs_here_is_not_preferred_to_torch_on_a_cpu_but_can_be_forced(provide):
    provide("experts", "fancy", lambda device, dtype: None)
    assert registry.choose("experts") == "torch"
    assert registry.resolve(forced={"experts": "fancy"}).experts() == "fancy"


def test_the_first_that_accepts_the_device_is_preferred_elsewhere(provide):
    provide("experts", "second", lambda device, dtype: None)
    provide("experts", "first", lambda device, dtype: "broken")
    assert registry.choose("experts", "meta") == "second"


def test_a_probe_sees_the_dtype(provide):
    provide("attention", "half", lambda device, dtype: f"{dtype} is too wide" if dtype.itemsize > 2 else None)
    assert registry.choose("attention", "meta", torch.bfloat16) == "half"
    assert registry.choose("attention", "meta", torch.float32) == "torch"


def test_a_refusing_backend_is_named_when_forced(provide):
    provide("experts", "fancy", lambda device, dtype: f"needs a GPU, not {device}")
    with pytest.raises(
        BackendError, match=r"'fancy'.*available: .*torch.*refused: .*fancy: needs a GPU, not cpu"
    ):
        registry.select("experts", forced="fancy")


def test_a_backend_whose_library_is_missing_is_named_when_forced(provide):
    provide("experts", "fancy", None, requires="no_such_library")
    assert registry.choose("experts", "meta") != "fancy"
    with pytest.raises(BackendError, match="fancy: no_such_library is not installed"):
        registry.resolve(forced={"experts": "fancy"})


def test_forcing_a_backend_that_does_not_exist_lists_what_there_is():
    with pytest.raises(BackendError, match=r"'fused' of kernel 'experts'.*does not exist; available: torch"):
        registry.select("experts", forced="fused")


def test_unknown_operation():
    with pytest.raises(BackendError, match=r"'softmax'; known operations: attention, .*score_statistic"):
        registry.resolve(forced={"softmax": "torch"})


def test_no_backend_accepts_the_device(monkeypatch):
    refusing = registry.Backend(varlen_attention, lambda device, dtype: "broken")
    monkeypatch.setattr(registry, "_load", lambda provider: refusing)
    with pytest.raises(BackendError, match=r"no backend of kernel 'attention' runs on cpu .*available: none"):
        registry.select("attention")
