"""What the adapters to CUDA libraries share: reasons to refuse a device, and segment bounds on the device."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from rlcompute.errors import BackendError
from rlcompute.kernels.segments import segment_lengths

HALF_PRECISION = (torch.bfloat16, torch.float16)
AMPERE = 8
HOPPER = 9
DATACENTRE_BLACKWELL = 10


def cuda_refusal(
    device: torch.device,
    dtype: torch.dtype,
    *,
    architectures: Sequence[int] | None = None,
    dtypes: Sequence[torch.dtype] = HALF_PRECISION,
) -> str | None:
    """Why a CUDA kernel cannot run, None if it can.

    Args:
        device: where the tensors live.
        dtype: dtype of the activations.
        architectures: major compute capabilities it is written for; None: Ampere and all later ones.
        dtypes: what it computes in.
    """
    if device.type != "cuda":
        return f"needs a CUDA device, not {device.type}"
    if dtype not in dtypes:
        known = " or ".join(str(known).removeprefix("torch.") for known in dtypes)
        return f"computes in {known}, not in {str(dtype).removeprefix('torch.')}"
    if not torch.cuda.is_available():
        return "torch finds no CUDA device"
    major, minor = torch.cuda.get_device_capability(device)
    if architectures is not None and major not in architectures:
        wanted = " or ".join(f"{one}.x" for one in architectures)
        return f"needs compute capability {wanted}, this GPU has {major}.{minor}"
    if major < AMPERE:
        return f"needs compute capability {AMPERE}.0 or later, this GPU has {major}.{minor}"
    return None


def import_refusal(module: str) -> str | None:
    """Why an installed library cannot be imported (typically: built for another torch), None if it can."""
    try:
        importlib.import_module(module)
    except (ImportError, OSError) as error:
        return f"{module} is installed but cannot be imported: {error}"
    return None


def require_aligned(backend: str, dtype: torch.dtype, **widths: int) -> None:
    """Grouped GEMMs on tensor cores read rows of a multiple of 16 bytes.

    Raises:
        BackendError: a width is not such a multiple; padding the weights in each call would cost more than
            another backend does.
    """
    multiple = 16 // dtype.itemsize
    for name, width in widths.items():
        if width % multiple:
            raise BackendError(
                f"backend {backend!r} of kernel 'experts' needs rows of a multiple of 16 bytes: {name} {width} is "
                f"not a multiple of {multiple} in {dtype}; set kernels.experts to triton or torch"
            )


@dataclass(frozen=True)
class DeviceBounds:
    """Bounds of one packing, on the device and on the host.

    Attributes:
        starts: int32 ``[S + 1]`` on the device.
        longest: tokens of the longest segment; 0 for a stream without tokens.
        has_empty: some segment has no tokens.
        occupied: int64 ``[N + 1]`` on the device, empty segments left out.
        occupied_host: the same on the CPU.
    """

    starts: Tensor
    longest: int
    has_empty: bool
    occupied: Tensor
    occupied_host: Tensor


_bounds = WeakIdKeyDictionary()


def device_bounds(cu_seqlens: Tensor, device: torch.device) -> DeviceBounds:
    """The bounds on ``device``, copied there once however many layers share the packing.

    The result is the same object as long as ``cu_seqlens`` lives, which libraries that cache what they derive from
    the bounds (flash-linear-attention its chunk indices) recognise.

    Args:
        cu_seqlens: int64 ``[S + 1]`` on the CPU; must not be changed afterwards.
        device: where the kernel runs.
    """
    by_device: dict[torch.device, DeviceBounds] = _bounds.setdefault(cu_seqlens, {})
    if device not in by_device:
        lengths = segment_lengths(cu_seqlens)
        occupied_host = cu_seqlens.unique_consecutive()
        by_device[device] = DeviceBounds(
            starts=cu_seqlens.to(device, torch.int32, non_blocking=True),
            longest=max(lengths, default=0),
            has_empty=0 in lengths,
            occupied=occupied_host.to(device, non_blocking=True),
            occupied_host=occupied_host,
        )
    return by_device[device]
