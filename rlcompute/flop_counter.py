"""FLOPs counted while a function runs, to check the analytic figures of :mod:`rlcompute.flops` against.

``torch.utils.flop_counter`` sees ATen operators and knows formulas for some. Two things are added:

- :data:`ATEN_FORMULAS` for operators that torch executes but does not count. They are given to each counter, not
  registered globally, so another library's formula for the same operator is no conflict.
- :func:`count_flops` of a backbone counts our kernels as one operation each, whatever backend runs them: libraries and
  Triton functions are no ATen operators, and what a backend executes is not what the operation costs. Attention is
  counted by visible (query, key) pairs, experts by executed rows, and the gated delta rule as the recurrence of
  spec §2, although its chunked form executes other products (:attr:`FlopCount.inside` has what it executed).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode, sdpa_flop_count

from rlcompute.backbones.base import Backbone
from rlcompute.kernels.registry import Kernel, Kernels
from rlcompute.kernels.routing_plan import RoutingPlan

REST = "torch"
"""Part of the count outside our kernels: projections, router, shared expert, gates, patch embedding."""


def _cpu_attention(query: Any, key: Any, value: Any, *args: Any, out_shape: Any = None, **kwargs: Any) -> int:
    """Of shapes [B,H,Q,D], [B,H,K,D]; like torch's other formulas it does not halve a causal square."""
    return int(sdpa_flop_count(query, key, value))


def _grouped_mm(
    a: Tensor, b: Tensor, offs: Tensor | None = None, *args: Any, out_val: Any = None, **kwargs: Any
) -> int:
    """2 per multiply-add of the rows (or of the inner extent) that the groups cover, not of all that are there."""
    if offs is None:  # [G,M,K] x [G,K,N]
        return 2 * prod(a.shape) * b.shape[-1]
    covered = int(offs[-1])
    if a.ndim == 2 and b.ndim == 2:  # groups along the inner extent
        return 2 * a.shape[0] * covered * b.shape[1]
    outer = b.shape[-1] if a.ndim == 2 else a.shape[-2]  # groups along a's rows or b's columns
    return 2 * covered * a.shape[-1] * outer


_grouped_mm._get_raw = True  # type: ignore[attr-defined]  # torch's mark of a formula that reads values, not shapes


def _solve_triangular(a: Any, b: Any, *args: Any, out_shape: Any = None, **kwargs: Any) -> int:
    """n^2 per right-hand side of [..., n, m]: n(n-1)/2 multiply-adds and n divisions."""
    return int(prod(b) * b[-2])


aten = torch.ops.aten
ATEN_FORMULAS: dict[Any, Callable[..., int]] = {
    aten._scaled_dot_product_flash_attention_for_cpu: _cpu_attention,
    aten._grouped_mm: _grouped_mm,
    aten.linalg_solve_triangular: _solve_triangular,
}
"""For ``FlopCounterMode(custom_mapping=...)``; entries there go before registered ones."""


@dataclass(frozen=True)
class FlopCount:
    """What a function's operations cost.

    Attributes:
        parts: FLOPs by kernel operation, and :data:`REST`.
        inside: FLOPs of the ATen operators that the torch backend of a kernel executed; 0 for other backends.
    """

    parts: dict[str, float]
    inside: dict[str, float]

    @property
    def total(self) -> float:
        return sum(self.parts.values())


def _visible_pairs(cu_q: Tensor, cu_k: Tensor, causal: bool) -> int:
    """(query, key) pairs; causal segments are aligned at their ends."""
    queries, keys = cu_q.diff(), cu_k.diff()
    pairs = queries * keys
    return int((pairs - queries * (queries - 1) // 2 if causal else pairs).sum())


def _attention(
    q_QHD: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor, *, scale: float, causal: bool = True
) -> float:
    heads, width = q_QHD.shape[1:]
    return 2.0 * heads * (width + v.shape[-1]) * _visible_pairs(cu_q, cu_k, causal)


def _gated_delta(
    q_THK: Tensor, k: Tensor, v_TVD: Tensor, g: Tensor, beta: Tensor, cu_seqlens: Tensor, *args: Any
) -> float:
    # Decay 1, read S k 2, write v k^T 2, read S q 2, for each element of each value head's state.
    return 7.0 * q_THK.shape[-1] * v_TVD.numel()


def _causal_conv(x_TC: Tensor, weight_CK: Tensor, bias: Tensor | None, cu_seqlens: Tensor) -> float:
    return 2.0 * x_TC.numel() * weight_CK.shape[1]


def _experts(
    x_Td: Tensor, plan: RoutingPlan, weights: Tensor, gate_up_E2Fd: Tensor, down_EdF: Tensor
) -> float:
    _, d, width = down_EdF.shape
    return 6.0 * d * width * int(plan.counts.sum())


def _score_statistic(residual_TA: Tensor, features_TF: Tensor, cu_seqlens: Tensor) -> float:
    return 2.0 * residual_TA.numel() * features_TF.shape[1]


KERNEL_FORMULAS: dict[str, Callable[..., float]] = {
    "attention": _attention,
    "gated_delta": _gated_delta,
    "causal_conv": _causal_conv,
    "experts": _experts,
    "score_statistic": _score_statistic,
}
"""FLOPs of one call, from the kernel's own arguments. Planning and compaction multiply nothing."""


def count_flops(function: Callable[[], Any], backbone: Backbone) -> FlopCount:
    """Run ``function`` and count what ``backbone`` executes in it.

    Args:
        function: runs anything on the backbone, e.g. ``lambda: encode(backbone, hidden, pack, policy)``.
        backbone: its kernels are wrapped while the function runs.
    """
    parts: dict[str, float] = dict.fromkeys(KERNEL_FORMULAS, 0.0)
    inside = dict.fromkeys(KERNEL_FORMULAS, 0.0)
    mode = FlopCounterMode(display=False, custom_mapping=ATEN_FORMULAS)

    def counting(op: str, kernel: Kernel) -> Kernel:
        def run(*args: Any, **kwargs: Any) -> Any:
            before = mode.get_total_flops()
            result = kernel(*args, **kwargs)
            inside[op] += mode.get_total_flops() - before
            parts[op] += KERNEL_FORMULAS[op](*args, **kwargs)
            return result

        return run

    with _wrapped(backbone, counting), mode:
        function()
    parts[REST] = mode.get_total_flops() - sum(inside.values())
    return FlopCount(parts, inside)


@contextmanager
def _wrapped(backbone: Backbone, wrap: Callable[[str, Kernel], Kernel]) -> Iterator[None]:
    """The backbone's counted kernels behind ``wrap``, for the time of a block."""
    own: Kernels = backbone.kernels
    counted = [field.name for field in fields(own) if field.name in KERNEL_FORMULAS]
    backbone.kernels = replace(own, **{op: wrap(op, getattr(own, op)) for op in counted})
    try:
        yield
    finally:
        backbone.kernels = own
