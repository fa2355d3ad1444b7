"""Score statistic of linear gate heads in Triton: one program sums one segment's outer products for some features.

Shape legend: T packed tokens, S segments, A actions, F features.
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

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# With up to four actions the accumulator is 4 * 16 * 64 values, 32 registers for each of 128 threads; rows of 64
# features are whole cache lines in every dtype.
BLOCK_TOKENS = 16
BLOCK_FEATURES = 64


@triton.jit
def statistic_kernel(
    residual_ptr,  # [T, A]
    features_ptr,  # [T, F]
    bounds_ptr,  # int32 [S + 1]
    out_ptr,  # out float32 [S, A, F]
    num_actions,
    num_features,
    ACTIONS: tl.constexpr,  # A rounded up to a power of two
    BLOCK_T: tl.constexpr,
    BLOCK_F: tl.constexpr,
):
    """``out[s, a, f] = sum_t residual[t, a] * features[t, f]`` for one segment and BLOCK_F features.

    A thread adds up every BLOCK_T-th token by itself, and threads are joined once, at the end.
    """
    segment = tl.program_id(0).to(tl.int64)
    start = tl.load(bounds_ptr + segment)
    stop = tl.load(bounds_ptr + segment + 1)
    actions = tl.arange(0, ACTIONS)
    features = tl.program_id(1) * BLOCK_F + tl.arange(0, BLOCK_F)
    action_live, feature_live = actions < num_actions, features < num_features
    total = tl.zeros((ACTIONS, BLOCK_T, BLOCK_F), dtype=tl.float32)
    for first in range(start, stop, BLOCK_T):
        tokens = first + tl.arange(0, BLOCK_T)
        token_live, rows = tokens < stop, tokens.to(tl.int64)
        residual = tl.load(
            residual_ptr + rows[None, :, None] * num_actions + actions[:, None, None],
            mask=token_live[None, :, None] & action_live[:, None, None],
            other=0.0,
        ).to(tl.float32)
        feature = tl.load(
            features_ptr + rows[None, :, None] * num_features + features[None, None, :],
            mask=token_live[None, :, None] & feature_live[None, None, :],
            other=0.0,
        ).to(tl.float32)
        total += residual * feature
    out_ptrs = out_ptr + (segment * num_actions + actions[:, None]) * num_features + features[None, :]
    tl.store(out_ptrs, tl.sum(total, axis=1), mask=action_live[:, None] & feature_live[None, :])


def triton_score_statistic(residual_TA: Tensor, features_TF: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Sum of outer products ``residual[t] features[t]^T`` over each segment, the same bits every time.

    Args:
        residual_TA: ``[T, A]`` float32, bfloat16 or float16: one-hot action minus action probabilities.
        features_TF: ``[T, F]`` float32, bfloat16 or float16: inputs of the head.
        cu_seqlens: int64 ``[S + 1]`` on the CPU.

    Returns:
        float32 ``[S, A, F]``, summed in float32; zeros for an empty segment.
    """
    segments, actions, features = len(cu_seqlens) - 1, residual_TA.shape[1], features_TF.shape[1]
    device = features_TF.device
    out_SAF = torch.empty(segments, actions, features, dtype=torch.float32, device=device)
    if not out_SAF.numel():
        return out_SAF
    with torch.cuda.device_of(features_TF):
        statistic_kernel[(segments, triton.cdiv(features, BLOCK_FEATURES))](
            residual_TA.contiguous(),
            features_TF.contiguous(),
            cu_seqlens.to(device, torch.int32, non_blocking=True),
            out_SAF,
            actions,
            features,
            ACTIONS=triton.next_power_of_2(actions),
            BLOCK_T=BLOCK_TOKENS,
            BLOCK_F=BLOCK_FEATURES,
            num_warps=4,
        )
    return out_SAF


def probe(device: torch.device, dtype: torch.dtype) -> str | None:
    """Why the kernel cannot run there; ``None`` if it can."""
    if dtype not in DTYPES:
        return f"sums in float32, which is less than {dtype}"
    return device_refusal(statistic_kernel, device)


BACKEND = Backend(triton_score_statistic, probe)
