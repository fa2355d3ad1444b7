"""Random draws that depend on nothing but their own names.

A draw is a hash of (rollout key, layer, token index): the same on every device, in every batch, on whichever
worker runs it, with no generator state to save. The key itself hashes (seed, iteration, input id, side,
rollout).
"""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

# SplitMix64's constants, as signed 64-bit integers (torch's int64 arithmetic wraps, as the hash needs).
_GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)
_MIX_1 = 0xBF58476D1CE4E5B9 - (1 << 64)
_MIX_2 = 0x94D049BB133111EB - (1 << 64)


def rollout_key(seed: int, iteration: int, input_id: str, side: str, rollout: int) -> int:
    """A signed 64-bit key for one rollout of one side ("query" or "target") of one pair."""
    name = "\0".join((str(seed), str(iteration), input_id, side, str(rollout))).encode()
    return int.from_bytes(hashlib.blake2b(name, digest_size=8).digest(), "little", signed=True)


def _shift_right(x: Tensor, bits: int) -> Tensor:
    """Logical right shift of int64 (torch's own is arithmetic)."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _mix(x: Tensor) -> Tensor:
    """SplitMix64's finaliser: every input bit reaches every output bit."""
    x = (x ^ _shift_right(x, 30)) * _MIX_1
    x = (x ^ _shift_right(x, 27)) * _MIX_2
    return x ^ _shift_right(x, 31)


def _signed(x: int) -> int:
    """The low 64 bits of a Python integer as a signed number, as torch's int64 would wrap it."""
    x &= (1 << 64) - 1
    return x - (1 << 64) if x >> 63 else x


def uniform(keys_T: Tensor, layer: int, token_index_T: Tensor) -> Tensor:
    """Uniform draws in [0, 1), float64 [T].

    Args:
        keys_T: int64, the rollout key of each token's segment.
        layer: index of the layer.
        token_index_T: int64, the token's place in its original input.
    """
    x_T = _mix(keys_T + _signed((layer + 1) * _GOLDEN))
    x_T = _mix(x_T ^ (token_index_T + 1) * _GOLDEN)
    return _shift_right(x_T, 11).double() * 2.0**-53


def as_keys(keys: list[int], device: torch.device | str = "cpu") -> Tensor:
    """Rollout keys as int64 [S]."""
    return torch.tensor(keys, dtype=torch.int64, device=device)
