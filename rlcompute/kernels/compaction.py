"""Removal of dropped tokens from a packed stream.

Shape legend: T packed tokens, S segments, R surviving tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rlcompute.kernels.registry import Backend, runs_anywhere


def naive_survivors(keep_T: Tensor, cu_seqlens: Tensor) -> tuple[Tensor, Tensor]:
    """One token at a time. Same contract as :func:`survivors`."""
    index: list[int] = []
    offsets = [0]
    for s in range(len(cu_seqlens) - 1):
        index += [t for t in range(int(cu_seqlens[s]), int(cu_seqlens[s + 1])) if bool(keep_T[t])]
        offsets.append(len(index))
    return torch.tensor(index, dtype=torch.int64, device=keep_T.device), torch.tensor(offsets)


def survivors(keep_T: Tensor, cu_seqlens: Tensor) -> tuple[Tensor, Tensor]:
    """Rows that stay, in order, and the segment offsets among them.

    Args:
        keep_T: bool ``[T]``.
        cu_seqlens: int64 ``[S + 1]`` on the CPU.

    Returns:
        ``index`` int64 ``[R]`` into the old stream, and ``cu_seqlens`` int64 ``[S + 1]`` of the new one, on the CPU
        as well: reading it is the one time that a layer waits for the device. A segment that lost every token
        stays as an empty segment.
    """
    kept_before = torch.zeros(len(keep_T) + 1, dtype=torch.int64, device=keep_T.device)
    torch.cumsum(keep_T, dim=0, out=kept_before[1:])
    new_cu_seqlens = kept_before[cu_seqlens.to(keep_T.device, non_blocking=True)].cpu()
    index_R = torch.nonzero_static(keep_T, size=int(new_cu_seqlens[-1])).squeeze(1)
    return index_R, new_cu_seqlens


BACKEND = Backend(survivors, runs_anywhere)
