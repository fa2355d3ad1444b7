"""Where the tests of Triton kernels run: in the interpreter where ``tests/conftest.py`` asks for it, else on a GPU."""

from __future__ import annotations

import torch
from torch import Tensor

from rlcompute.kernels.experts_triton_kernels import gate_up_kernel
from rlcompute.kernels.triton_interpreter import enable_bf16
from rlcompute.kernels.triton_probe import is_interpreted

DEVICE = torch.device("cpu" if is_interpreted(gate_up_kernel) else "cuda")
if DEVICE.type == "cpu":
    enable_bf16()


def there(*tensors: Tensor) -> list[Tensor]:
    """The tensors on the device of the tests."""
    return [tensor.to(DEVICE) for tensor in tensors]
