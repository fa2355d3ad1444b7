from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from rlcompute.kernels.segments import (
    length_buckets,
    padded_layout,
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


@given(lengths=short_packs)
@settings(max_examples=40, deadline=None)
def test_padding_and_unpadding_give_the_stream_back(lengths):
    cu = offsets(lengths)
    buckets = length_buckets(lengths, lambda longest: 3)
    padded = [lengths[bucket[0]] + 1 for bucket in buckets]
    layout = padded_layout(cu, buckets, padded)
    assert len(layout.rows_P) == sum(len(b) * n for b, n in zip(buckets, padded, strict=True))
    assert layout.rows_P[layout.places_T].tolist() == list(range(sum(lengths)))


def test_padding_repeats_the_segments_own_last_row():
    layout = padded_layout(offsets((2, 0, 3)), [[2], [0]], [4, 3])
    assert layout.rows_P.tolist() == [2, 3, 4, 4, 0, 1, 1]
    assert layout.places_T.tolist() == [4, 5, 0, 1, 2]
