"""Packed attention by flash-attn (``flash_attn_varlen_func``, version 2.1 and later of the library).

Written from the library's documented contract: its causal mask is aligned at the bottom right, queries that see
no key yield zeros, grouped heads and widths that are no multiple of 8 are its own business.

Shape legend: Q packed queries, T packed keys, H query heads, G key/value heads, D head width.
"""

from __future__ import annotations

import importlib

import torch
from torch import Tensor

from rlcompute.errors import BackendError
from rlcompute.kernels.cuda_libraries import cuda_refusal, device_bounds, import_refusal
from rlcompute.kernels.registry import Backend

LIBRARY = "flash_attn"
MAX_WIDTH = 256


def max_queries(longest: int, has_empty: bool) -> int:
    """Upper bound of a segment's queries, as flash kernels want it.

    Told that no segment has more than one query, they regroup heads on the assumption that every segment has
    exactly one. The bound of two takes the general path where some segment has none.
    """
    return max(longest, 2) if has_empty else longest


def require_width(backend: str, width: int) -> None:
    """Raises a BackendError for a head wider than flash kernels go."""
    if width > MAX_WIDTH:
        raise BackendError(
            f"backend {backend!r} of kernel 'attention' takes heads of at most {MAX_WIDTH} values, not {width}; "
            "set kernels.attention to torch"
        )


def flash_attention(
    q_QHD: Tensor,
    k_TGD: Tensor,
    v_TGD: Tensor,
    cu_q: Tensor,
    cu_k: Tensor,
    *,
    scale: float,
    causal: bool = True,
) -> Tensor:
    """Same contract as :func:`rlcompute.kernels.attention.varlen_attention`, in half precision on a GPU.

    Raises:
        BackendError: D is larger than 256.
    """
    require_width("flash_attn", q_QHD.shape[-1])
    queries, keys = device_bounds(cu_q, q_QHD.device), device_bounds(cu_k, q_QHD.device)
    if not queries.longest or not keys.longest:
        return torch.zeros_like(q_QHD)
    out_QHD: Tensor = importlib.import_module(LIBRARY).flash_attn_varlen_func(
        q_QHD,
        k_TGD,
        v_TGD,
        cu_seqlens_q=queries.starts,
        cu_seqlens_k=keys.starts,
        max_seqlen_q=max_queries(queries.longest, queries.has_empty),
        max_seqlen_k=keys.longest,
        softmax_scale=scale,
        causal=causal,
    )
    return out_QHD


def probe(device: torch.device, dtype: torch.dtype) -> str | None:
    """Ampere or later, half precision, and a build that fits the installed torch."""
    return cuda_refusal(device, dtype) or import_refusal(LIBRARY)


BACKEND = Backend(flash_attention, probe)
