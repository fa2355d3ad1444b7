"""Which implementation of a kernel runs: backends are probed, one is chosen per operation, and the choice is logged.

``PROVIDERS`` lists the backends of each operation. A backend's module is imported only where the library that it
``requires`` is installed, and ends with ``BACKEND = Backend(implementation, probe)``.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from rlcompute.errors import BackendError

logger = logging.getLogger(__name__)

Kernel = Callable[..., Any]
Probe = Callable[[torch.device, torch.dtype], str | None]

REFERENCE = "torch"
"""The backend that every operation has, on every device and in every floating dtype."""


@dataclass(frozen=True)
class Provider:
    """Where a backend is: its name, its module, and the optional library that the module imports."""

    name: str
    module: str
    requires: str | None = None


@dataclass(frozen=True)
class Backend:
    """One implementation of an operation.

    Attributes:
        implementation: the kernel.
        probe: given device and dtype, ``None`` if it can run there, else the reason why not.
    """

    implementation: Kernel
    probe: Probe


_HERE = "rlcompute.kernels."
PROVIDERS: dict[str, tuple[Provider, ...]] = {
    "attention": (
        Provider("flash_attn", _HERE + "attention_flash", requires="flash_attn"),
        Provider("torch_varlen", _HERE + "attention_varlen"),
        Provider(REFERENCE, _HERE + "attention"),
    ),
    "gated_delta": (
        Provider("fla", _HERE + "gated_delta_fla", requires="fla"),
        Provider(REFERENCE, _HERE + "gated_delta"),
    ),
    "causal_conv": (
        Provider("fla", _HERE + "causal_conv_fla", requires="fla"),
        Provider(REFERENCE, _HERE + "causal_conv"),
    ),
    "experts": (
        Provider("sonicmoe", _HERE + "experts_sonicmoe", requires="sonicmoe"),
        Provider("grouped_mm", _HERE + "experts_grouped_mm"),
        Provider("triton", _HERE + "experts_triton", requires="triton"),
        Provider(REFERENCE, _HERE + "experts"),
    ),
    "routing_plan": (Provider(REFERENCE, _HERE + "routing_plan"),),
    "compaction": (
        Provider("triton", _HERE + "compaction_triton", requires="triton"),
        Provider(REFERENCE, _HERE + "compaction"),
    ),
    "score_statistic": (
        Provider("triton", _HERE + "score_statistic_triton", requires="triton"),
        Provider(REFERENCE, _HERE + "score_statistic"),
    ),
}
"""Backends of each operation, the preferred one on a GPU first. On a CPU ``torch`` comes before all others: what else
runs there are interpreters and loops, for tests and comparisons."""


@dataclass(frozen=True)
class Kernels:
    """The chosen implementation of every operation; the fields are the keys of :data:`PROVIDERS`."""

    attention: Kernel
    gated_delta: Kernel
    causal_conv: Kernel
    experts: Kernel
    routing_plan: Kernel
    compaction: Kernel
    score_statistic: Kernel


def runs_anywhere(device: torch.device, dtype: torch.dtype) -> str | None:
    """Probe of the plain torch backends."""
    return None


@cache
def _load(provider: Provider) -> Backend | None:
    """The backend, or None where the library that it requires is not installed."""
    if provider.requires is not None and importlib.util.find_spec(provider.requires) is None:
        return None
    backend: Backend = importlib.import_module(provider.module).BACKEND
    return backend


def backends(op: str) -> dict[str, Backend | None]:
    """All backends of an operation by name; None for one whose library is not installed.

    Raises:
        BackendError: the operation is unknown.
    """
    if op not in PROVIDERS:
        raise BackendError(
            f"unknown kernel operation {op!r}; known operations: {', '.join(sorted(PROVIDERS))}"
        )
    return {provider.name: _load(provider) for provider in PROVIDERS[op]}


def refusals(
    op: str, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32
) -> dict[str, str | None]:
    """By backend, the most preferred first: why it cannot run there, None if it can."""
    device = torch.device(device)
    found = {
        provider.name: f"{provider.requires} is not installed"
        if backend is None
        else backend.probe(device, dtype)
        for provider, backend in zip(PROVIDERS[op], backends(op).values(), strict=True)
    }
    if device.type == "cpu":
        return {REFERENCE: found.pop(REFERENCE), **found}
    return found


def select(
    op: str,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    forced: str | None = None,
) -> Kernel:
    """The implementation of ``op`` for tensors of ``dtype`` on ``device``.

    Args:
        op: a key of ``PROVIDERS``.
        device: where the tensors live.
        dtype: dtype of the activations.
        forced: a backend's name: that one or an error. ``None``: the most preferred that can run.

    Raises:
        BackendError: the operation is unknown, no backend can run there, or the forced one cannot.
    """
    chosen = choose(op, device, dtype, forced)
    _log_once(op, str(device), chosen, forced is not None)
    backend = backends(op)[chosen]
    assert backend is not None
    return backend.implementation


def choose(
    op: str,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    forced: str | None = None,
) -> str:
    """The name of the backend that :func:`select` takes; same arguments and errors."""
    known = backends(op)
    reasons = refusals(op, device, dtype)
    usable = [name for name, reason in reasons.items() if reason is None]
    if forced is None and usable:
        return usable[0]
    if forced in usable:
        return forced
    if forced is None:
        problem = f"no backend of kernel {op!r} runs on {device} in {dtype}"
    elif forced in known:
        problem = f"backend {forced!r} of kernel {op!r} was forced but does not run on {device} in {dtype}"
    else:
        problem = f"backend {forced!r} of kernel {op!r} was forced but does not exist"
    refused = [f"{name}: {reason}" for name, reason in reasons.items() if reason is not None]
    raise BackendError(
        "; ".join(
            [
                problem,
                f"available: {', '.join(usable) or 'none'}",
                *([f"refused: {', '.join(refused)}"] if refused else []),
                "choose an available backend, or none to let the registry choose",
            ]
        )
    )


@cache
def _log_once(op: str, device: str, chosen: str, forced: bool) -> None:
    logger.info("kernel %s on %s: backend %s%s", op, device, chosen, " (forced)" if forced else "")


def resolve(
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    forced: Mapping[str, str] | None = None,
) -> Kernels:
    """All operations at once.

    Args:
        device: where the tensors live.
        dtype: dtype of the activations.
        forced: backend names by operation; the others are chosen.

    Raises:
        BackendError: see :func:`select`; also an unknown operation among the forced ones.
    """
    forced = forced or {}
    for op in forced:
        backends(op)
    return Kernels(**{op: select(op, device, dtype, forced.get(op)) for op in PROVIDERS})
