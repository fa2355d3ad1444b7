"""Segment bookkeeping that the CPU kernels share: which packed rows belong together, and length buckets.

Shape legend: T packed tokens, S segments.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

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
