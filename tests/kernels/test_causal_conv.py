from __future__ import annotations

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from rlcompute.kernels.causal_conv import causal_conv_silu, naive_causal_conv_silu
from tests.kernels.packs import (
    assert_close,
    offsets,
    random,
    relative_error,
    segment_by_segment,
    short_packs,
    wide,
)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("with_bias", [True, False])
def test_equals_token_by_token(dtype, with_bias):
    lengths = (0, 1, 2, 3, 4, 40, 0)
    x, weight = random(50, 7, seed=1, dtype=dtype), random(7, 4, seed=2, dtype=dtype)
    bias = random(7, seed=3, dtype=dtype) if with_bias else None
    out = causal_conv_silu(x, weight, bias, offsets(lengths))
    assert out.dtype is dtype
    reference = naive_causal_conv_silu(
        x.double(), weight.double(), None if bias is None else bias.double(), offsets(lengths)
    )
    assert_close(out, reference)


@example(lengths=[3], taps=5)
@given(lengths=short_packs, taps=st.integers(1, 5))
@settings(max_examples=40, deadline=None)
def test_random_packings(lengths, taps):
    x, weight = random(sum(lengths), 3, seed=4), random(3, taps, seed=5)
    out = causal_conv_silu(x, weight, None, offsets(lengths))
    assert_close(out, naive_causal_conv_silu(*wide(x, weight), None, offsets(lengths)))


def test_agrees_with_a_padded_depthwise_convolution():
    x, weight, bias = random(30, 5, seed=6), random(5, 4, seed=7), random(5, seed=8)
    oracle = torch.nn.functional.conv1d(x.t()[None], weight[:, None], bias, padding=3, groups=5)[
        0, :, :30
    ].t()
    assert_close(causal_conv_silu(x, weight, bias, offsets([30])), torch.nn.functional.silu(oracle))


def test_reads_a_strided_view():
    x, weight = random(20, 12, seed=9), random(5, 4, seed=10)
    view = x[:, 3:8]
    cu = offsets((8, 12))
    assert torch.equal(
        causal_conv_silu(view, weight, None, cu), causal_conv_silu(view.contiguous(), weight, None, cu)
    )


def test_neighbours_change_nothing_even_when_they_are_nan():
    lengths = (6, 5, 1, 9)
    x, weight = random(21, 4, seed=11), random(4, 4, seed=12)
    alone = segment_by_segment(lambda part, cu: causal_conv_silu(part, weight, None, cu), lengths, x)
    x[:6] = float("nan")
    packed = causal_conv_silu(x, weight, None, offsets(lengths))
    assert relative_error(packed[6:], alone[6:]) <= 1e-6


def test_recorded_and_unrecorded_results_agree():
    lengths = (3, 0, 8)
    x, weight, bias = random(11, 4, seed=13), random(4, 4, seed=14), random(4, seed=15)
    plain = causal_conv_silu(x, weight, bias, offsets(lengths))
    recorded = causal_conv_silu(x.requires_grad_(), weight, bias, offsets(lengths))
    assert recorded.requires_grad
    assert relative_error(recorded, plain) <= 1e-6


def test_gradients():
    tensors = [
        t.double().requires_grad_() for t in (random(9, 3, seed=1), random(3, 4, seed=2), random(3, seed=3))
    ]
    cu = offsets((1, 0, 5, 3))
    assert torch.autograd.gradcheck(lambda x, w, b: causal_conv_silu(x, w, b, cu), tensors)
