"""Which implementation of a kernel runs: backends register, are probed for a device, and the choice is logged.

A backend is one module that calls :func:`register` when it is imported. ``PROVIDERS`` names the modules of each
operation in order of preference; they are imported the first time the operation is asked for, so that a
backend with heavy imports costs nothing where it is not used.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from rlcompute.errors import BackendError

logger = logging.getLogger(__name__)

Kernel = Callable[..., Any]
Probe = Callable[[torch.device], str | None]

PROVIDERS: dict[str, tuple[str, ...]] = {
    "attention": ("rlcompute.kernels.attention",),
    "gated_delta": ("rlcompute.kernels.gated_delta",),
    "causal_conv": ("rlcompute.kernels.causal_conv",),
    "experts": ("rlcompute.kernels.experts",),
    "routing_plan": ("rlcompute.kernels.routing_plan",),
    "compaction": ("rlcompute.kernels.compaction",),
    "score_statistic": ("rlcompute.kernels.score_statistic",),
}


@dataclass(frozen=True)
class Backend:
    """One registered implementation.

    Attributes:
        name: what :func:`select` calls it, e.g. ``"torch"``.
        implementation: the kernel.
        probe: given the device, ``None`` if the backend can run there, else the reason why not.
    """

    name: str
    implementation: Kernel
    probe: Probe


_backends: dict[str, dict[str, Backend]] = {}
_logged: set[tuple[str, str]] = set()


def runs_anywhere(device: torch.device) -> str | None:
    """Probe of the plain torch backends."""
    return None


def register(op: str, backend: str, implementation: Kernel, *, probe: Probe) -> None:
    """Offer ``implementation`` for ``op``; earlier registrations are preferred over later ones."""
    _backends.setdefault(op, {})[backend] = Backend(backend, implementation, probe)


def select(op: str, device: torch.device | str = "cpu", forced: str | None = None) -> Kernel:
    """The implementation of ``op`` for ``device``.

    Args:
        op: a key of ``PROVIDERS``.
        device: where the tensors live.
        forced: a backend's name: that one or an error. ``None``: the first whose probe accepts the device.

    Raises:
        BackendError: the operation is unknown, no backend accepts the device, or the forced one does not.
    """
    if op not in PROVIDERS:
        raise BackendError(
            f"unknown kernel operation {op!r}; known operations: {', '.join(sorted(PROVIDERS))}"
        )
    for module in PROVIDERS[op]:
        importlib.import_module(module)
    device = torch.device(device)
    refusals = {name: backend.probe(device) for name, backend in _backends[op].items()}
    available = [name for name, reason in refusals.items() if reason is None]
    chosen = forced if forced is not None else next(iter(available), None)
    if chosen is None or chosen not in available:
        raise BackendError(_refusal(op, device, forced, refusals))
    if (op, chosen) not in _logged:
        _logged.add((op, chosen))
        logger.info("kernel %s on %s: backend %s%s", op, device, chosen, " (forced)" if forced else "")
    return _backends[op][chosen].implementation


def _refusal(op: str, device: torch.device, forced: str | None, refusals: dict[str, str | None]) -> str:
    available = [name for name, reason in refusals.items() if reason is None]
    reasons = [f"{name}: {reason}" for name, reason in refusals.items() if reason is not None]
    if forced is None:
        problem = f"no backend of kernel {op!r} runs on {device}"
    elif forced in refusals:
        problem = f"backend {forced!r} of kernel {op!r} was forced but does not run on {device}"
    else:
        problem = f"backend {forced!r} of kernel {op!r} was forced but does not exist"
    return "; ".join(
        [
            problem,
            f"available: {', '.join(available) or 'none'}",
            *([f"refused: {', '.join(reasons)}"] if reasons else []),
            "choose an available backend, or none to let the registry choose",
        ]
    )
