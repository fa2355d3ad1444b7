from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from rlcompute.kernels.segments import (
    length_buckets,
    positions_in_segment,
)
from tests.kernels.packs import offsets, short_packs


@given(lengths=short_packs)
@settings(max_examples=40, deadline=None)
def test_positions(lengths):
    assert positions_in_segment(offsets(lengths)).tolist() == [i for n in lengths for i in range(n)]


@given(lengths=st.lists(st.integers(0, 200), max_size=30), room=st.integers(0, 5), ratio=st.floats(1.0, 2.0))
@settings(max_examples=80, deadline=None)
def test_buckets_hold_every_segment_once_within_their_bounds(lengths, room, ratio):
    buckets = length_buckets(lengths, lambda longest: room, ratio)
    members = sorted(segment for bucket in buckets for segment in bucket)
    assert members == [s for s, n in enumerate(lengths) if n]
    for bucket in buckets:
        assert len(bucket) <= max(1, room)
        assert lengths[bucket[0]] == max(lengths[s] for s in bucket)
        assert lengths[bucket[0]] <= ratio * min(lengths[s] for s in bucket)
