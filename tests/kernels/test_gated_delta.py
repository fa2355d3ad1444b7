from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings

from rlcompute.kernels import gated_delta
from rlcompute.kernels.gated_delta import gated_delta_rule, naive_gated_delta_rule
from tests.kernels.packs import (
    ODD_LENGTHS,
    assert_close,
    offsets,
    random,
    relative_error,
    segment_by_segment,
    short_packs,
    uniform,
    wide,
)


def inputs(tokens: int, key_heads=2, heads=4, key_width=8, width=6, strongest=2.0, dtype=torch.float32):
    return (
        random(tokens, key_heads, key_width, seed=1, dtype=dtype),
        random(tokens, key_heads, key_width, seed=2, dtype=dtype),
        random(tokens, heads, width, seed=3, dtype=dtype),
        -strongest * uniform(tokens, heads, seed=4, dtype=dtype),
        uniform(tokens, heads, seed=5, dtype=dtype),
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_equals_the_recurrence(dtype):
    cu = offsets(ODD_LENGTHS)
    tensors = inputs(sum(ODD_LENGTHS), dtype=dtype)
    out = gated_delta_rule(*tensors, cu)
    assert out.dtype is dtype
    assert_close(out, naive_gated_delta_rule(*wide(*tensors), cu))


@pytest.mark.parametrize(
    ("key_heads", "heads", "key_width", "width"), [(1, 1, 3, 5), (2, 2, 8, 8), (1, 3, 7, 4), (2, 8, 5, 9)]
)
def test_head_layouts(key_heads, heads, key_width, width):
    lengths = (4, 140, 1)
    tensors = inputs(sum(lengths), key_heads, heads, key_width, width)
    assert_close(
        gated_delta_rule(*tensors, offsets(lengths)),
        naive_gated_delta_rule(*wide(*tensors), offsets(lengths)),
    )


@given(lengths=short_packs)
@settings(max_examples=30, deadline=None)
def test_random_packings(lengths):
    cu = offsets(lengths)
    tensors = inputs(sum(lengths))
    assert_close(gated_delta_rule(*tensors, cu), naive_gated_delta_rule(*wide(*tensors), cu))


def test_blocks_of_one_segment_and_chunks_of_three_tokens(monkeypatch):
    monkeypatch.setattr(gated_delta, "CHUNK", 3)
    monkeypatch.setattr(gated_delta, "BLOCK_ELEMENTS", 1)
    lengths = (7, 3, 0, 10, 1, 7)
    tensors = inputs(sum(lengths))
    assert_close(
        gated_delta_rule(*tensors, offsets(lengths)),
        naive_gated_delta_rule(*wide(*tensors), offsets(lengths)),
    )


def test_strong_decays_between_weak_ones_stay_exact():
    """Sums of decays reach thousands while neighbours differ by a hundredth: float32 sums would lose that."""
    lengths = (200, 90)
    q, k, v, _, beta = inputs(sum(lengths))
    g = torch.where(uniform(sum(lengths), 4, seed=6) < 0.5, -40.0, -0.01)
    out = gated_delta_rule(q, k, v, g, beta, offsets(lengths))
    assert_close(out, naive_gated_delta_rule(*wide(q, k, v, g, beta), offsets(lengths)), 1e-6)


def test_agrees_with_transformers_on_one_segment():
    modeling = pytest.importorskip("transformers.models.qwen3_5_moe.modeling_qwen3_5_moe")
    q, k, v, g, beta = inputs(150)
    oracle, _ = modeling.torch_recurrent_gated_delta_rule(
        q[None], k[None], v[None], g=g[None], beta=beta[None], use_qk_l2norm_in_kernel=True
    )
    assert_close(gated_delta_rule(q, k, v, g, beta, offsets([150])), oracle[0])


def test_a_segment_does_not_depend_on_its_neighbours():
    lengths = (30, 131, 29, 28, 1)
    tensors = inputs(sum(lengths))
    alone = segment_by_segment(gated_delta_rule, lengths, *tensors)
    assert relative_error(gated_delta_rule(*tensors, offsets(lengths)), alone) <= 1e-6
    for tensor in tensors:
        tensor[:30] = float("nan")
    packed = gated_delta_rule(*tensors, offsets(lengths))
    assert relative_error(packed[30:], alone[30:]) <= 1e-6


def test_a_dropped_token_equals_one_that_neither_decays_nor_writes():
    """What makes compaction exact: g = 0 and beta = 0 in place leave the other tokens' outputs as removal does."""
    lengths = (9, 14)
    q, k, v, g, beta = inputs(sum(lengths))
    keep = uniform(sum(lengths), seed=7) < 0.6
    in_place = gated_delta_rule(q, k, v, g * keep[:, None], beta * keep[:, None], offsets(lengths))
    kept = [int(part.sum()) for part in keep.split(list(lengths))]
    removed = gated_delta_rule(q[keep], k[keep], v[keep], g[keep], beta[keep], offsets(kept))
    assert relative_error(removed, in_place[keep]) <= 1e-6


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_gradients_equal_the_recurrence(dtype):
    lengths = (0, 1, 9, 140, 40)
    cu = offsets(lengths)
    tensors = [t.requires_grad_() for t in inputs(sum(lengths), dtype=dtype)]
    references = [t.requires_grad_() for t in wide(*tensors)]
    upstream = random(sum(lengths), 4, 6, seed=8, dtype=dtype)
    grads = torch.autograd.grad(gated_delta_rule(*tensors, cu), tensors, upstream)
    expected = torch.autograd.grad(naive_gated_delta_rule(*references, cu), references, upstream.double())
    for actual, reference in zip(grads, expected, strict=True):
        assert_close(actual, reference)


@pytest.mark.parametrize(
    ("lengths", "chunk", "block_elements"),
    [((3, 0, 1, 4), 128, 800_000), ((5, 4), 3, 800_000), ((7,), 2, 1)],
)
def test_gradients_where_tokens_neither_decay_nor_write(monkeypatch, lengths, chunk, block_elements):
    """Numerically, in all inputs, also where decay and write strength are exactly 0, as those of dropped tokens."""
    monkeypatch.setattr(gated_delta, "CHUNK", chunk)
    monkeypatch.setattr(gated_delta, "BLOCK_ELEMENTS", block_elements)
    monkeypatch.setattr(gated_delta, "ALONE_ELEMENTS", 2 * block_elements)
    q, k, v, g, beta = inputs(sum(lengths), 1, 2, 3, 2, dtype=torch.float64)
    mass = (uniform(sum(lengths), seed=7) < 0.5).double()
    cu = offsets(lengths)
    tensors = [t.requires_grad_() for t in (q, k, v, g, beta, mass)]

    def rule(q, k, v, g, beta, mass):
        return gated_delta_rule(q, k, v, g * mass[:, None], beta * mass[:, None], cu)

    assert torch.autograd.gradcheck(rule, tensors)
    tensors[4] = (beta.detach() * mass.detach()[:, None]).requires_grad_()
    assert torch.autograd.gradcheck(lambda *inputs: gated_delta_rule(*inputs, cu), tensors[:5])


def test_gradients_of_masses_over_several_chunks():
    lengths = (140, 300)
    cu = offsets(lengths)
    q, k, v, g, beta = inputs(sum(lengths))
    mass = (uniform(sum(lengths), seed=7) < 0.4).float().requires_grad_()
    reference = mass.detach().double().requires_grad_()
    upstream = random(sum(lengths), 4, 6, seed=8)
    out = gated_delta_rule(q, k, v, g * mass[:, None], beta * mass[:, None], cu)
    expected = naive_gated_delta_rule(
        *wide(q, k, v), g.double() * reference[:, None], beta.double() * reference[:, None], cu
    )
    assert_close(out, expected)
    (actual_T,) = torch.autograd.grad(out, [mass], upstream)
    (expected_T,) = torch.autograd.grad(expected, [reference], upstream.double())
    assert_close(actual_T, expected_T)


def test_gradient_of_the_values_alone_is_not_spoiled_by_reused_memory():
    q, k, v, g, beta = inputs(12)
    cu = offsets((5, 7))
    v.requires_grad_()
    v_wide = wide(v)[0].requires_grad_()
    (actual,) = torch.autograd.grad(gated_delta_rule(q, k, v, g, beta, cu).square().sum(), [v])
    out = naive_gated_delta_rule(q.double(), k.double(), v_wide, g.double(), beta.double(), cu)
    (expected,) = torch.autograd.grad(out.square().sum(), [v_wide])
    assert_close(actual, expected)


def test_inputs_stay_as_they_were():
    tensors = inputs(20)
    before = [t.clone() for t in tensors]
    gated_delta_rule(*tensors, offsets((20,)))
    assert all(torch.equal(a, b) for a, b in zip(tensors, before, strict=True))
