from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlcompute.kernels import experts
from rlcompute.kernels.experts import naive_ragged_experts
from rlcompute.kernels.routing_plan import plan_routing
from tests.kernels.packs import assert_close, random, relative_error, uniform, wide


def ragged_experts(x, ids, weights, keep, gate_up, down):
    return experts.ragged_experts(x, plan_routing(ids, keep, len(gate_up)), weights, gate_up, down)


def inputs(tokens: int, k: int, experts: int, d: int, width: int, dtype=torch.float32):
    ids = uniform(tokens, experts, seed=1).topk(k).indices
    return (
        random(tokens, d, seed=2, dtype=dtype),
        ids,
        uniform(tokens, k, seed=3, dtype=dtype),
        random(experts, 2 * width, d, seed=4, dtype=dtype),
        random(experts, d, width, seed=5, dtype=dtype),
    )


def run_both(tokens, k, experts, d, width, keep, dtype=torch.float32):
    x, ids, weights, gate_up, down = inputs(tokens, k, experts, d, width, dtype)
    out = ragged_experts(x, ids, weights, keep, gate_up, down)
    x64, weights64, gate_up64, down64 = wide(x, weights, gate_up, down)
    assert out.dtype is dtype
    assert_close(out, naive_ragged_experts(x64, ids, weights64, keep, gate_up64, down64))
    return out


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize(("d", "width", "k", "experts"), [(7, 5, 2, 4), (8, 3, 1, 3), (33, 17, 4, 4)])
def test_equals_pair_by_pair(dtype, d, width, k, experts):
    run_both(19, k, experts, d, width, None, dtype)
    run_both(19, k, experts, d, width, uniform(19, k, seed=6) < 0.5, dtype)


@given(data=st.data(), tokens=st.integers(0, 9), k=st.integers(1, 4), group=st.integers(1, 20))
@settings(max_examples=60, deadline=None)
def test_any_number_of_experts_a_token(data, tokens, k, group):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(experts, "GROUP_ROWS", group)
        check_any_number_of_experts(data, tokens, k)


def check_any_number_of_experts(data, tokens, k):
    flags = data.draw(st.lists(st.booleans(), min_size=tokens * k, max_size=tokens * k))
    keep = torch.tensor(flags, dtype=torch.bool).view(tokens, k)
    out = run_both(tokens, k, 5, 6, 3, keep)
    assert torch.equal(out[~keep.any(1)], torch.zeros_like(out[~keep.any(1)]))


def test_no_token_keeps_an_expert():
    out = run_both(6, 2, 4, 5, 3, torch.zeros(6, 2, dtype=torch.bool))
    assert not out.any()


def test_all_tokens_on_one_expert():
    x, _, weights, gate_up, down = inputs(12, 1, 4, 6, 5)
    ids = torch.full((12, 1), 2)
    reference = naive_ragged_experts(*wide(x), ids, *wide(weights), None, *wide(gate_up, down))
    assert_close(ragged_experts(x, ids, weights, None, gate_up, down), reference)


def test_agrees_with_transformers():
    modeling = pytest.importorskip("transformers.models.qwen3_5_moe.modeling_qwen3_5_moe")
    config = pytest.importorskip("transformers").Qwen3_5MoeTextConfig(
        num_experts=6, hidden_size=16, moe_intermediate_size=8, num_experts_per_tok=3
    )
    x, ids, weights, gate_up, down = inputs(20, 3, 6, 16, 8)
    config._experts_implementation = "eager"
    module = modeling.Qwen3_5MoeExperts(config)
    module.gate_up_proj.data, module.down_proj.data = gate_up, down
    with torch.no_grad():
        assert_close(ragged_experts(x, ids, weights, None, gate_up, down), module(x, ids, weights))


def test_skipping_a_pair_equals_a_weight_of_zero():
    x, ids, weights, gate_up, down = inputs(15, 3, 5, 8, 4)
    keep = uniform(15, 3, seed=7) < 0.4
    zeroed = ragged_experts(x, ids, weights * keep, None, gate_up, down)
    assert relative_error(ragged_experts(x, ids, weights, keep, gate_up, down), zeroed) <= 1e-6


@pytest.mark.parametrize("ragged", [True, False])
def test_gradients(ragged):
    x, ids, weights, gate_up, down = inputs(5, 2, 4, 6, 3)
    keep = (uniform(5, 2, seed=8) < 0.5) if ragged else None
    tensors = [t.double().requires_grad_() for t in (x, weights, gate_up, down)]
    assert torch.autograd.gradcheck(lambda x, w, g, d: ragged_experts(x, ids, w, keep, g, d), tensors)


def test_inputs_stay_as_they_were():
    tensors = inputs(8, 2, 4, 6, 3)
    before = [t.clone() for t in tensors]
    x, ids, weights, gate_up, down = tensors
    ragged_experts(x, ids, weights, None, gate_up, down)
    assert all(torch.equal(a, b) for a, b in zip(tensors, before, strict=True))
