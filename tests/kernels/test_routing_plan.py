from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlcompute.kernels.routing_plan import (
    naive_plan_routing,
    naive_tile_map,
    plan_routing,
    tile_map,
    tiles,
)


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


@given(data=st.data(), tokens=st.integers(0, 20), experts=st.integers(1, 6), rows_per_tile=st.integers(1, 5))
@settings(max_examples=80, deadline=None)
def test_tile_map_equals_expert_by_expert(data, tokens, experts, rows_per_tile):
    numbers = st.integers(0, experts - 1)
    ids = torch.tensor(data.draw(st.lists(numbers, min_size=tokens, max_size=tokens)), dtype=torch.int64)
    flags = torch.tensor(
        data.draw(st.lists(st.booleans(), min_size=tokens, max_size=tokens)), dtype=torch.bool
    )
    plan = plan_routing(ids[:, None], data.draw(st.sampled_from([None, flags[:, None]])), experts)
    expert, start = tile_map(plan, rows_per_tile)
    naive_expert, naive_start = naive_tile_map(plan, rows_per_tile)
    used = len(naive_expert)
    assert used == int(tiles(plan.counts, rows_per_tile).sum())
    assert expert.dtype is start.dtype is torch.int32
    assert torch.equal(expert[:used], naive_expert)
    assert torch.equal(start[:used], naive_start)
    assert expert[used:].eq(-1).all() and start[used:].eq(-1).all()


def test_tile_map_is_as_long_as_the_worst_routing_needs():
    spread = torch.tensor([[0]] * 5 + [[1]] * 5 + [[2]])
    assert tile_map(plan_routing(spread, None, 3), 4)[0].tolist() == [0, 0, 1, 1, 2]
    one_each = torch.arange(6)[:, None]
    assert tile_map(plan_routing(one_each, None, 8), 128)[0].tolist() == [0, 1, 2, 3, 4, 5]
