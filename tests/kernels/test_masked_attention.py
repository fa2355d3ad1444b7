from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlcompute.kernels import masked_attention as module
from rlcompute.kernels.attention import varlen_attention
from rlcompute.kernels.masked_attention import masked_attention, naive_masked_attention
from tests.kernels.packs import ODD_LENGTHS, assert_close, offsets, random, relative_error, uniform, wide


def inputs(tokens: int, heads: int = 4, kv_heads: int = 2, width: int = 6, dtype=torch.float32):
    return (
        random(tokens, heads, width, seed=1, dtype=dtype),
        random(tokens, kv_heads, width, seed=2, dtype=dtype),
        random(tokens, kv_heads, width, seed=3, dtype=dtype),
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("heads", "kv_heads", "width"), [(2, 2, 7), (4, 2, 8), (3, 1, 5)])
def test_equals_the_shares_written_out(dtype, heads, kv_heads, width):
    lengths = (0, 1, 2, 17, 0, 33, 20)
    cu = offsets(lengths)
    tensors, mass = inputs(sum(lengths), heads, kv_heads, width, dtype), uniform(sum(lengths), seed=4)
    out = masked_attention(*tensors, cu, cu, mass, scale=0.3)
    assert out.dtype is dtype
    assert_close(out, naive_masked_attention(*wide(*tensors), cu, cu, mass.double(), scale=0.3))


def test_odd_lengths_without_dropped_tokens_equal_attention():
    cu = offsets(ODD_LENGTHS)
    tensors = inputs(sum(ODD_LENGTHS))
    out = masked_attention(*tensors, cu, cu, torch.ones(sum(ODD_LENGTHS)), scale=0.4)
    assert_close(out, varlen_attention(*tensors, cu, cu, scale=0.4))


@given(
    lengths=st.lists(st.tuples(st.integers(0, 7), st.integers(0, 7)).map(sorted), max_size=6), data=st.data()
)
@settings(max_examples=40, deadline=None)
def test_random_masses_and_queries_of_the_last_tokens(lengths, data):
    cu_q, cu_k = offsets([q for q, _ in lengths]), offsets([k for _, k in lengths])
    tokens = int(cu_k[-1])
    masses = st.sampled_from([0.0, 1.0]) | st.floats(0.0, 1.0, width=32)
    mass = torch.tensor(data.draw(st.lists(masses, min_size=tokens, max_size=tokens)))
    q, k, v = random(int(cu_q[-1]), 4, 6, seed=1), *inputs(tokens)[1:]
    out = masked_attention(q, k, v, cu_q, cu_k, mass, scale=0.5)
    assert_close(out, naive_masked_attention(*wide(q, k, v), cu_q, cu_k, mass.double(), scale=0.5))


@given(data=st.data())
@settings(max_examples=25, deadline=None)
def test_survivors_see_what_attention_without_the_others_shows_them(data):
    lengths = (9, 1, 14)
    keep = torch.tensor(data.draw(st.lists(st.booleans(), min_size=24, max_size=24)))
    q, k, v = inputs(24)
    cu = offsets(lengths)
    kept = offsets([int(part.sum()) for part in keep.split(list(lengths))])
    out = masked_attention(q, k, v, cu, cu, keep.float(), scale=0.4)
    assert_close(out[keep], varlen_attention(q[keep], k[keep], v[keep], kept, kept, scale=0.4))


def test_last_queries_alone_are_the_last_rows_of_all_queries(monkeypatch):
    monkeypatch.setattr(module, "BLOCK_ELEMENTS", 500)
    lengths = [n for n in ODD_LENGTHS if n]
    cu = offsets(lengths)
    q, k, v = inputs(sum(lengths))
    mass = (uniform(sum(lengths), seed=4) < 0.5).float()
    every = masked_attention(q, k, v, cu, cu, mass, scale=0.4)
    last = cu[1:] - 1
    one = masked_attention(q[last], k, v, offsets([1] * len(lengths)), cu, mass, scale=0.4)
    assert relative_error(one, every[last]) <= 1e-6


def test_a_dropped_key_that_outshines_all_others_spoils_nothing():
    q, k, v = (x.requires_grad_() for x in inputs(4))
    mass = torch.tensor([1.0, 0.0, 1.0, 1.0], requires_grad=True)
    cu = offsets((4,))
    loud = torch.cat([k[:1], 1e4 * q[3:, ::2], k[2:]])
    out = masked_attention(q, loud, v, cu, cu, mass, scale=1.0)
    rows = torch.tensor([0, 2, 3])
    kept = varlen_attention(q[rows], k[rows], v[rows], offsets((3,)), offsets((3,)), scale=1.0)
    assert_close(out[rows], kept)
    for gradient in torch.autograd.grad(out.sum(), [q, k, v, mass]):
        assert bool(gradient.isfinite().all())


def test_neighbours_change_nothing_even_when_they_are_nan():
    lengths = (5, 9, 4)
    tensors = [*inputs(18), uniform(18, seed=4)]
    middle = [t[5:14].clone().requires_grad_() for t in tensors]
    q, k, v, mass = middle
    alone = masked_attention(q, k, v, offsets([9]), offsets([9]), mass, scale=0.4)
    expected = torch.autograd.grad(alone.square().sum(), middle)
    for tensor in tensors:
        tensor[:5] = tensor[14:] = float("nan")
        tensor.requires_grad_()
    q, k, v, mass = tensors
    cu = offsets(lengths)
    packed = masked_attention(q, k, v, cu, cu, mass, scale=0.4)[5:14]
    assert relative_error(packed, alone) <= 1e-6
    for actual, reference in zip(torch.autograd.grad(packed.square().sum(), tensors), expected, strict=True):
        assert_close(actual[5:14], reference)


@pytest.mark.parametrize("queries", [(3, 0, 1, 5), (1, 0, 1, 1)])
def test_gradients(queries):
    cu_q, cu_k = offsets(queries), offsets((3, 0, 1, 5))
    _, k, v = inputs(9, 4, 2, 3, torch.float64)
    q = random(sum(queries), 4, 3, seed=1, dtype=torch.float64)
    mass = torch.tensor([0.0, 1.0, 1.0, 1.0, 0.0, 1.0, 0.3, 0.0, 1.0], dtype=torch.float64)
    tensors = [t.requires_grad_() for t in (q, k, v, mass)]
    assert torch.autograd.gradcheck(
        lambda q, k, v, m: masked_attention(q, k, v, cu_q, cu_k, m, scale=0.7), tensors
    )
