from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlcompute.kernels.attention import naive_varlen_attention, varlen_attention
from tests.kernels.packs import ODD_LENGTHS, assert_close, offsets, random, relative_error, wide


def inputs(queries: int, keys: int, heads: int, kv_heads: int, width: int, dtype=torch.float32):
    return (
        random(queries, heads, width, seed=1, dtype=dtype),
        random(keys, kv_heads, width, seed=2, dtype=dtype),
        random(keys, kv_heads, width, seed=3, dtype=dtype),
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("heads", "kv_heads", "width"), [(2, 2, 7), (4, 2, 8), (3, 1, 5)])
@pytest.mark.parametrize("causal", [True, False])
def test_equals_softmax_written_out(dtype, heads, kv_heads, width, causal):
    lengths = (0, 1, 2, 17, 0, 33)
    cu = offsets(lengths)
    tensors = inputs(sum(lengths), sum(lengths), heads, kv_heads, width, dtype)
    out = varlen_attention(*tensors, cu, cu, scale=0.3, causal=causal)
    assert out.dtype is dtype
    assert_close(out, naive_varlen_attention(*wide(*tensors), cu, cu, scale=0.3, causal=causal))


@given(lengths=st.lists(st.tuples(st.integers(0, 7), st.integers(0, 7)), max_size=6), causal=st.booleans())
@settings(max_examples=40, deadline=None)
def test_different_numbers_of_queries_and_keys(lengths, causal):
    cu_q, cu_k = offsets([q for q, _ in lengths]), offsets([k for _, k in lengths])
    tensors = inputs(int(cu_q[-1]), int(cu_k[-1]), 4, 2, 6)
    out = varlen_attention(*tensors, cu_q, cu_k, scale=0.5, causal=causal)
    assert_close(out, naive_varlen_attention(*wide(*tensors), cu_q, cu_k, scale=0.5, causal=causal))


def test_one_query_a_segment_is_the_last_row_of_all_queries():
    lengths = [n for n in ODD_LENGTHS if n]
    cu = offsets(lengths)
    q, k, v = inputs(sum(lengths), sum(lengths), 4, 2, 8)
    every = varlen_attention(q, k, v, cu, cu, scale=0.4)
    last = cu[1:] - 1
    one = varlen_attention(q[last], k, v, offsets([1] * len(lengths)), cu, scale=0.4)
    assert relative_error(one, every[last]) <= 1e-6


def test_neighbours_change_nothing_even_when_they_are_nan():
    lengths = (5, 9, 4)
    cu = offsets(lengths)
    q, k, v = inputs(18, 18, 2, 1, 8)
    alone = varlen_attention(q[5:14], k[5:14], v[5:14], offsets([9]), offsets([9]), scale=0.4)
    for tensor in (q, k, v):
        tensor[:5] = tensor[14:] = float("nan")
    packed = varlen_attention(q, k, v, cu, cu, scale=0.4)
    assert relative_error(packed[5:14], alone) <= 1e-6


def test_gradients():
    cu = offsets((3, 0, 1, 4))
    tensors = [t.double().requires_grad_() for t in inputs(8, 8, 4, 2, 3)]
    assert torch.autograd.gradcheck(lambda q, k, v: varlen_attention(q, k, v, cu, cu, scale=0.7), tensors)
