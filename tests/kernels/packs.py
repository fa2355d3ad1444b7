"""Packs of odd shapes and the comparisons that the kernel tests share."""

from __future__ import annotations

from itertools import pairwise

import torch
from hypothesis import strategies as st
from torch import Tensor

# Empty segments at both ends and inside, one token, around the chunk length, longer than two chunks.
ODD_LENGTHS = (0, 1, 2, 0, 3, 127, 128, 129, 5, 260, 0)

TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-12, torch.bfloat16: 1e-2}

short_packs = st.lists(st.integers(0, 12), min_size=0, max_size=8)


def offsets(lengths: tuple[int, ...] | list[int]) -> Tensor:
    """int64 [S + 1] segment bounds."""
    return torch.tensor([0, *lengths], dtype=torch.int64).cumsum(0)


def random(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Standard normal values that depend on shape and seed only."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def uniform(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Values in [0, 1)."""
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def wide(*tensors: Tensor) -> list[Tensor]:
    """The same values in float64, detached."""
    return [t.detach().double() for t in tensors]


def relative_error(actual: Tensor, reference: Tensor) -> float:
    """Largest difference over the reference's largest magnitude; 0 for empty tensors."""
    assert actual.shape == reference.shape
    if reference.numel() == 0:
        return 0.0
    difference = (actual.detach().double() - reference.detach().double()).abs().max()
    return float(difference / reference.detach().double().abs().max().clamp_min(1e-30))


def assert_close(actual: Tensor, reference: Tensor, tolerance: float | None = None) -> None:
    """Compare with the tolerance of the actual dtype."""
    error = relative_error(actual, reference)
    assert error <= (TOLERANCE[actual.dtype] if tolerance is None else tolerance), error


def segment_by_segment(run, lengths, *token_tensors: Tensor) -> Tensor:  # type: ignore[no-untyped-def]
    """``run(*tensors, cu_seqlens)`` on each segment alone, results laid end to end."""
    bounds = offsets(lengths).tolist()
    return torch.cat([run(*(t[a:b] for t in token_tensors), offsets([b - a])) for a, b in pairwise(bounds)])
