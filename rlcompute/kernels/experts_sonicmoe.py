"""Routed experts by SonicMoE (``moe_general_routing_inputs``, package ``sonic-moe`` 0.1.2 and later).

It takes any number of experts a token as two lists, tokens ascending. With ``concat_layout`` it reads transformers'
weight layout (all gate rows, then all up rows) as it is: what it calls ``[2F, d, E]`` is a permuted view, so no weights
are converted or copied.

Shape legend: T tokens, k selected experts a token, P executed pairs, E experts, d hidden width, F expert width.
"""

from __future__ import annotations

import importlib
import inspect

import torch
from torch import Tensor

from rlcompute.kernels.cuda_libraries import (
    DATACENTRE_BLACKWELL,
    HOPPER,
    cuda_refusal,
    import_refusal,
    require_aligned,
)
from rlcompute.kernels.registry import Backend
from rlcompute.kernels.routing_plan import RoutingPlan

LIBRARY = "sonicmoe"


def sonicmoe_experts(
    x_Td: Tensor, plan: RoutingPlan, weights_Tk: Tensor, gate_up_E2Fd: Tensor, down_EdF: Tensor
) -> Tensor:
    """Same contract as :func:`rlcompute.kernels.experts.ragged_experts`, in half precision on a GPU.

    Where the plan keeps some pairs only, this waits for the device: the library wants their number on the host.

    Raises:
        BackendError: d or F is not a multiple of 16 bytes.
    """
    widths = {"hidden width": x_Td.shape[1], "expert width": down_EdF.shape[2]}
    require_aligned("sonicmoe", x_Td.dtype, **widths)
    k = plan.expert_ids_Tk.shape[1]
    pairs_P = (
        torch.arange(plan.expert_ids_Tk.numel(), device=x_Td.device)
        if plan.keep_Tk is None
        else plan.keep_Tk.reshape(-1).nonzero().squeeze(1)
    )
    if not len(pairs_P):
        return torch.zeros_like(x_Td)
    library = importlib.import_module(LIBRARY)
    out_Td: Tensor
    out_Td, _ = library.moe_general_routing_inputs(
        x_Td.contiguous(),
        weights_Tk.reshape(-1).index_select(0, pairs_P).float(),
        torch.div(pairs_P, k, rounding_mode="floor").to(torch.int32),
        plan.expert_ids_Tk.reshape(-1).index_select(0, pairs_P).to(torch.int32),
        gate_up_E2Fd.permute(1, 2, 0),
        None,
        down_EdF.permute(1, 2, 0),
        None,
        E=len(down_EdF),
        stream_id=torch.cuda.current_stream(x_Td.device).cuda_stream if x_Td.is_cuda else 0,
        activation_type=importlib.import_module("sonicmoe.enums").ActivationType.SWIGLU,
        is_inference_mode_enabled=not torch.is_grad_enabled(),
        concat_layout=True,
    )
    return out_Td


def probe(device: torch.device, dtype: torch.dtype) -> str | None:
    """Hopper or datacentre Blackwell, half precision, and a version that reads concatenated gate and up rows."""
    problem = cuda_refusal(device, dtype, architectures=(HOPPER, DATACENTRE_BLACKWELL))
    problem = problem or import_refusal(LIBRARY)
    if problem is not None:
        return problem
    call = importlib.import_module(LIBRARY).moe_general_routing_inputs
    if "concat_layout" not in inspect.signature(call).parameters:
        return "needs sonic-moe 0.1.2 or later: the installed one does not know concat_layout"
    return None


BACKEND = Backend(sonicmoe_experts, probe)
