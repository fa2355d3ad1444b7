"""Tile-aware skipping: against the loop, and what it promises about rows and tiles."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rlcompute.kernels.routing_plan import tiles
from rlcompute.kernels.tile_skip import naive_tile_aware_keep, tile_aware_keep


def rows_of(ids_Tk: Tensor, keep_Tk: Tensor, experts: int) -> Tensor:
    return torch.bincount(ids_Tk[keep_Tk], minlength=experts)


@st.composite
def cases(draw: st.DrawFn) -> tuple[Tensor, Tensor, Tensor, int, int]:
    experts = draw(st.integers(1, 9))
    k, tokens = draw(st.integers(1, experts)), draw(st.integers(0, 40))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    popularity = torch.rand(experts, generator=generator) ** draw(st.sampled_from([0.1, 2.0, 8.0])) + 1e-6
    ids = (
        torch.stack([torch.multinomial(popularity, k, generator=generator) for _ in range(tokens)])
        if tokens
        else (torch.zeros(0, k, dtype=torch.int64))
    )
    if draw(st.booleans()):  # weights with many ties
        weights = torch.randint(0, 3, (tokens, k), generator=generator) / 4
    else:
        weights = torch.rand(tokens, k, generator=generator)
    share = draw(st.sampled_from([0.0, 0.2, 0.5, 0.9, 1.0]))
    keep = torch.rand(tokens, k, generator=generator) < share
    return ids, weights, keep, draw(st.sampled_from([1, 2, 4, 7, 64])), experts


@settings(max_examples=300, deadline=None)
@given(cases())
def test_equals_the_loop_and_keeps_its_promises(case: tuple[Tensor, Tensor, Tensor, int, int]) -> None:
    ids, weights, keep, tile, experts = case
    chosen = tile_aware_keep(ids, weights, keep, tile, experts)
    assert torch.equal(chosen, naive_tile_aware_keep(ids, weights, keep, tile, experts))
    assert chosen.shape == keep.shape and chosen.dtype == torch.bool
    assert (weights.double() * ~chosen).sum() <= (weights.double() * ~keep).sum()
    blind, aware = rows_of(ids, keep, experts), rows_of(ids, chosen, experts)
    assert tiles(aware, tile).sum() <= tiles(blind, tile).sum()
    # Whole tiles: each expert runs all of its rows, or full tiles only.
    full = rows_of(ids, torch.ones_like(keep), experts)
    assert ((aware == full) | (aware % tile == 0)).all()


def test_one_case_by_hand() -> None:
    """Two experts, tiles of 2 rows. Expert 0 has 5 rows (3 kept), expert 1 has 3 (1 kept)."""
    ids = torch.tensor([0, 0, 0, 0, 0, 1, 1, 1])[:, None]
    weights = torch.tensor([0.9, 0.1, 0.8, 0.7, 0.6, 0.3, 0.4, 0.2])[:, None]
    keep = torch.tensor([1, 1, 0, 1, 0, 0, 0, 1]).bool()[:, None]
    # Ranks of expert 0: rows 0, 3 | 1, 2 | 4; two tiles hold the kept ones, so row 2 comes back for nothing.
    # Ranks of expert 1: rows 7, 6 | 5; row 6 comes back. A mass of 1.2 to spend: the tile of mass 0.2 + 0.4 goes, the
    # one of mass 0.1 + 0.8 is more than what is left.
    chosen = tile_aware_keep(ids, weights, keep, 2, 2)[:, 0]
    assert chosen.tolist() == [True, True, True, True, False, False, False, False]


def test_nothing_to_skip_changes_nothing() -> None:
    ids = torch.tensor([[0, 1], [1, 2]])
    keep = torch.ones(2, 2, dtype=torch.bool)
    assert tile_aware_keep(ids, torch.rand(2, 2), keep, 128, 4).all()


def test_saves_most_tiles_where_blind_skipping_saves_few() -> None:
    """64 experts with a tile or two each: half of the rows gone leaves most tiles; about half of them
    can go at the same gate mass."""
    generator = torch.Generator().manual_seed(0)
    popularity = torch.randn(64, generator=generator).exp()
    ids = torch.multinomial(popularity.expand(512, -1), 8, generator=generator)
    weights = torch.rand(512, 8, generator=generator)
    keep = weights > 0.5
    full = tiles(rows_of(ids, torch.ones_like(keep), 64), 128).sum()
    blind = tiles(rows_of(ids, keep, 64), 128).sum()
    aware = tiles(rows_of(ids, tile_aware_keep(ids, weights, keep, 128, 64), 64), 128).sum()
    assert blind > 0.8 * full
    assert aware < 0.6 * full
