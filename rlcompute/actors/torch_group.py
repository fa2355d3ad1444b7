"""The workers of Ray Train as one group that adds and gathers tensors (gloo on CPUs, NCCL on GPUs)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


class PeerLostError(Exception):
    """Another worker died while this one waited for it: not this worker's fault, and no reason to end the run."""


class TorchGroup:
    """All workers of the run, over ``torch.distributed``; results are on the device of the argument."""

    def __init__(self, device: torch.device) -> None:
        """Args:
        device: where the workers compute; NCCL takes no tensors from elsewhere.
        """
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self._device = device

    def gather(self, x: Tensor) -> list[Tensor]:
        """``x`` of every worker, in the order of ranks; shapes are equal.

        Raises:
            PeerLostError: a worker is gone.
        """
        own = x.detach().to(self._device).contiguous()
        parts = [torch.empty_like(own) for _ in range(self.size)]
        self._call(dist.all_gather, parts, own)
        return [part.to(x.device) for part in parts]

    def add(self, x: Tensor) -> Tensor:
        """The sum of every worker's ``x``, the same bits on all of them.

        Raises:
            PeerLostError: a worker is gone.
        """
        total = x.detach().to(self._device, copy=True).contiguous()
        self._call(dist.all_reduce, total)
        return total.to(x.device)

    def first(self, x: Tensor) -> Tensor:
        """Worker 0's ``x``: for what all compute alike but for the last bits of a GPU.

        Raises:
            PeerLostError: a worker is gone.
        """
        return self.gather(x)[0]

    def _call(self, collective: Callable[..., Any], *arguments: Any) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)  # this worker's own errors surface here, and are its own
        with _losses():
            collective(*arguments)
            if self._device.type == "cuda":
                torch.cuda.synchronize(self._device)


@contextmanager
def _losses() -> Iterator[None]:
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        raise PeerLostError(f"a collective operation failed: {error}") from error
