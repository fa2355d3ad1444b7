"""Segment bookkeeping that the CPU kernels share: which packed rows belong together, and length buckets.

Shape legend: T packed tokens, S segments, N segments of one bucket, L the bucket's padded length.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

# A bucket's padded length may exceed its shortest member by at most this factor. Smaller wastes less
# arithmetic on padding; larger makes fewer, bigger batches, which matters because short segments cost
# more in dispatch than in arithmetic.
MAX_PADDING_RATIO = 1.3


def segment_lengths(cu_seqlens: Tensor) -> list[int]:
    """Host-side lengths of the segments.

    Args:
        cu_seqlens: int64 ``[S + 1]`` on the CPU, starts at 0, non-decreasing.
    """
    lengths: list[int] = cu_seqlens.diff().tolist()
    return lengths


def positions_in_segment(cu_seqlens: Tensor) -> Tensor:
    """Position of every token inside its segment: int64 ``[T]`` on the CPU."""
    lengths = cu_seqlens.diff()
    starts_T = torch.repeat_interleave(cu_seqlens[:-1], lengths)
    return torch.arange(len(starts_T), device=cu_seqlens.device) - starts_T


def length_buckets(
    lengths: Sequence[int], members_allowed: Callable[[int], int], max_ratio: float = MAX_PADDING_RATIO
) -> list[list[int]]:
    """Group segments of similar length; empty segments belong to no bucket.

    Args:
        lengths: tokens of each segment.
        members_allowed: given a bucket's longest length, how many segments it may hold (at least one is
            put in whatever the answer). Kernels bound their temporaries to the cache with it.
        max_ratio: longest over shortest length allowed inside one bucket.

    Returns:
        Segment numbers per bucket, longest bucket first, the longest segment first inside each.
    """
    order = sorted((s for s, n in enumerate(lengths) if n > 0), key=lengths.__getitem__, reverse=True)
    buckets: list[list[int]] = []
    longest = room = 0
    for segment in order:
        if room <= 0 or lengths[segment] * max_ratio < longest:
            buckets.append([])
            longest = lengths[segment]
            room = members_allowed(longest)
        buckets[-1].append(segment)
        room -= 1
    return buckets


@dataclass(frozen=True)
class PaddedLayout:
    """Buckets laid end to end, every segment padded to its bucket's length: P padded rows in all.

    Attributes:
        rows_P: int64 packed row of each padded row. Padding repeats the segment's own last row, so that
            whatever is computed there can neither read nor disturb another segment.
        places_T: int64 padded row of each packed token, the way back.
    """

    rows_P: Tensor
    places_T: Tensor


def padded_layout(
    cu_seqlens: Tensor, buckets: Sequence[Sequence[int]], padded: Sequence[int]
) -> PaddedLayout:
    """Lay out buckets of segments.

    Args:
        cu_seqlens: int64 ``[S + 1]``.
        buckets: segment numbers per bucket; every non-empty segment appears exactly once, no empty one does.
        padded: padded length of each bucket, at least that of its longest segment.
    """
    device = cu_seqlens.device
    order_N = torch.tensor([s for bucket in buckets for s in bucket], dtype=torch.int64, device=device)
    sizes = [n for bucket, n in zip(buckets, padded, strict=True) for _ in bucket]
    padded_N = torch.tensor(sizes, dtype=torch.int64, device=device)
    start_N, last_N = cu_seqlens[order_N], cu_seqlens[order_N + 1] - 1
    begin_N = padded_N.cumsum(0) - padded_N
    rows_P = torch.arange(sum(sizes), device=device) + torch.repeat_interleave(start_N - begin_N, padded_N)
    rows_P = torch.minimum(rows_P, torch.repeat_interleave(last_N, padded_N))
    shift_S = torch.zeros_like(cu_seqlens[:-1]).index_copy_(0, order_N, begin_N - start_N)
    places_T = torch.repeat_interleave(shift_S, cu_seqlens.diff())
    return PaddedLayout(rows_P, places_T + torch.arange(len(places_T), device=device))
