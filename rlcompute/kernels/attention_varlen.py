"""Packed attention by torch's own flash kernel (``torch.nn.attention.varlen``).

The signature grew after torch 2.10: scale and window came in 2.11, an explicit ``enable_gqa`` by 2.13. In 2.10 the
scale is fixed, so the queries carry ours. All call the same kernel, whose causal mask is aligned at the bottom
right and which takes grouped heads.

Shape legend: Q packed queries, T packed keys, H query heads, G key/value heads, D head width.
"""

from __future__ import annotations

import inspect
import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import varlen

from rlcompute.kernels.attention_flash import max_queries, require_width
from rlcompute.kernels.cuda_libraries import cuda_refusal, device_bounds
from rlcompute.kernels.registry import Backend

# The kernel reads rows of 16 bytes; unlike flash-attn's interface, torch's does not pad.
WIDTH_MULTIPLE = 8


def torch_varlen_attention(
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
    width = q_QHD.shape[-1]
    require_width("torch_varlen", width)
    queries, keys = device_bounds(cu_q, q_QHD.device), device_bounds(cu_k, q_QHD.device)
    if not queries.longest or not keys.longest:
        return torch.zeros_like(q_QHD)
    padding = -width % WIDTH_MULTIPLE
    if padding:
        q_QHD, k_TGD, v_TGD = (F.pad(x, (0, padding)) for x in (q_QHD, k_TGD, v_TGD))
    parameters = inspect.signature(varlen.varlen_attn).parameters
    options: dict[str, Any]
    if "scale" in parameters:
        options = {"scale": scale, "window_size": (-1, 0 if causal else -1)}
    else:
        q_QHD = q_QHD * (scale * math.sqrt(width + padding))
        options = {"is_causal": causal}
    if "enable_gqa" in parameters:
        options["enable_gqa"] = q_QHD.shape[1] != k_TGD.shape[1]
    out_QHD = varlen.varlen_attn(
        q_QHD,
        k_TGD,
        v_TGD,
        queries.starts,
        keys.starts,
        max_queries(queries.longest, queries.has_empty),
        keys.longest,
        **options,
    )
    assert isinstance(out_QHD, Tensor)
    return out_QHD[..., :width]


def probe(device: torch.device, dtype: torch.dtype) -> str | None:
    """Ampere or later, half precision."""
    return cuda_refusal(device, dtype)


BACKEND = Backend(torch_varlen_attention, probe)
