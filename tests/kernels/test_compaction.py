from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlcompute.kernels.compaction import naive_survivors, survivors
from tests.kernels.packs import offsets, short_packs


@given(data=st.data(), lengths=short_packs)
@settings(max_examples=60, deadline=None)
def test_equals_token_by_token(data, lengths):
    flags = data.draw(st.lists(st.booleans(), min_size=sum(lengths), max_size=sum(lengths)))
    keep = torch.tensor(flags, dtype=torch.bool)
    for actual, reference in zip(
        survivors(keep, offsets(lengths)), naive_survivors(keep, offsets(lengths)), strict=True
    ):
        assert torch.equal(actual, reference)


def test_a_segment_without_survivors_stays_as_an_empty_one():
    index, cu = survivors(torch.tensor([True, False, False, True]), offsets((1, 2, 1)))
    assert index.tolist() == [0, 3]
    assert cu.tolist() == [0, 1, 1, 2]
