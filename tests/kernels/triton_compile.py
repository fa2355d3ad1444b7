"""Compile every Triton kernel for GPUs that need not be there: ``python -m tests.kernels.triton_compile 80 90``.

The interpreter accepts what the compiler refuses (annotations, types of branches, shapes) and knows no shared memory.
Prints one JSON object a kernel: among others its bytes of shared memory and, as ``spills``, bytes of stack a thread.
"""

from __future__ import annotations

import inspect
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from rlcompute.kernels import compaction_triton, score_statistic_triton
from rlcompute.kernels import experts_triton_kernels as experts
from rlcompute.kernels.experts_triton import REDUCE_COLUMNS, Launch, choose_launches

NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
INTEGERS = {
    "i64": ("token_rows_ptr", "slots_ptr", "offsets_ptr", "index_ptr"),
    "i32": ("tile_expert_ptr", "tile_start_ptr", "counts_ptr", "before_ptr", "bounds_ptr"),
    "u8": ("keep_ptr",),
}
POINTERS = {name: f"*{kind}" for kind, names in INTEGERS.items() for name in names}


def compile_kernel(
    kernel: Any, capability: int, dtype: torch.dtype, constants: dict[str, Any], *, aligned: bool = True
) -> dict[str, Any]:
    """Compile one kernel; ``num_warps`` and ``num_stages`` are taken out of the constants."""
    options = {name: constants.pop(name) for name in ("num_warps", "num_stages") if name in constants}
    signature, hints = {}, {}
    for place, name in enumerate(inspect.signature(kernel.fn).parameters):
        if name in constants:
            signature[name] = "constexpr"
            continue
        float_type = "fp32" if name == "grad_weights_ptr" else NAMES[dtype]
        signature[name] = POINTERS.get(name, f"*{float_type}" if name.endswith("_ptr") else "i32")
        specialized = name not in ("num_tiles", "num_tokens")
        if name.endswith("_ptr") or (aligned and specialized):
            hints[(place,)] = [["tt.divisibility", 16]]
    source = ASTSource(kernel, signature, constants, hints)
    compiled = triton.compile(source, GPUTarget("cuda", capability, 32), options)
    return {
        "kernel": kernel.fn.__name__,
        "capability": capability,
        "dtype": NAMES[dtype],
        "shared": compiled.metadata.shared,
        "spills": _stack_bytes(compiled.asm["cubin"]),
        "aligned": aligned,
        **options,
    }


def _stack_bytes(cubin: bytes) -> int:
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(tool), "--dump-resource-usage", file.name]
        usage = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return int(usage.split("STACK:")[1].split()[0])


def compile_experts(
    capability: int, dtype: torch.dtype, mean_rows: int, aligned: bool
) -> Iterator[dict[str, Any]]:
    """The grouped products, forward and backward, at one number of rows an expert."""
    launches = choose_launches(mean_rows * 64, 64, dtype, ragged=False)

    def compiled(kernel: Any, launch: Launch, **constants: Any) -> dict[str, Any]:
        return compile_kernel(kernel, capability, dtype, launch.options() | constants, aligned=aligned)

    yield compiled(experts.gate_up_kernel, launches.gate_up)
    yield compiled(experts.rows_kernel, launches.down, stride_step=1)
    yield compiled(experts.gate_up_backward_kernel, launches.gate_up_backward)
    yield compiled(experts.rows_kernel, launches.grad_x, stride_column=1, weights_ptr=None)


def compile_all(capability: int) -> Iterator[dict[str, Any]]:
    """Every kernel for one capability, e.g. 80."""
    for dtype, mean_rows in ((torch.bfloat16, (1, 64, 128)), (torch.float32, (64,))):
        for mean in mean_rows:
            yield from compile_experts(capability, dtype, mean, aligned=True)
    yield from compile_experts(capability, torch.bfloat16, 16, aligned=False)
    # A width of 1 turns into a constant of the compiler.
    width_1 = choose_launches(16, 1, torch.bfloat16, ragged=False).gate_up.options() | {"d": 1, "width": 1}
    yield compile_kernel(experts.gate_up_kernel, capability, torch.bfloat16, width_1, aligned=False)
    reduce = {"SLOTS": 8, "BLOCK_N": REDUCE_COLUMNS}
    yield compile_kernel(experts.reduce_kernel, capability, torch.bfloat16, dict(reduce))
    yield compile_kernel(experts.reduce_kernel, capability, torch.float32, reduce | {"keep_ptr": None})
    block = {"BLOCK": compaction_triton.BLOCK}
    yield compile_kernel(
        compaction_triton.count_kernel, capability, torch.float32, dict(block), aligned=False
    )
    yield compile_kernel(
        compaction_triton.scatter_kernel, capability, torch.float32, dict(block), aligned=False
    )
    blocks = {
        "ACTIONS": 4,
        "BLOCK_T": score_statistic_triton.BLOCK_TOKENS,
        "BLOCK_F": score_statistic_triton.BLOCK_FEATURES,
    }
    for dtype in (torch.float32, torch.bfloat16):
        yield compile_kernel(
            score_statistic_triton.statistic_kernel, capability, dtype, dict(blocks), aligned=False
        )


if __name__ == "__main__":
    for argument in sys.argv[1:]:
        for result in compile_all(int(argument)):
            print(json.dumps(result), flush=True)
