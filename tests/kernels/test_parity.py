"""Every backend that runs here against the plain reference in float64, and the parity check itself."""

from __future__ import annotations

import importlib.util
import math
import os

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from rlcompute.benchmark import parity, parity_problems
from rlcompute.benchmark.parity_problems import PROBLEMS
from rlcompute.errors import BackendError
from rlcompute.kernels import registry
from rlcompute.kernels.attention import varlen_attention
from rlcompute.kernels.experts import ragged_experts
from rlcompute.kernels.gated_delta import gated_delta_rule
from rlcompute.kernels.routing_plan import plan_routing

CPU = torch.device("cpu")
if importlib.util.find_spec("triton") is not None and os.environ.get("TRITON_INTERPRET") == "1":
    importlib.import_module("rlcompute.kernels.triton_interpreter").enable_bf16()


def runnable(*dtypes: torch.dtype, names: set[str] | None = None) -> list[pytest.param]:
    """(op, backend, dtype) of all backends that accept the CPU."""
    return [
        pytest.param(op, name, dtype, id=f"{op}-{name}-{str(dtype).removeprefix('torch.')}")
        for dtype in dtypes
        for op in registry.PROVIDERS
        for name, reason in registry.refusals(op, CPU, dtype).items()
        if reason is None and (names is None or name in names)
    ]


LONG = {op: [case for case, make in cases.items() if make().long] for op, cases in PROBLEMS.items()}
SHORT = {op: [case for case in cases if case not in LONG[op]] for op, cases in PROBLEMS.items()}
COMPILED = {"torch", "grouped_mm"}
INTERPRETED = {"triton"}

# Expert widths that are no multiple of 16 bytes are the one thing that a backend may decline.
MAY_REFUSE = {("experts", "grouped_mm", "unaligned widths")}


def assert_passed(op, backend, dtype, cases):
    results = parity.check(op, backend, CPU, dtype, cases)
    assert [r.case for r in results] == cases
    assert [r for r in results if not r.passed] == []
    assert {(op, backend, r.case) for r in results if r.refusal} <= MAY_REFUSE


@pytest.mark.parametrize(("op", "backend", "dtype"), runnable(torch.float32, torch.bfloat16))
def test_backend_agrees_with_the_reference(op, backend, dtype):
    assert_passed(op, backend, dtype, SHORT[op])


@pytest.mark.parametrize(("op", "backend", "dtype"), runnable(torch.float64, names={"torch"}))
def test_torch_may_stand_in_for_the_reference(op, backend, dtype):
    assert_passed(op, backend, dtype, SHORT[op])


@pytest.mark.parametrize(("op", "backend", "dtype"), runnable(torch.float32, torch.bfloat16, names=COMPILED))
def test_long_segments(op, backend, dtype):
    assert_passed(op, backend, dtype, LONG[op])


@pytest.mark.slow
@pytest.mark.parametrize(("op", "backend", "dtype"), runnable(torch.float32, names=INTERPRETED))
def test_long_segments_in_the_interpreter(op, backend, dtype):
    assert_passed(op, backend, dtype, LONG[op])


lengths = st.lists(st.integers(0, 9), max_size=6)
kept = st.none() | st.floats(0.0, 1.0)
tokens, k = st.integers(0, 9), st.integers(1, 4)
head_counts = st.sampled_from([(1, 1), (2, 1), (4, 2)])


@st.composite
def query_and_key_lengths(draw):
    pairs = draw(st.lists(st.tuples(st.integers(0, 7), st.integers(0, 7)), max_size=6))
    return [q for q, _ in pairs], [k for _, k in pairs]


PACKINGS = {
    "attention": st.builds(
        lambda both, heads, causal: parity_problems.attention(*both, heads=heads, width=8, causal=causal),
        query_and_key_lengths(),
        head_counts,
        st.booleans(),
    ),
    "gated_delta": st.builds(parity_problems.gated_delta, lengths, strongest=st.floats(0.0, 20.0)),
    "causal_conv": st.builds(parity_problems.causal_conv, lengths, with_bias=st.booleans()),
    "experts": st.builds(
        parity_problems.experts, tokens, k=k, experts=st.integers(4, 6), widths=st.just((16, 8)), kept=kept
    ),
    "routing_plan": st.builds(parity_problems.routing, tokens, k=k, experts=st.integers(4, 6), kept=kept),
    "compaction": st.builds(parity_problems.compaction, lengths, kept=st.floats(0.0, 1.0)),
    "score_statistic": st.builds(parity_problems.score_statistic, lengths, features=st.integers(1, 9)),
}


def assert_random_packing_agrees(op, backend, dtype, data):
    problem = data.draw(PACKINGS[op])
    kernel = registry.select(op, CPU, dtype, backend)
    computed = parity.evaluate(op, kernel, problem, CPU, dtype)
    assert parity.largest_error(computed, parity.reference(op, problem, dtype)) <= parity.TOLERANCE[dtype]


@pytest.mark.parametrize(("op", "backend", "dtype"), runnable(torch.float32, names=COMPILED))
@given(data=st.data())
@settings(max_examples=15, deadline=None)
def test_random_packings(op, backend, dtype, data):
    assert_random_packing_agrees(op, backend, dtype, data)


@pytest.mark.parametrize(("op", "backend", "dtype"), runnable(torch.float32, names=INTERPRETED))
@given(data=st.data())
@settings(max_examples=4, deadline=None, phases=[Phase.explicit, Phase.reuse, Phase.generate])
def test_random_packings_in_the_interpreter(op, backend, dtype, data):
    assert_random_packing_agrees(op, backend, dtype, data)


def error_of(op, kernel, problem, dtype=torch.float32):
    computed = parity.evaluate(op, kernel, problem, CPU, dtype)
    return parity.largest_error(computed, parity.reference(op, problem, dtype))


class TestNoticesBrokenKernels:
    def test_wrong_numbers(self):
        problem = parity_problems.attention((3, 5), (3, 5))
        assert error_of("attention", varlen_attention, problem) < 1e-6
        broken = error_of("attention", lambda *a, **kw: varlen_attention(*a, **kw) * 1.0001, problem)
        assert 5e-5 < broken < 2e-4

    def test_a_leak_across_a_boundary(self):
        def leaking(q, k, v, cu_q, cu_k, **options):
            return varlen_attention(q, k, v, cu_q[[0, -1]], cu_k[[0, -1]], **options)

        assert error_of("attention", leaking, parity_problems.attention((3, 5), (3, 5))) > 0.1

    def test_pairs_executed_that_were_skipped(self):
        def deaf(x, plan, weights, gate_up, down):
            return ragged_experts(
                x, plan_routing(plan.expert_ids_Tk, None, len(down)), weights, gate_up, down
            )

        assert error_of("experts", deaf, parity_problems.experts(6, kept=0.5)) > 0.1

    def test_a_wrong_gradient(self):
        def detached(q, k, v, g, beta, cu_seqlens):
            return gated_delta_rule(q.detach() * (q / q.detach()), k, v, g, beta.detach(), cu_seqlens)

        assert error_of("gated_delta", detached, parity_problems.gated_delta((4, 3))) > 0.1

    @pytest.mark.parametrize("spoil", [lambda x: x[:-1], lambda x: x * math.nan])
    def test_shapes_and_nan(self, spoil):
        kernel = lambda *a, **kw: spoil(varlen_attention(*a, **kw))  # noqa: E731
        assert error_of("attention", kernel, parity_problems.attention((3, 5), (3, 5))) == math.inf

    def test_something_where_nothing_is_expected(self):
        kernel = lambda q, *a, **kw: q + 1  # noqa: E731
        assert error_of("attention", kernel, parity_problems.attention((3,), (0,))) == math.inf


def test_a_backend_that_does_not_run_here_is_an_error():
    with pytest.raises(BackendError, match="torch_varlen"):
        parity.check("attention", "torch_varlen", CPU, torch.bfloat16)
