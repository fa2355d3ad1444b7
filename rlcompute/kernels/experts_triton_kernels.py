"""Triton kernels of the ragged experts: grouped matrix products over a tile map, and the sum over a token's experts.

A tile is up to BLOCK_M consecutive rows of one expert (:func:`rlcompute.kernels.routing_plan.tile_map`). The grid
has a program for every (tile, block of output columns) that could be needed; how many are is only known on the
device, so the surplus ones read expert -1 and stop. Rows that are not kept are in no tile: nothing is computed
for them and their places in the buffers are never read.

Expert numbers, rows and tokens are multiplied with widths in int64: E * 2F * d and T * k * d pass 2^31 in
published models. Matrix operands keep their type, accumulators are float32; all other arithmetic is in float32.
``input_precision="ieee"`` keeps float32 products from being rounded to TF32 and means nothing for 16-bit operands.

Widths are specialised on (multiples of 16 allow wide loads); the number of tiles changes with every batch and is
not, else each of its kinds would be compiled separately.

Shape legend: T tokens, k selected experts a token, R = T * k rows, E experts, d hidden width, F expert width;
BLOCK_M rows of a tile, BLOCK_N output columns, BLOCK_K steps of the summed dimension.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# (the compiler evaluates annotations of kernels and accepts none but its own)

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _tile_and_block(num_tiles, num_blocks, GROUP: tl.constexpr):
    """Order of the programs: GROUP tiles by all column blocks, the tile running fastest.

    Neighbouring tiles mostly belong to the same expert, and neighbouring programs run at the same time: they
    read the same block of weights, once from memory and then from L2, while the input rows of a group of tiles
    are few enough to stay there for the next column blocks.
    """
    program = tl.program_id(0)
    per_group = GROUP * num_blocks
    first = program // per_group * GROUP
    size = tl.minimum(num_tiles - first, GROUP)
    within = program % per_group
    return first + within % size, within // size


@triton.jit(do_not_specialize=["num_tiles"])
def gate_up_kernel(
    x_ptr,  # [T, d]
    gate_up_ptr,  # [E, 2F, d]
    inner_ptr,  # out [R, F]
    token_rows_ptr,  # [R]
    tile_expert_ptr,  # [num_tiles]
    tile_start_ptr,  # [num_tiles]
    offsets_ptr,  # [E]
    num_tiles,
    d,
    width,  # F
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
):
    """``inner[r] = silu(gate_e x[t]) * up_e x[t]`` for the rows of one tile and BLOCK_N columns of both halves."""
    num_blocks = tl.cdiv(width, BLOCK_N)
    tile, block = _tile_and_block(num_tiles, num_blocks, GROUP)
    expert = tl.load(tile_expert_ptr + tile)
    if expert < 0:
        return
    rows = tl.load(tile_start_ptr + tile) + tl.arange(0, BLOCK_M)
    columns = block * BLOCK_N + tl.arange(0, BLOCK_N)
    row_live = rows < tl.load(offsets_ptr + expert)
    column_live = columns < width
    tokens = tl.load(token_rows_ptr + rows, mask=row_live, other=0).to(tl.int64)
    steps = tl.arange(0, BLOCK_K)

    x_ptrs = x_ptr + tokens[:, None] * d + steps[None, :]
    expert_ptr = gate_up_ptr + expert.to(tl.int64) * 2 * width * d
    gate_ptrs = expert_ptr + columns.to(tl.int64)[None, :] * d + steps[:, None]
    up_ptrs = expert_ptr + (columns + width).to(tl.int64)[None, :] * d + steps[:, None]
    gate = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    up = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for k in range(0, d, BLOCK_K):
        step_live = steps < d - k
        x = tl.load(x_ptrs + k, mask=row_live[:, None] & step_live[None, :], other=0.0)
        weight_live = step_live[:, None] & column_live[None, :]
        gate_weight = tl.load(gate_ptrs + k, mask=weight_live, other=0.0)
        gate = tl.dot(x, gate_weight, gate, input_precision="ieee")
        up_weight = tl.load(up_ptrs + k, mask=weight_live, other=0.0)
        up = tl.dot(x, up_weight, up, input_precision="ieee")

    inner = gate / (1.0 + tl.exp(-gate)) * up
    inner_ptrs = inner_ptr + rows.to(tl.int64)[:, None] * width + columns[None, :]
    tl.store(inner_ptrs, inner.to(inner_ptr.dtype.element_ty), mask=row_live[:, None] & column_live[None, :])


@triton.jit(do_not_specialize=["num_tiles"])
def rows_kernel(
    a_ptr,  # [R, K]
    matrix_ptr,  # [E, ...] one matrix of K x N elements an expert
    weights_ptr,  # [T, k] factors on the rows, or None
    out_ptr,  # out [T, k, N]
    token_rows_ptr,  # [R]
    slots_ptr,  # [R]
    tile_expert_ptr,  # [num_tiles]
    tile_start_ptr,  # [num_tiles]
    offsets_ptr,  # [E]
    num_tiles,
    num_steps,  # K
    num_columns,  # N
    slots_per_token,  # k
    stride_step,  # of the matrix, along K
    stride_column,  # of the matrix, along N
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
):
    """``out[t, j] = weights[t, j] * (a[r] @ matrix_e)`` for the rows r = (t, j) of one tile and BLOCK_N columns.

    Each row has a place of its own in the result, so that no two programs write to the same one.
    """
    num_blocks = tl.cdiv(num_columns, BLOCK_N)
    tile, block = _tile_and_block(num_tiles, num_blocks, GROUP)
    expert = tl.load(tile_expert_ptr + tile)
    if expert < 0:
        return
    rows = tl.load(tile_start_ptr + tile) + tl.arange(0, BLOCK_M)
    columns = block * BLOCK_N + tl.arange(0, BLOCK_N)
    row_live = rows < tl.load(offsets_ptr + expert)
    column_live = columns < num_columns
    steps = tl.arange(0, BLOCK_K)

    a_ptrs = a_ptr + rows.to(tl.int64)[:, None] * num_steps + steps[None, :]
    expert_ptr = matrix_ptr + expert.to(tl.int64) * num_steps * num_columns
    offsets = steps.to(tl.int64)[:, None] * stride_step + columns.to(tl.int64)[None, :] * stride_column
    out = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for k in range(0, num_steps, BLOCK_K):
        step_live = steps < num_steps - k
        a = tl.load(a_ptrs + k, mask=row_live[:, None] & step_live[None, :], other=0.0)
        matrix = tl.load(expert_ptr + offsets, mask=step_live[:, None] & column_live[None, :], other=0.0)
        out = tl.dot(a, matrix, out, input_precision="ieee")
        expert_ptr += BLOCK_K * stride_step

    # Looked up after the loop, which needs the registers.
    tokens = tl.load(token_rows_ptr + rows, mask=row_live, other=0).to(tl.int64)
    pairs = tokens * slots_per_token + tl.load(slots_ptr + rows, mask=row_live, other=0)
    if weights_ptr is not None:
        out *= tl.load(weights_ptr + pairs, mask=row_live, other=0.0).to(tl.float32)[:, None]
    out_ptrs = out_ptr + pairs[:, None] * num_columns + columns[None, :]
    tl.store(out_ptrs, out.to(out_ptr.dtype.element_ty), mask=row_live[:, None] & column_live[None, :])


@triton.jit
def reduce_kernel(
    rows_ptr,  # [T, k, N]
    keep_ptr,  # uint8 [T, k], 0 or 1, or None
    out_ptr,  # out [T, N]
    num_columns,  # N
    SLOTS: tl.constexpr,  # k
    BLOCK_N: tl.constexpr,
):
    """``out[t] = sum_j rows[t, j]`` over the kept slots, in the order of the slots: the same bits every time."""
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    total = tl.zeros((BLOCK_N,), dtype=tl.float32)
    for slot in tl.static_range(SLOTS):
        pair = token * SLOTS + slot
        limit = num_columns
        if keep_ptr is not None:
            limit = num_columns * tl.load(keep_ptr + pair).to(tl.int32)
        row = tl.load(rows_ptr + pair * num_columns + columns, mask=columns < limit, other=0.0)
        total += row.to(tl.float32)
    out_ptrs = out_ptr + token * num_columns + columns
    tl.store(out_ptrs, total.to(out_ptr.dtype.element_ty), mask=columns < num_columns)


@triton.jit(do_not_specialize=["num_tiles"])
def gate_up_backward_kernel(
    x_ptr,  # [T, d]
    grad_ptr,  # [T, d] gradient of the layer's output
    gate_up_ptr,  # [E, 2F, d]
    down_ptr,  # [E, d, F]
    weights_ptr,  # [T, k]
    grad_gate_up_ptr,  # out [R, 2F]
    grad_weights_ptr,  # out float32 [T, k, column blocks]
    token_rows_ptr,  # [R]
    slots_ptr,  # [R]
    tile_expert_ptr,  # [num_tiles]
    tile_start_ptr,  # [num_tiles]
    offsets_ptr,  # [E]
    num_tiles,
    d,
    width,  # F
    slots_per_token,  # k
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
):
    """Gradients of the pre-activations of one tile's rows, and of the router weights by column block.

    Gate and up are computed again instead of being kept: they share the loop over d with
    ``grad_inner = down_e^T grad``. A router weight's gradient is ``<grad, down_e inner>``, that is
    ``<grad_inner, inner>``; this program adds up its own columns of it.
    """
    num_blocks = tl.cdiv(width, BLOCK_N)
    tile, block = _tile_and_block(num_tiles, num_blocks, GROUP)
    expert = tl.load(tile_expert_ptr + tile)
    if expert < 0:
        return
    rows = tl.load(tile_start_ptr + tile) + tl.arange(0, BLOCK_M)
    columns = block * BLOCK_N + tl.arange(0, BLOCK_N)
    row_live = rows < tl.load(offsets_ptr + expert)
    column_live = columns < width
    tokens = tl.load(token_rows_ptr + rows, mask=row_live, other=0).to(tl.int64)
    steps = tl.arange(0, BLOCK_K)

    token_offsets = tokens[:, None] * d + steps[None, :]
    expert_ptr = gate_up_ptr + expert.to(tl.int64) * 2 * width * d
    gate_ptrs = expert_ptr + columns.to(tl.int64)[None, :] * d + steps[:, None]
    up_ptrs = expert_ptr + (columns + width).to(tl.int64)[None, :] * d + steps[:, None]
    down_ptrs = down_ptr + expert.to(tl.int64) * width * d
    down_ptrs += steps.to(tl.int64)[:, None] * width + columns[None, :]
    gate = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    up = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    grad_inner = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for k in range(0, d, BLOCK_K):
        step_live = steps < d - k
        token_live = row_live[:, None] & step_live[None, :]
        weight_live = step_live[:, None] & column_live[None, :]
        x = tl.load(x_ptr + token_offsets + k, mask=token_live, other=0.0)
        gate_weight = tl.load(gate_ptrs + k, mask=weight_live, other=0.0)
        gate = tl.dot(x, gate_weight, gate, input_precision="ieee")
        up_weight = tl.load(up_ptrs + k, mask=weight_live, other=0.0)
        up = tl.dot(x, up_weight, up, input_precision="ieee")
        grad = tl.load(grad_ptr + token_offsets + k, mask=token_live, other=0.0)
        down_weight = tl.load(down_ptrs, mask=weight_live, other=0.0)
        grad_inner = tl.dot(grad, down_weight, grad_inner, input_precision="ieee")
        down_ptrs += BLOCK_K * width

    sigmoid = 1.0 / (1.0 + tl.exp(-gate))
    silu = gate * sigmoid
    # Rows past the end of the tile and columns past F hold zeros, which add nothing here.
    partial = tl.sum(grad_inner * silu * up, axis=1)
    pairs = tokens * slots_per_token + tl.load(slots_ptr + rows, mask=row_live, other=0)
    tl.store(grad_weights_ptr + pairs * num_blocks + block, partial, mask=row_live)

    grad_inner *= tl.load(weights_ptr + pairs, mask=row_live, other=0.0).to(tl.float32)[:, None]
    grad_gate = grad_inner * up * (sigmoid + silu * (1.0 - sigmoid))
    grad_up = grad_inner * silu
    out_ptrs = grad_gate_up_ptr + rows.to(tl.int64)[:, None] * 2 * width + columns[None, :]
    out_live = row_live[:, None] & column_live[None, :]
    tl.store(out_ptrs, grad_gate.to(grad_gate_up_ptr.dtype.element_ty), mask=out_live)
    tl.store(out_ptrs + width, grad_up.to(grad_gate_up_ptr.dtype.element_ty), mask=out_live)
