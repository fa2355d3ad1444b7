"""Removal of dropped tokens from a packed stream in Triton, with a single copy from the device to the host.

Shape legend: T packed tokens, S segments, R surviving tokens, B blocks of tokens.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# (the compiler evaluates annotations of kernels and accepts none but its own)

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from rlcompute.kernels.registry import Backend
from rlcompute.kernels.triton_probe import device_refusal

# Tokens of a program: eight for each of 128 threads, loaded as one 8-byte word.
BLOCK = 1024


@triton.jit(do_not_specialize=["num_tokens"])
def count_kernel(keep_ptr, counts_ptr, num_tokens, BLOCK: tl.constexpr):
    """``counts[b]``: survivors of block b."""
    block = tl.program_id(0)
    tokens = block * BLOCK + tl.arange(0, BLOCK)
    kept = tl.load(keep_ptr + tokens, mask=tokens < num_tokens, other=0).to(tl.int32)
    tl.store(counts_ptr + block, tl.sum(kept, axis=0))


@triton.jit(do_not_specialize=["num_tokens"])
def scatter_kernel(
    keep_ptr,  # uint8 [T], 0 or 1
    counts_ptr,  # int32 [B]
    index_ptr,  # out int64 [T], the first R entries are written
    before_ptr,  # out int32 [T + 1] survivors before each token; the first entry is the caller's
    num_tokens,
    BLOCK: tl.constexpr,
):
    """Write one block's survivors behind those of the blocks before it."""
    block = tl.program_id(0)
    lanes = tl.arange(0, BLOCK)
    # Every program adds up the blocks before its own: a million tokens have no more blocks than one load reads.
    base = tl.sum(tl.zeros((BLOCK,), dtype=tl.int32), axis=0)
    for start in range(0, block, BLOCK):
        earlier = start + lanes
        base += tl.sum(tl.load(counts_ptr + earlier, mask=earlier < block, other=0), axis=0)
    tokens = block * BLOCK + lanes
    live = tokens < num_tokens
    kept = tl.load(keep_ptr + tokens, mask=live, other=0).to(tl.int32)
    through = base + tl.cumsum(kept, axis=0)
    tl.store(before_ptr + 1 + tokens, through, mask=live)
    tl.store(index_ptr + through - 1, tokens.to(tl.int64), mask=live & (kept != 0))


def triton_compaction(keep_T: Tensor, cu_seqlens: Tensor) -> tuple[Tensor, Tensor]:
    """Rows that stay, in order, and the segment offsets among them.

    Args:
        keep_T: bool ``[T]``.
        cu_seqlens: int64 ``[S + 1]`` on the CPU, from 0 to T.

    Returns:
        ``index`` int64 ``[R]`` into the old stream, on the device of ``keep_T``, and ``cu_seqlens`` int64
        ``[S + 1]`` of the new one on the CPU: the one copy for which the host waits, R being its last entry. A
        segment that lost every token stays as an empty segment.
    """
    tokens, device = len(keep_T), keep_T.device
    if not tokens:
        return torch.empty(0, dtype=torch.int64, device=device), cu_seqlens.clone()
    bounds = cu_seqlens.to(device, non_blocking=True)
    blocks = triton.cdiv(tokens, BLOCK)
    keep = keep_T.contiguous().view(torch.uint8)
    counts_B = torch.empty(blocks, dtype=torch.int32, device=device)
    index_T = torch.empty(tokens, dtype=torch.int64, device=device)
    before = torch.zeros(tokens + 1, dtype=torch.int32, device=device)
    with torch.cuda.device_of(keep_T):
        count_kernel[(blocks,)](keep, counts_B, tokens, BLOCK=BLOCK, num_warps=4)
        scatter_kernel[(blocks,)](keep, counts_B, index_T, before, tokens, BLOCK=BLOCK, num_warps=4)
    new_cu_seqlens = before.index_select(0, bounds).cpu().to(torch.int64)
    return index_T[: int(new_cu_seqlens[-1])], new_cu_seqlens


def probe(device: torch.device, dtype: torch.dtype) -> str | None:
    """Why the kernels cannot run there; ``None`` if they can. The dtype of the hidden states does not matter."""
    return device_refusal(scatter_kernel, device)


BACKEND = Backend(triton_compaction, probe)
