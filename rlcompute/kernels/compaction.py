"""Removal of dropped tokens from a packed stream.

Shape legend: T packed tokens, S segments, R surviving tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rlcompute.kernels.registry import register, runs_anywhere


def naive_survivors(keep_T: Tensor, cu_seqlens: Tensor) -> tuple[Tensor, Tensor]:
    """One token at a time. Same contract as :func:`survivors`."""
    index: list[int] = []
    offsets = [0]
    for s in range(len(cu_seqlens) - 1):
        index += [t for t in range(int(cu_seqlens[s]), int(cu_seqlens[s + 1])) if bool(keep_T[t])]
        offsets.append(len(index))
    return (
        torch.tensor(index, dtype=torch.int64, device=keep_T.device),
        torch.tensor(offsets, dtype=torch.int64, device=keep_T.device),
    )


def survivors(keep_T: Tensor, cu_seqlens: Tensor) -> tuple[Tensor, Tensor]:
    """Rows that stay, in order, and the segment offsets among them.

    Args:
        keep_T: bool ``[T]``.
        cu_seqlens: int64 ``[S + 1]``.

    Returns:
        ``index`` int64 ``[R]`` into the old stream, and ``cu_seqlens`` int64 ``[S + 1]`` of the new one. A
        segment that lost every token stays as an empty segment.
    """
    index_R = keep_T.nonzero().squeeze(1)
    kept_before = torch.zeros(len(keep_T) + 1, dtype=torch.int64, device=keep_T.device)
    torch.cumsum(keep_T, dim=0, out=kept_before[1:])
    return index_R, kept_before[cu_seqlens]


register("compaction", "torch", survivors, probe=runs_anywhere)
