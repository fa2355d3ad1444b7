"""Ragged experts in Triton: two grouped matrix products over the kept rows, and a deterministic sum a token.

Meant for GPUs of compute capability 8.0 (A100), where torch's grouped product is a loop, and later ones. Nothing
here waits for the device: the number of tiles is bounded from shapes, and the surplus programs stop at once.

Shape legend: T tokens, k selected experts a token, R = T * k rows, E experts, d hidden width, F expert width.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor
from torch.autograd.function import once_differentiable

from rlcompute.errors import BackendError
from rlcompute.kernels.experts_triton_kernels import (
    gate_up_backward_kernel,
    gate_up_kernel,
    reduce_kernel,
    rows_kernel,
)
from rlcompute.kernels.registry import Backend
from rlcompute.kernels.routing_plan import RoutingPlan, tile_map
from rlcompute.kernels.triton_interpreter import bf16_enabled
from rlcompute.kernels.triton_probe import device_refusal, is_interpreted

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
REDUCE_COLUMNS = 1024


@dataclass(frozen=True)
class Launch:
    """Sizes of one grouped product: its tile (rows, columns, steps of the summed dimension) and its resources."""

    rows: int
    columns: int
    steps: int
    warps: int
    stages: int

    # Tiles whose programs run side by side. Eight tiles of 128 rows of a 2,048 wide bf16 input are 4 MB, which
    # leaves most of an L2 of 40 MB or more to the weights.
    GROUP = 8

    def blocks(self, columns: int) -> int:
        """Column blocks of a result of that width."""
        return triton.cdiv(columns, self.columns)

    def options(self) -> dict[str, int]:
        """Keyword arguments of a kernel launch."""
        return {
            "BLOCK_M": self.rows,
            "BLOCK_N": self.columns,
            "BLOCK_K": self.steps,
            "GROUP": self.GROUP,
            "num_warps": self.warps,
            "num_stages": self.stages,
        }


@dataclass(frozen=True)
class Launches:
    """The products of the forward and of the backward pass."""

    gate_up: Launch
    down: Launch
    gate_up_backward: Launch
    grad_x: Launch


def choose_launches(rows: int, experts: int, dtype: torch.dtype, *, ragged: bool) -> Launches:
    """Tile sizes from shapes alone.

    Args:
        rows: R.
        experts: E.
        dtype: of the operands.
        ragged: whether rows may be left out; how many are is only known on the device.

    The tile has as many rows as an expert gets on average, between 16 (the least that a matrix instruction
    takes) and 128: a larger tile multiplies padding, a smaller one reads an expert's weights several times. Where
    rows are left out, half of them is the guess: tiles sized for all rows would cost the same with most of
    their rows gone.

    A stage in shared memory holds steps * (operand rows and columns) elements. All choices stay below the 99 KB of
    the smallest devices of capability 8.x (A100: 163 KB, H100: 227 KB) and, compiled for 8.0 and 9.0, spill no
    registers. Few rows: the products wait for weights, hence one more stage in flight. Many rows: arithmetic
    counts, and eight warps share the accumulators of a 128-row tile.
    """
    mean = rows / experts / (2 if ragged else 1)
    tile = next(size for size in (16, 32, 64, 128) if size >= mean or size == 128)
    if dtype is torch.float32:
        # Exact float32 products run on the ordinary cores and hold their operands in registers: small tiles.
        tile = min(tile, 64)
        warps = 4 if tile == 16 else 8
        forward, small = Launch(tile, 32, 32, warps, stages=2), min(tile, 32)
        return Launches(forward, Launch(tile, 64, 32, warps, 2), Launch(small, 32, 32, warps, 2), forward)
    warps, stages = (8, 3) if tile == 128 else (4, 3 if tile == 64 else 4)
    # Gate-up multiplies a tile by two blocks of weights, down by one: the same work and memory at half the width.
    gate_up, down = Launch(tile, 64, 64, warps, stages), Launch(tile, 128, 64, warps, stages)
    # The backward product reads two inputs and three blocks of weights a step, and has three accumulators.
    small = min(tile, 64)
    return Launches(gate_up, down, Launch(small, 32, 64, 4, 3), Launch(small, 128, 64, 4, 3))


def triton_experts(
    x_Td: Tensor, plan: RoutingPlan, weights_Tk: Tensor, gate_up_E2Fd: Tensor, down_EdF: Tensor
) -> Tensor:
    """``out[t] = sum_j weights[t, j] * FFN_{ids[t, j]}(x[t])`` over the kept pairs of the plan.

    Gradients flow to ``x_Td`` and ``weights_Tk`` (a pair that is not kept gets zero); the experts are frozen.

    Args:
        x_Td: ``[T, d]`` float32, bfloat16 or float16.
        plan: of these tokens; rows that are not kept are not computed.
        weights_Tk: ``[T, k]`` router weights of any floating dtype, applied as they are.
        gate_up_E2Fd: ``[E, 2F, d]`` contiguous, of the dtype of ``x_Td``; gate rows first, then up rows.
        down_EdF: ``[E, d, F]`` likewise.

    Returns:
        ``[T, d]`` in the dtype of ``x_Td``; zeros for a token without kept experts.

    Raises:
        BackendError: dtypes differ or are not supported, the expert weights are not contiguous or ask for
            gradients.
    """
    _check_experts(x_Td, gate_up_E2Fd, down_EdF)
    out: Tensor = _TritonExperts.apply(x_Td, weights_Tk, gate_up_E2Fd, down_EdF, plan)  # type: ignore[no-untyped-call]
    return out


def _check_experts(x_Td: Tensor, gate_up_E2Fd: Tensor, down_EdF: Tensor) -> None:
    dtypes = {tensor.dtype for tensor in (x_Td, gate_up_E2Fd, down_EdF)}
    if len(dtypes) > 1 or x_Td.dtype not in DTYPES:
        raise BackendError(
            "triton experts: hidden states and expert weights must share one dtype out of "
            f"{', '.join(map(str, DTYPES))}; got {x_Td.dtype} for the hidden states, {gate_up_E2Fd.dtype} for "
            f"gate_up, {down_EdF.dtype} for down; convert them, or force the backend torch for experts"
        )
    for name, tensor in (("gate_up", gate_up_E2Fd), ("down", down_EdF)):
        if not tensor.is_contiguous():
            raise BackendError(
                f"triton experts: weights {name} of shape {list(tensor.shape)} are not contiguous; call "
                ".contiguous() on them once, after loading"
            )
        if tensor.requires_grad and torch.is_grad_enabled():
            raise BackendError(
                f"triton experts: weights {name} ask for a gradient, which this backend does not compute "
                "(the backbone is frozen); call requires_grad_(False) on them, or force the backend torch "
                "for experts"
            )


class _TritonExperts(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x_Td: Tensor, weights_Tk: Tensor, gate_up_E2Fd: Tensor, down_EdF: Tensor, plan: RoutingPlan
    ) -> Tensor:
        ctx.save_for_backward(x_Td, weights_Tk, gate_up_E2Fd, down_EdF)
        ctx.plan = plan
        if not len(plan.token_rows):
            return torch.zeros_like(x_Td)
        with torch.cuda.device_of(x_Td):
            return _forward(x_Td.contiguous(), weights_Tk.contiguous(), gate_up_E2Fd, down_EdF, plan)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_Td: Tensor) -> tuple[Tensor | None, ...]:
        x_Td, weights_Tk, gate_up_E2Fd, down_EdF = ctx.saved_tensors
        if not len(ctx.plan.token_rows):
            return torch.zeros_like(x_Td), torch.zeros_like(weights_Tk), None, None, None
        tensors = x_Td.contiguous(), weights_Tk.contiguous(), gate_up_E2Fd, down_EdF
        with torch.cuda.device_of(x_Td):
            grad_x_Td, grad_weights_Tk = _backward(grad_Td.to(x_Td.dtype).contiguous(), *tensors, ctx.plan)
        return grad_x_Td, grad_weights_Tk, None, None, None


def _launches(plan: RoutingPlan, dtype: torch.dtype) -> Launches:
    ragged = plan.keep_Tk is not None
    return choose_launches(len(plan.token_rows), len(plan.counts), dtype, ragged=ragged)


def _forward(
    x_Td: Tensor, weights_Tk: Tensor, gate_up_E2Fd: Tensor, down_EdF: Tensor, plan: RoutingPlan
) -> Tensor:
    _, d, width = down_EdF.shape
    launches = _launches(plan, x_Td.dtype)
    tiles = tile_map(plan, launches.gate_up.rows)
    inner_RF = x_Td.new_empty(len(plan.token_rows), width)
    launch = launches.gate_up
    gate_up_kernel[(len(tiles[0]) * launch.blocks(width),)](
        x_Td,
        gate_up_E2Fd,
        inner_RF,
        plan.token_rows,
        *tiles,
        plan.offsets,
        len(tiles[0]),
        d,
        width,
        **launch.options(),
    )
    return _sum_of_rows(launches.down, tiles, plan, inner_RF, down_EdF.transpose(1, 2), weights_Tk)


def _backward(
    grad_Td: Tensor,
    x_Td: Tensor,
    weights_Tk: Tensor,
    gate_up_E2Fd: Tensor,
    down_EdF: Tensor,
    plan: RoutingPlan,
) -> tuple[Tensor, Tensor]:
    _, d, width = down_EdF.shape
    launches = _launches(plan, x_Td.dtype)
    launch = launches.gate_up_backward
    tiles = tile_map(plan, launch.rows)
    grad_gate_up_R2F = x_Td.new_empty(len(plan.token_rows), 2 * width)
    # Zeros: the kernel writes to the kept pairs only.
    parts_TkB = torch.zeros(*weights_Tk.shape, launch.blocks(width), dtype=torch.float32, device=x_Td.device)
    gate_up_backward_kernel[(len(tiles[0]) * launch.blocks(width),)](
        x_Td,
        grad_Td,
        gate_up_E2Fd,
        down_EdF,
        weights_Tk,
        grad_gate_up_R2F,
        parts_TkB,
        plan.token_rows,
        plan.slots,
        *tiles,
        plan.offsets,
        len(tiles[0]),
        d,
        width,
        weights_Tk.shape[1],
        **launch.options(),
    )
    launch = launches.grad_x
    grad_x_Td = _sum_of_rows(launch, tile_map(plan, launch.rows), plan, grad_gate_up_R2F, gate_up_E2Fd, None)
    return grad_x_Td, parts_TkB.sum(dim=2).to(weights_Tk.dtype)


def _sum_of_rows(
    launch: Launch,
    tiles: tuple[Tensor, Tensor],
    plan: RoutingPlan,
    a_RK: Tensor,
    matrix_EKN: Tensor,
    weights_Tk: Tensor | None,
) -> Tensor:
    """``out[t] = sum_j weights[t, j] * (a[r] @ matrix_e)`` over the kept rows r = (t, j): ``[T, N]``."""
    tokens, slots = plan.expert_ids_Tk.shape
    _, steps, columns = matrix_EKN.shape
    rows_TkN = a_RK.new_empty(tokens, slots, columns)
    rows_kernel[(len(tiles[0]) * launch.blocks(columns),)](
        a_RK,
        matrix_EKN,
        weights_Tk,
        rows_TkN,
        plan.token_rows,
        plan.slots,
        *tiles,
        plan.offsets,
        len(tiles[0]),
        steps,
        columns,
        slots,
        matrix_EKN.stride(1),
        matrix_EKN.stride(2),
        **launch.options(),
    )
    out_TN = a_RK.new_empty(tokens, columns)
    block = min(REDUCE_COLUMNS, triton.next_power_of_2(columns))
    keep_Tk = None if plan.keep_Tk is None else plan.keep_Tk.contiguous().view(torch.uint8)
    reduce_kernel[(tokens, triton.cdiv(columns, block))](
        rows_TkN, keep_Tk, out_TN, columns, SLOTS=slots, BLOCK_N=block, num_warps=4
    )
    return out_TN


def probe(device: torch.device, dtype: torch.dtype) -> str | None:
    """Why the kernels cannot run there; ``None`` if they can."""
    if dtype not in DTYPES:
        return f"computes in {', '.join(map(str, DTYPES))}, not in {dtype}"
    refusal = device_refusal(gate_up_kernel, device)
    if refusal is None and is_interpreted(gate_up_kernel) and dtype is torch.bfloat16 and not bf16_enabled():
        return (
            "Triton's interpreter does not compute bfloat16; call "
            "rlcompute.kernels.triton_interpreter.enable_bf16() first"
        )
    return refusal


BACKEND = Backend(triton_experts, probe)
