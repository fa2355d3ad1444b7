from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings

from rlcompute.kernels.score_statistic import naive_segment_score_statistic, segment_score_statistic
from tests.kernels.packs import assert_close, offsets, random, short_packs, wide


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_equals_outer_product_by_outer_product(dtype):
    lengths = (0, 1, 30, 0, 7)
    residual, features = random(38, 3, seed=1, dtype=dtype), random(38, 17, seed=2, dtype=dtype)
    out = segment_score_statistic(residual, features, offsets(lengths))
    assert out.dtype is (torch.float64 if dtype is torch.float64 else torch.float32)
    assert_close(out, naive_segment_score_statistic(*wide(residual, features), offsets(lengths)))
    assert not out[[0, 3]].any()


@given(lengths=short_packs)
@settings(max_examples=30, deadline=None)
def test_random_packings(lengths):
    residual, features = random(sum(lengths), 3, seed=3), random(sum(lengths), 5, seed=4)
    out = segment_score_statistic(residual, features, offsets(lengths))
    assert_close(out, naive_segment_score_statistic(*wide(residual, features), offsets(lengths)))


def test_is_the_gradient_of_the_log_probability():
    lengths = (4, 0, 9)
    features, weight = random(13, 6, seed=5).double(), random(3, 6, seed=6).double().requires_grad_()
    actions = torch.randint(3, (13,), generator=torch.Generator().manual_seed(7))
    logits = features @ weight.t()
    taken = torch.log_softmax(logits, dim=-1)[torch.arange(13), actions]
    residual = torch.nn.functional.one_hot(actions, 3) - torch.softmax(logits, dim=-1)
    statistic = segment_score_statistic(residual.detach(), features, offsets(lengths))
    for segment, logprob in enumerate(taken.split(list(lengths))):
        (expected,) = torch.autograd.grad(logprob.sum(), [weight], retain_graph=True)
        assert_close(statistic[segment], expected)
