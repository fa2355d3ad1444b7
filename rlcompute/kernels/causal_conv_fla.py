"""Short causal convolution with SiLU by flash-linear-attention (``causal_conv1d``, version 0.6 and later).

Shape legend: T packed tokens, C channels, K taps.
"""

from __future__ import annotations

import importlib

import torch
from torch import Tensor

from rlcompute.kernels.cuda_libraries import HALF_PRECISION, cuda_refusal, device_bounds
from rlcompute.kernels.gated_delta_fla import version_refusal
from rlcompute.kernels.registry import Backend


def fla_causal_conv_silu(
    x_TC: Tensor, weight_CK: Tensor, bias_C: Tensor | None, cu_seqlens: Tensor
) -> Tensor:
    """Same contract as :func:`rlcompute.kernels.causal_conv.causal_conv_silu`, on a GPU; sums are in float32."""
    bounds = device_bounds(cu_seqlens, x_TC.device)
    if not bounds.longest:
        return torch.zeros_like(x_TC)
    out_1TC: Tensor
    out_1TC, _ = importlib.import_module("fla.modules.causal_conv1d").causal_conv1d(
        x_TC.unsqueeze(0),
        weight=weight_CK,
        bias=bias_C,
        activation="silu",
        cu_seqlens=bounds.occupied,
        cu_seqlens_cpu=bounds.occupied_host,
    )
    return out_1TC.squeeze(0)


def probe(device: torch.device, dtype: torch.dtype) -> str | None:
    """Ampere or later; float32 as well, because there is no matrix product in it."""
    return cuda_refusal(device, dtype, dtypes=(*HALF_PRECISION, torch.float32)) or version_refusal()


BACKEND = Backend(fla_causal_conv_silu, probe)
