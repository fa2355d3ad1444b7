"""Parity: how far each backend of each kernel is from the plain reference in float64.

The reference computes token by token. For the longest segments the ``torch`` backend in float64 stands in, which
:func:`check` measures against the plain reference on all other problems.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from rlcompute.benchmark.parity_problems import PROBLEMS, Problem
from rlcompute.errors import BackendError
from rlcompute.kernels import registry
from rlcompute.kernels.attention import naive_varlen_attention
from rlcompute.kernels.causal_conv import naive_causal_conv_silu
from rlcompute.kernels.compaction import naive_survivors
from rlcompute.kernels.experts import naive_ragged_experts
from rlcompute.kernels.gated_delta import naive_gated_delta_rule
from rlcompute.kernels.registry import Kernel
from rlcompute.kernels.routing_plan import RoutingPlan, naive_plan_routing, plan_routing
from rlcompute.kernels.score_statistic import naive_segment_score_statistic

TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 1e-2}
"""Largest difference over the reference's largest magnitude."""

Outputs = tuple[Tensor, ...]
Inputs = Mapping[str, Any]


@dataclass(frozen=True)
class ParityResult:
    """One case.

    Attributes:
        case: its name.
        error: largest difference over the reference's largest magnitude, gradients included.
        tolerance: largest error allowed; 0 where the result is a list of indices.
        refusal: why the backend declined to compute this case; it then counts as passed.
    """

    case: str
    error: float
    tolerance: float
    refusal: str | None = None

    @property
    def passed(self) -> bool:
        return self.refusal is not None or self.error <= self.tolerance


@dataclass(frozen=True)
class _Operation:
    """How to call a kernel and its plain reference on a problem's inputs."""

    run: Callable[[Kernel, Inputs], Outputs]
    plain: Callable[[Inputs], Outputs]
    differentiable: tuple[str, ...] = ()


def _run_experts(kernel: Kernel, x: Inputs) -> Outputs:
    plan = plan_routing(x["ids"], x["keep"], x["num_experts"])
    return (kernel(x["x"], plan, x["weights"], x["gate_up"], x["down"]),)


def _plan(plan: RoutingPlan) -> Outputs:
    return plan.token_rows, plan.slots, plan.offsets, plan.counts


def _attention(kernel: Kernel, x: Inputs) -> Outputs:
    return (kernel(x["q"], x["k"], x["v"], x["cu_q"], x["cu_k"], scale=x["scale"], causal=x["causal"]),)


def _gated_delta(kernel: Kernel, x: Inputs) -> Outputs:
    return (kernel(x["q"], x["k"], x["v"], x["g"], x["beta"], x["cu_seqlens"]),)


def _causal_conv(kernel: Kernel, x: Inputs) -> Outputs:
    return (kernel(x["x"], x["weight"], x.get("bias"), x["cu_seqlens"]),)


def _score_statistic(kernel: Kernel, x: Inputs) -> Outputs:
    return (kernel(x["residual"], x["features"], x["cu_seqlens"]),)


_OPERATIONS = {
    "attention": _Operation(_attention, lambda x: _attention(naive_varlen_attention, x)),
    "gated_delta": _Operation(
        _gated_delta, lambda x: _gated_delta(naive_gated_delta_rule, x), ("q", "k", "v", "g", "beta")
    ),
    "causal_conv": _Operation(_causal_conv, lambda x: _causal_conv(naive_causal_conv_silu, x)),
    "experts": _Operation(
        _run_experts,
        lambda x: (naive_ragged_experts(x["x"], x["ids"], x["weights"], x["keep"], x["gate_up"], x["down"]),),
        ("x", "weights"),
    ),
    "routing_plan": _Operation(
        lambda kernel, x: _plan(kernel(x["ids"], x["keep"], x["num_experts"])),
        lambda x: _plan(naive_plan_routing(x["ids"], x["keep"], x["num_experts"])),
    ),
    "compaction": _Operation(
        lambda kernel, x: kernel(x["keep"], x["cu_seqlens"]),
        lambda x: naive_survivors(x["keep"], x["cu_seqlens"]),
    ),
    "score_statistic": _Operation(
        _score_statistic, lambda x: _score_statistic(naive_segment_score_statistic, x)
    ),
}


def check(
    op: str,
    backend: str,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    cases: Iterable[str] | None = None,
) -> list[ParityResult]:
    """Runs a backend on the problems of its operation.

    Args:
        op: a key of :data:`rlcompute.kernels.registry.PROVIDERS`.
        backend: its name; must accept device and dtype.
        device: where the backend runs; the reference runs on the CPU.
        dtype: dtype under test.
        cases: keys of the operation's problems; None: all.

    Raises:
        BackendError: the backend does not run there.
    """
    device = torch.device(device)
    kernel = registry.select(op, device, dtype, backend)
    return [
        _check_case(op, backend, kernel, case, device, dtype)
        for case in (PROBLEMS[op] if cases is None else cases)
    ]


def _check_case(
    op: str, backend: str, kernel: Kernel, case: str, device: torch.device, dtype: torch.dtype
) -> ParityResult:
    problem = PROBLEMS[op][case]()
    tolerance = TOLERANCE[dtype] if problem.values else 0.0
    try:
        computed = evaluate(op, kernel, problem, device, dtype)
    except BackendError as error:
        return ParityResult(case, math.nan, tolerance, str(error))
    return ParityResult(case, largest_error(computed, case_reference(op, case, dtype)), tolerance)


@cache
def case_reference(op: str, case: str, dtype: torch.dtype) -> Outputs:
    """:func:`reference` of a named problem, computed once however many backends are compared with it."""
    return reference(op, PROBLEMS[op][case](), dtype)


def evaluate(op: str, kernel: Kernel, problem: Problem, device: torch.device, dtype: torch.dtype) -> Outputs:
    """Results of a kernel, followed by the gradients of the operations that have them (not for long problems)."""
    inputs = _inputs(problem, device, dtype)
    return _with_gradients(op, lambda x: _OPERATIONS[op].run(kernel, x), problem, inputs)


def reference(op: str, problem: Problem, dtype: torch.dtype) -> Outputs:
    """What :func:`evaluate` should have returned: float64, from inputs rounded to ``dtype``."""
    rounded = _inputs(problem, torch.device("cpu"), dtype)
    inputs = {
        name: value.double() if isinstance(value, Tensor) and value.is_floating_point() else value
        for name, value in rounded.items()
    }
    if not problem.long:
        return _with_gradients(op, _OPERATIONS[op].plain, problem, inputs)
    stand_in = registry.select(op, "cpu", torch.float64, registry.REFERENCE)
    return _with_gradients(op, lambda x: _OPERATIONS[op].run(stand_in, x), problem, inputs)


def largest_error(computed: Outputs, expected: Outputs) -> float:
    """Largest relative error over all results; infinite where shapes differ or a result is not finite.

    Results much smaller than the others are measured against a tenth of the largest: gradients of decays in short
    segments are sums that cancel, down to exactly zero in a segment of one token.
    """
    least = max((_magnitude(result) for result in expected), default=0.0) / 10
    return max(
        (
            _relative_error(a.detach().cpu(), b.detach(), max(_magnitude(b), least))
            for a, b in zip(computed, expected, strict=True)
        ),
        default=0.0,
    )


def _magnitude(result: Tensor) -> float:
    return float(result.detach().abs().max()) if result.numel() else 0.0


def _relative_error(computed: Tensor, expected: Tensor, scale: float) -> float:
    if computed.shape != expected.shape:
        return math.inf
    if torch.equal(computed.double(), expected.double()):
        return 0.0
    if not expected.is_floating_point() or not computed.isfinite().all() or not scale:
        return math.inf
    return float((computed.double() - expected).abs().max()) / scale


def _inputs(problem: Problem, device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
    precise = torch.promote_types(dtype, torch.float32)
    return {
        **{name: value.to(device, dtype) for name, value in problem.values.items()},
        **{name: value.to(device, precise) for name, value in problem.precise.items()},
        **{name: None if ids is None else ids.to(device) for name, ids in problem.indices.items()},
        **problem.host,
    }


def _with_gradients(
    op: str, run: Callable[[Inputs], Outputs], problem: Problem, inputs: dict[str, Any]
) -> Outputs:
    names = () if problem.long else _OPERATIONS[op].differentiable
    with torch.no_grad():
        outputs = run(inputs)
    if not names or not outputs[0].numel():
        return outputs
    leaves = [inputs[name].detach().requires_grad_() for name in names]
    recorded = run({**inputs, **dict(zip(names, leaves, strict=True))})[0]
    noise = torch.randn(recorded.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    cotangent = noise.to(torch.bfloat16).to(recorded)
    # Without executed pairs there is no graph to some or all inputs: their gradients are zero.
    found = (
        torch.autograd.grad(recorded, leaves, cotangent, allow_unused=True)
        if recorded.requires_grad
        else (None,) * len(leaves)
    )
    return (*outputs, *(torch.zeros_like(x) if g is None else g for x, g in zip(leaves, found, strict=True)))
