"""bfloat16 in Triton's interpreter, for checking on a CPU what kernels compute. It says nothing about speed.

The interpreter keeps a bfloat16 as the uint16 with its bits and hands those integers to numpy: products, sums,
comparisons and ``tl.dot`` of bfloat16 values are silently wrong, and its cast from float32 cuts the low bits off
where a GPU rounds to nearest even. :func:`enable_bf16` mends casts, binary operations and ``tl.dot``. Other
operations on bfloat16 values (unary ones, reductions) stay wrong, hence the kernels here convert to float32
right after each load and use bfloat16 only as operands of ``tl.dot``.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import triton.language as tl
from triton.runtime import interpreter

_enabled = False


def bf16_enabled() -> bool:
    """Whether :func:`enable_bf16` was called in this process."""
    return _enabled


def enable_bf16() -> None:
    """Patch the interpreter of this process; further calls change nothing."""
    global _enabled
    if _enabled:
        return
    builder = interpreter.InterpreterBuilder
    stock_cast, stock_binary, stock_dot = builder.cast_impl, builder.binary_op, builder.create_dot

    def cast_impl(self: Any, source: Any, target: Any) -> Any:
        kinds = (source.dtype.scalar, target.scalar)
        if kinds == (tl.bfloat16, tl.float32):
            return interpreter.TensorHandle(_widen(source.data), tl.float32)
        if kinds == (tl.float32, tl.bfloat16):
            return interpreter.TensorHandle(_round(source.data), tl.bfloat16)
        return stock_cast(self, source, target)

    def widened(self: Any, handle: Any) -> Any:
        return self.cast_impl(handle, tl.float32) if handle.dtype.scalar == tl.bfloat16 else handle

    def binary_op(self: Any, left: Any, right: Any, operation: Any) -> Any:
        result = stock_binary(self, widened(self, left), widened(self, right), operation)
        # A comparison yields booleans, which are the same for both types.
        if left.dtype.scalar == tl.bfloat16 and result.data.dtype == np.float32:
            return self.cast_impl(result, tl.bfloat16)
        return result

    def create_dot(self: Any, a: Any, b: Any, accumulator: Any, *options: Any) -> Any:
        return stock_dot(self, widened(self, a), widened(self, b), accumulator, *options)

    builder.cast_impl, builder.binary_op, builder.create_dot = cast_impl, binary_op, create_dot
    _enabled = True


def _widen(bits: npt.NDArray[np.uint16]) -> npt.NDArray[np.float32]:
    """The float32 values of bfloat16 bits."""
    return (np.asarray(bits, dtype=np.uint32) << 16).view(np.float32)


def _round(values: npt.NDArray[np.float32]) -> npt.NDArray[np.uint16]:
    """Bits of float32 values rounded to bfloat16, nearest even (torch's conversion does that)."""
    rounded = torch.tensor(values, dtype=torch.float32).to(torch.bfloat16)
    bits: npt.NDArray[np.uint16] = rounded.view(torch.uint16).numpy()
    return bits
