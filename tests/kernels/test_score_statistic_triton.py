from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings

from rlcompute.kernels.score_statistic import naive_segment_score_statistic
from rlcompute.kernels.score_statistic_triton import BACKEND, triton_score_statistic
from tests.kernels.packs import assert_close, offsets, random, short_packs, wide
from tests.kernels.triton_device import DEVICE, there


def check(residual, features, lengths):
    out = triton_score_statistic(*there(residual, features), offsets(lengths)).cpu()
    assert out.dtype is torch.float32
    # The sums are in float32 whatever the inputs' type.
    assert_close(out, naive_segment_score_statistic(*wide(residual, features), offsets(lengths)), 1e-5)
    return out


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("actions", "features"), [(3, 17), (1, 64), (5, 130), (3, 1)])
def test_equals_outer_product_by_outer_product(dtype, actions, features):
    lengths = (0, 1, 30, 0, 7)
    out = check(random(38, actions, seed=1, dtype=dtype), random(38, features, seed=2, dtype=dtype), lengths)
    assert not out[[0, 3]].any()


@given(lengths=short_packs)
@settings(max_examples=15, deadline=None)
def test_random_packings(lengths):
    check(random(sum(lengths), 3, seed=3), random(sum(lengths), 5, seed=4), lengths)


def test_neighbours_change_nothing_even_when_they_are_nan():
    residual, features = random(20, 3, seed=5), random(20, 9, seed=6)
    alone = triton_score_statistic(*there(residual[5:12], features[5:12]), offsets([7]))
    for tensor in (residual, features):
        tensor[:5] = tensor[12:] = float("nan")
    packed = triton_score_statistic(*there(residual, features), offsets((5, 7, 8)))
    assert torch.equal(packed[1], alone[0])


def test_mixed_types_and_strided_inputs():
    check(random(3, 10, seed=7).t(), random(10, 12, seed=8, dtype=torch.bfloat16)[:, 2:9], (4, 6))


def test_probe_refuses_float64():
    assert BACKEND.probe(DEVICE, torch.bfloat16) is None
    assert "less than torch.float64" in BACKEND.probe(DEVICE, torch.float64)
