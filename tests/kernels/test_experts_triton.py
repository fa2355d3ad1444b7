from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlcompute.errors import BackendError
from rlcompute.kernels import experts_triton
from rlcompute.kernels.experts import naive_ragged_experts
from rlcompute.kernels.experts_triton import BACKEND, choose_launches, triton_experts
from rlcompute.kernels.routing_plan import plan_routing
from tests.kernels.packs import assert_close, random, relative_error, uniform, wide
from tests.kernels.triton_device import DEVICE, there

TOLERANCES = {torch.bfloat16: 1e-2, torch.float16: 1e-2, torch.float32: 1e-5}


def inputs(tokens: int, k: int, experts: int, d: int, width: int, dtype=torch.float32) -> SimpleNamespace:
    return SimpleNamespace(
        x=random(tokens, d, seed=1, dtype=dtype),
        ids=uniform(tokens, experts, seed=2).topk(k).indices,
        weights=uniform(tokens, k, seed=3),
        gate_up=random(experts, 2 * width, d, seed=4, dtype=dtype) * d**-0.5,
        down=random(experts, d, width, seed=5, dtype=dtype) * width**-0.5,
    )


def run(case: SimpleNamespace, keep=None):
    plan = plan_routing(case.ids.to(DEVICE), None if keep is None else keep.to(DEVICE), len(case.down))
    x, weights, gate_up, down = there(case.x, case.weights, case.gate_up, case.down)
    return triton_experts(x, plan, weights, gate_up, down).cpu()


def naive(case: SimpleNamespace, keep=None):
    x, weights, gate_up, down = wide(case.x, case.weights, case.gate_up, case.down)
    return naive_ragged_experts(x, case.ids, weights, keep, gate_up, down)


def check(case: SimpleNamespace, keep=None):
    out = run(case, keep)
    assert out.dtype is case.x.dtype
    assert_close(out, naive(case, keep), TOLERANCES[out.dtype])
    return out


@pytest.mark.parametrize(
    ("dtype", "ragged"),
    [(torch.float32, False), (torch.float32, True), (torch.bfloat16, True), (torch.float16, False)],
)
@pytest.mark.parametrize(
    ("tokens", "k", "experts", "d", "width"),
    [(19, 2, 4, 33, 17), (9, 1, 3, 16, 16), (1, 1, 1, 1, 1), (3, 2, 2, 70, 130), (2, 2, 6, 140, 5)],
)
def test_equals_pair_by_pair(dtype, ragged, tokens, k, experts, d, width):
    case = inputs(tokens, k, experts, d, width, dtype)
    check(case, uniform(tokens, k, seed=6) < 0.5 if ragged else None)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tokens", [20, 40, 90])
def test_every_tile_size_with_full_and_partial_tiles(dtype, tokens):
    ids = torch.zeros(2 * tokens, 1, dtype=torch.int64)
    ids[: tokens // 2] = 1
    case = inputs(2 * tokens, 1, 2, 8, 6, dtype)
    case.ids = ids
    check(case)


def test_more_tiles_than_run_side_by_side_and_several_column_blocks():
    case = inputs(24, 1, 20, 3, 70)
    case.ids = (torch.arange(24) % 20)[:, None]
    assert len(case.down) > 2 * choose_launches(24, 20, torch.float32, ragged=False).gate_up.GROUP
    check(case)


def test_no_token_keeps_an_expert():
    assert not check(inputs(6, 2, 4, 5, 3), torch.zeros(6, 2, dtype=torch.bool)).any()


@pytest.mark.parametrize(("tokens", "k"), [(0, 2), (3, 0)])
def test_no_rows_at_all(tokens, k):
    case = inputs(tokens, k, 4, 5, 3)
    case.x.requires_grad_()
    out = run(case)
    assert out.shape == (tokens, 5) and not out.any()
    out.sum().backward()
    assert torch.equal(case.x.grad, torch.zeros(tokens, 5))


def test_all_tokens_on_one_expert():
    case = inputs(40, 1, 4, 6, 5)
    case.ids = torch.full((40, 1), 2)
    check(case)


@given(data=st.data(), tokens=st.integers(1, 9), k=st.integers(1, 4))
@settings(max_examples=12, deadline=None)
def test_any_number_of_experts_a_token(data, tokens, k):
    flags = data.draw(st.lists(st.booleans(), min_size=tokens * k, max_size=tokens * k))
    keep = torch.tensor(flags, dtype=torch.bool).view(tokens, k)
    out = check(inputs(tokens, k, 5, 6, 3), keep)
    assert torch.equal(out[~keep.any(1)], torch.zeros_like(out[~keep.any(1)]))


def test_reads_nothing_that_is_not_kept():
    """Tokens without experts are NaN, and so is memory that nobody has written to."""
    case = inputs(12, 2, 4, 9, 5)
    keep = uniform(12, 2, seed=7) < 0.4
    keep[3] = keep[8] = False
    expected = naive(case, keep)
    case.x[3] = case.x[8] = float("nan")
    case.weights[~keep] = float("nan")
    case.x.requires_grad_()
    case.weights.requires_grad_()
    torch.use_deterministic_algorithms(True)
    try:
        out = run(case, keep)
        out.sum().backward()
    finally:
        torch.use_deterministic_algorithms(False)
    assert_close(out, expected)
    assert torch.isfinite(case.x.grad).all()
    assert torch.equal(case.weights.grad[~keep], torch.zeros(int((~keep).sum())))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("tokens", "k", "experts", "d", "width"), [(7, 2, 4, 19, 11), (6, 1, 2, 5, 70), (66, 1, 1, 3, 2)]
)
def test_gradients_equal_autograd_of_the_reference(dtype, tokens, k, experts, d, width):
    case = inputs(tokens, k, experts, d, width, dtype)
    keep = uniform(tokens, k, seed=8) < 0.7
    case.x.requires_grad_()
    case.weights.requires_grad_()
    upstream = random(tokens, d, seed=9, dtype=dtype)
    grads = torch.autograd.grad(run(case, keep), [case.x, case.weights], upstream)
    x, weights, gate_up, down = wide(case.x, case.weights, case.gate_up, case.down)
    references = [x.requires_grad_(), weights.requires_grad_()]
    out = naive_ragged_experts(x, case.ids, weights, keep, gate_up, down)
    expected = torch.autograd.grad(out, references, upstream.double())
    assert grads[0].dtype is dtype and grads[1].dtype is torch.float32
    for actual, reference in zip(grads, expected, strict=True):
        assert_close(actual, reference, TOLERANCES[dtype])


def test_a_strided_input_and_half_precision_weights():
    case = inputs(8, 2, 4, 24, 5, torch.bfloat16)
    case.gate_up, case.down = case.gate_up[:, :, :12].contiguous(), case.down[:, :12].contiguous()
    case.x, case.weights = case.x[:, 6:18], case.weights.t().contiguous().t().bfloat16()
    check(case)


def test_the_same_bits_every_time_and_untouched_inputs():
    case = inputs(15, 3, 5, 8, 4)
    before = [t.clone() for t in vars(case).values()]
    assert torch.equal(run(case), run(case))
    assert all(torch.equal(a, b) for a, b in zip(vars(case).values(), before, strict=True))


def test_skipping_a_pair_equals_a_weight_of_zero():
    case = inputs(15, 3, 5, 8, 4)
    keep = uniform(15, 3, seed=7) < 0.4
    skipped = run(case, keep)
    case.weights = case.weights * keep
    assert relative_error(skipped, run(case)) <= 1e-6


def test_refuses_experts_that_are_trained():
    case = inputs(4, 1, 2, 3, 2)
    case.down.requires_grad_()
    with pytest.raises(BackendError, match=r"weights down ask for a gradient.*force the backend torch"):
        run(case)
    with torch.no_grad():
        check(case)


def test_refuses_other_layouts_and_dtypes():
    case = inputs(4, 1, 2, 3, 2)
    case.gate_up = case.gate_up.transpose(1, 2).contiguous().transpose(1, 2)
    with pytest.raises(BackendError, match=r"gate_up of shape \[2, 4, 3\] are not contiguous"):
        run(case)
    case = inputs(4, 1, 2, 3, 2)
    case.x = case.x.half()
    with pytest.raises(BackendError, match=r"float16 for the hidden states, torch.float32 for gate_up"):
        run(case)


@pytest.mark.skipif(DEVICE.type != "cpu", reason="compiled kernels")
def test_probe_in_the_interpreter(monkeypatch):
    cpu = torch.device("cpu")
    assert BACKEND.probe(cpu, torch.float32) is None
    assert BACKEND.probe(cpu, torch.bfloat16) is None
    assert "not in torch.float64" in BACKEND.probe(cpu, torch.float64)
    assert "TRITON_INTERPRET" in BACKEND.probe(torch.device("cuda"), torch.float32)
    monkeypatch.setattr(experts_triton, "bf16_enabled", lambda: False)
    assert "enable_bf16()" in BACKEND.probe(cpu, torch.bfloat16)
    assert BACKEND.probe(cpu, torch.float16) is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tiles_follow_the_mean_number_of_rows(dtype):
    largest = 64 if dtype is torch.float32 else 128
    for ragged, factor in ((False, 1), (True, 2)):
        tiles = [
            choose_launches(factor * rows * 8, 8, dtype, ragged=ragged).gate_up.rows
            for rows in (0, 1, 16, 17, 33, 65, 4000)
        ]
        assert tiles == [16, 16, 16, 32, 64, largest, largest]
