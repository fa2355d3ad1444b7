from __future__ import annotations

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from rlcompute.kernels.causal_conv import causal_conv_silu
from rlcompute.kernels.masked_conv import masked_causal_conv_silu, naive_masked_causal_conv_silu
from rlcompute.pack import Alive
from tests.kernels.packs import assert_close, offsets, random, relative_error, short_packs, uniform, wide


def alive(tokens: int, share: float = 0.6, seed: int = 9) -> Alive:
    """Masses above 0 for the dropped too, which must not be seen."""
    survives = uniform(tokens, seed=seed) < share
    return Alive(torch.where(survives, 0.5, 0.1) + 0.4 * uniform(tokens, seed=seed + 1), survives)


def all_or_nothing(is_alive_T: torch.Tensor) -> Alive:
    return Alive(is_alive_T.float(), is_alive_T)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("with_bias", [True, False])
def test_equals_token_by_token(dtype, with_bias):
    lengths = (0, 1, 2, 3, 4, 40, 0)
    x, weight = random(50, 7, seed=1, dtype=dtype), random(7, 4, seed=2, dtype=dtype)
    bias = random(7, seed=3, dtype=dtype) if with_bias else None
    out = masked_causal_conv_silu(x, weight, bias, offsets(lengths), alive(50))
    assert out.dtype is dtype
    wide_alive = Alive(alive(50).mass_T.double(), alive(50).is_alive_T)
    reference = naive_masked_causal_conv_silu(
        x.double(), weight.double(), None if bias is None else bias.double(), offsets(lengths), wide_alive
    )
    assert_close(out, reference)


@example(lengths=[3], taps=5, share=1.0)
@example(lengths=[2, 2], taps=3, share=0.0)
@given(lengths=short_packs, taps=st.integers(1, 5), share=st.floats(0.0, 1.0))
@settings(max_examples=40, deadline=None)
def test_survivors_get_what_a_convolution_without_the_others_gives_them(lengths, taps, share):
    x, weight, bias = random(sum(lengths), 3, seed=4), random(3, taps, seed=5), random(3, seed=6)
    keep = uniform(sum(lengths), seed=7) < share
    kept = offsets([int(part.sum()) for part in keep.split(lengths)])
    out = masked_causal_conv_silu(x, weight, bias, offsets(lengths), all_or_nothing(keep))
    assert_close(out[keep], causal_conv_silu(x[keep], weight, bias, kept))
    wide_keep = Alive(keep.double(), keep)
    reference = naive_masked_causal_conv_silu(*wide(x, weight, bias), offsets(lengths), wide_keep)
    assert_close(out, reference)


def test_neighbours_change_nothing_even_when_they_are_nan():
    lengths = (6, 5, 1, 9)
    x, weight, masses = random(21, 4, seed=11), random(4, 4, seed=12), alive(21)
    here = Alive(masses.mass_T[6:11], masses.is_alive_T[6:11])
    alone = masked_causal_conv_silu(x[6:11], weight, None, offsets([5]), here)
    x[:6] = x[11:] = float("nan")
    packed = masked_causal_conv_silu(x, weight, None, offsets(lengths), masses)
    assert relative_error(packed[6:11], alone) <= 1e-6


def test_gradients():
    keep = torch.tensor([True, True, True, False, True, True, True, False, True, True])
    tensors = [
        t.double().requires_grad_()
        for t in (random(10, 3, seed=1), random(3, 4, seed=2), random(3, seed=3), keep)
    ]
    cu = offsets((1, 0, 6, 3))
    assert torch.autograd.gradcheck(
        lambda x, w, b, m: masked_causal_conv_silu(x, w, b, cu, Alive(m, keep)), tensors
    )
