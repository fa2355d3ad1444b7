from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl

from rlcompute.kernels.triton_interpreter import bf16_enabled, enable_bf16
from rlcompute.kernels.triton_probe import is_interpreted
from tests.kernels.packs import random
from tests.kernels.triton_device import DEVICE

SIZE = 16


@triton.jit
def pointwise_kernel(a_ptr, b_ptr, out_ptr, larger_ptr, SIZE: tl.constexpr):
    places = tl.arange(0, SIZE)
    a, b = tl.load(a_ptr + places), tl.load(b_ptr + places)
    tl.store(out_ptr + places, a * b + a)
    tl.store(larger_ptr + places, (a > b).to(tl.int32))


@triton.jit
def cast_kernel(a_ptr, half_ptr, back_ptr, SIZE: tl.constexpr):
    places = tl.arange(0, SIZE)
    half = tl.load(a_ptr + places).to(tl.bfloat16)
    tl.store(half_ptr + places, half)
    tl.store(back_ptr + places, half.to(tl.float32))


@triton.jit
def dot_kernel(a_ptr, b_ptr, out_ptr, SIZE: tl.constexpr):
    places = tl.arange(0, SIZE)[:, None] * SIZE + tl.arange(0, SIZE)[None, :]
    tl.store(out_ptr + places, tl.dot(tl.load(a_ptr + places), tl.load(b_ptr + places)))


pytestmark = pytest.mark.skipif(not is_interpreted(dot_kernel), reason="compiled kernels")


def test_pointwise_operations_equal_torch():
    a, b = (random(SIZE, seed=seed, dtype=torch.bfloat16) for seed in (1, 2))
    b[3] = a[3]
    out, larger = torch.empty_like(a), torch.empty(SIZE, dtype=torch.int32)
    pointwise_kernel[(1,)](a, b, out, larger, SIZE=SIZE)
    assert torch.equal(out, a * b + a)
    assert torch.equal(larger.bool(), a > b)


def test_casts_round_to_nearest_even_and_back():
    special = [
        0.0,
        -0.0,
        float("inf"),
        -float("inf"),
        1e-40,
        3.4e38,
        1 + 2**-8,
        1 + 3 * 2**-8,
        1 + 2**-8 + 2**-20,
    ]
    values = torch.cat(
        [torch.tensor(special), random(SIZE - len(special) - 1, seed=3), torch.tensor([float("nan")])]
    )
    half, back = torch.empty(SIZE, dtype=torch.bfloat16), torch.empty(SIZE)
    cast_kernel[(1,)](values, half, back, SIZE=SIZE)
    assert torch.equal(half[:-1], values[:-1].bfloat16()) and half[-1].isnan()
    assert torch.equal(back[:-1], half[:-1].float()) and back[-1].isnan()


def test_dot_multiplies_values_and_not_their_bits():
    a, b = (random(SIZE, SIZE, seed=seed, dtype=torch.bfloat16) for seed in (4, 5))
    out = torch.empty(SIZE, SIZE)
    dot_kernel[(1,)](a, b, out, SIZE=SIZE)
    torch.testing.assert_close(out, a.float() @ b.float())


def test_enabling_again_changes_nothing():
    from triton.runtime.interpreter import InterpreterBuilder

    patched = InterpreterBuilder.create_dot
    assert DEVICE.type == "cuda" or bf16_enabled()
    enable_bf16()
    assert InterpreterBuilder.create_dot is patched
