"""Gated delta rule by flash-linear-attention (``chunk_gated_delta_rule``, version 0.6 and later of the library).

Shape legend: T packed tokens, K key heads, H value heads, D key width, V value width.
"""

from __future__ import annotations

import importlib

import torch
from torch import Tensor

from rlcompute.errors import BackendError
from rlcompute.kernels.cuda_libraries import cuda_refusal, device_bounds, import_refusal
from rlcompute.kernels.registry import Backend

LIBRARY = "fla"
OLDEST_VERSION = (0, 6)
MAX_KEY_WIDTH = 256


def fla_gated_delta_rule(
    q_TKD: Tensor, k_TKD: Tensor, v_THV: Tensor, g_TH: Tensor, beta_TH: Tensor, cu_seqlens: Tensor
) -> Tensor:
    """Same contract as :func:`rlcompute.kernels.gated_delta.gated_delta_rule`, in half precision on a GPU.

    The library normalises queries and keys and reads key head ``h // (H / K)`` for value head h, as we do. It gets the
    bounds of segments that have tokens only, and on the host as well, so that it need not wait for the device.

    Raises:
        BackendError: D is larger than 256.
    """
    width = q_TKD.shape[-1]
    if width > MAX_KEY_WIDTH:
        raise BackendError(
            f"backend 'fla' of kernel 'gated_delta' takes keys of at most {MAX_KEY_WIDTH} values, not {width}; "
            "set kernels.gated_delta to torch"
        )
    bounds = device_bounds(cu_seqlens, v_THV.device)
    if not bounds.longest:
        return torch.zeros_like(v_THV)
    out_1THV: Tensor
    out_1THV, _ = importlib.import_module("fla.ops.gated_delta_rule").chunk_gated_delta_rule(
        q_TKD.unsqueeze(0),
        k_TKD.unsqueeze(0),
        v_THV.unsqueeze(0),
        g=g_TH.float().unsqueeze(0),
        beta=beta_TH.unsqueeze(0),
        scale=width**-0.5,
        use_qk_l2norm_in_kernel=True,
        cu_seqlens=bounds.occupied,
        cu_seqlens_cpu=bounds.occupied_host,
    )
    return out_1THV.squeeze(0)


def version_refusal() -> str | None:
    """Why the installed library cannot be used, None if it can."""
    problem = import_refusal(LIBRARY)
    if problem is not None:
        return problem
    version: str = importlib.import_module(LIBRARY).__version__
    # The first version known to have grouped value heads, cu_seqlens_cpu and fla.modules.causal_conv1d together.
    if tuple(int(part) for part in version.split(".")[:2]) < OLDEST_VERSION:
        oldest = ".".join(map(str, OLDEST_VERSION))
        return f"needs flash-linear-attention {oldest} or later, {version} is installed"
    return None


def probe(device: torch.device, dtype: torch.dtype) -> str | None:
    """Ampere or later; half precision only, because its products round float32 to TF32."""
    return cuda_refusal(device, dtype) or version_refusal()


BACKEND = Backend(fla_gated_delta_rule, probe)
