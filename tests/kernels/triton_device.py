"""Where the tests of Triton kernels run: on a GPU if there is one, else in the interpreter."""

from __future__ import annotations

import torch
from torch import Tensor

from rlcompute.kernels.triton_interpreter import enable_bf16

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
if DEVICE.type == "cpu":
    enable_bf16()


def there(*tensors: Tensor) -> list[Tensor]:
    """The tensors on the device of the tests."""
    return [tensor.to(DEVICE) for tensor in tensors]
