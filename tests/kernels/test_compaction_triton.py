from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlcompute.kernels import compaction_triton
from rlcompute.kernels.compaction import naive_survivors
from rlcompute.kernels.compaction_triton import BACKEND, triton_compaction
from tests.kernels.packs import offsets, short_packs, uniform
from tests.kernels.triton_device import DEVICE


def check(keep, lengths):
    index, cu_seqlens = triton_compaction(keep.to(DEVICE), offsets(lengths))
    naive_index, naive_cu_seqlens = naive_survivors(keep, offsets(lengths))
    assert index.device.type == DEVICE.type and cu_seqlens.device.type == "cpu"
    assert index.dtype is cu_seqlens.dtype is torch.int64
    assert torch.equal(index.cpu(), naive_index)
    assert torch.equal(cu_seqlens, naive_cu_seqlens)


@given(data=st.data(), lengths=short_packs, block=st.sampled_from([4, 1024]))
@settings(max_examples=20, deadline=None)
def test_equals_token_by_token(data, lengths, block):
    flags = data.draw(st.lists(st.booleans(), min_size=sum(lengths), max_size=sum(lengths)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compaction_triton, "BLOCK", block)
        check(torch.tensor(flags, dtype=torch.bool), lengths)


@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
def test_more_than_one_block(share):
    check(uniform(4097, seed=1) < share, (1000, 0, 1024, 2073))


def test_a_strided_mask():
    check((uniform(30, 2, seed=2) < 0.5)[:, 1], (10, 20))


def test_the_last_token_of_each_segment():
    lengths = (5, 1, 9)
    keep = torch.zeros(15, dtype=torch.bool)
    keep[offsets(lengths)[1:] - 1] = True
    index, cu_seqlens = triton_compaction(keep.to(DEVICE), offsets(lengths))
    assert index.tolist() == [4, 5, 14]
    assert cu_seqlens.tolist() == [0, 1, 2, 3]


def test_probe_asks_for_the_device_only():
    assert all(BACKEND.probe(DEVICE, dtype) is None for dtype in (torch.float64, torch.bfloat16))
