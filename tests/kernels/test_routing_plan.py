from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlcompute.kernels.routing_plan import naive_plan_routing, plan_routing, tiles


@given(data=st.data(), tokens=st.integers(0, 8), experts=st.integers(1, 6))
@settings(max_examples=60, deadline=None)
def test_equals_expert_by_expert(data, tokens, experts):
    k = data.draw(st.integers(1, experts))
    rows = data.draw(st.lists(st.permutations(range(experts)), min_size=tokens, max_size=tokens))
    ids = torch.tensor([row[:k] for row in rows], dtype=torch.int64).view(tokens, k)
    flags = st.lists(st.booleans(), min_size=tokens * k, max_size=tokens * k)
    keep = data.draw(st.none() | flags)
    keep_Tk = None if keep is None else torch.tensor(keep, dtype=torch.bool).view(tokens, k)
    plan, reference = plan_routing(ids, keep_Tk, experts), naive_plan_routing(ids, keep_Tk, experts)
    for name in ("token_rows", "slots", "offsets", "counts"):
        assert torch.equal(getattr(plan, name), getattr(reference, name)), name


def test_more_experts_than_the_narrow_sort_key_holds():
    ids = torch.tensor([[40_000, 3], [39_999, 40_000]])
    plan = plan_routing(ids, None, 40_001)
    assert plan.token_rows.tolist() == [0, 1, 0, 1]
    assert plan.slots.tolist() == [1, 0, 0, 1]
    assert plan.counts[[3, 39_999, 40_000]].tolist() == [1, 1, 2]


def test_tiles_round_every_expert_up():
    counts = torch.tensor([[0, 1, 127, 128], [129, 256, 300, 0]])
    assert tiles(counts, 128).tolist() == [[0, 1, 1, 1], [2, 2, 3, 0]]
