"""Where Triton kernels can run: compiled on CUDA devices of compute capability 8.0 and later, or interpreted on a CPU.

Triton decides between compiler and interpreter when a kernel is decorated: ``TRITON_INTERPRET=1`` must be in the
environment before the module with the kernel (and Triton itself) is imported.
"""

from __future__ import annotations

from typing import Any

import torch
from triton.runtime.jit import JITFunction

MIN_CAPABILITY = (8, 0)


def is_interpreted(kernel: Any) -> bool:
    """Whether a decorated kernel runs in Triton's interpreter."""
    return not isinstance(kernel, JITFunction)


def device_refusal(kernel: Any, device: torch.device) -> str | None:
    """Why a kernel cannot run on a device; ``None`` if it can.

    Args:
        kernel: a function decorated with ``triton.jit``.
        device: where its tensors would live.
    """
    if is_interpreted(kernel):
        if device.type == "cpu":
            return None
        return "TRITON_INTERPRET is set, so that the kernels are interpreted on the CPU; unset it"
    if device.type != "cuda":
        return (
            f"needs a CUDA device, not {device.type} (to check its results on a CPU, set TRITON_INTERPRET=1 "
            "in the environment before Python starts)"
        )
    if not torch.cuda.is_available():
        return "torch finds no CUDA device"
    capability = torch.cuda.get_device_capability(device)
    if capability < MIN_CAPABILITY:
        needed, found = (".".join(map(str, pair)) for pair in (MIN_CAPABILITY, capability))
        return f"needs compute capability {needed} or later, the device has {found}"
    return None
