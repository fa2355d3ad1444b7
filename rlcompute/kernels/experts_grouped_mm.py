"""Routed experts by torch's grouped matrix product (one call for all experts of a projection).

On Hopper and datacentre Blackwell this is one grouped kernel that reads the offsets on the device. Elsewhere torch
loops over the experts and waits for the device first, so other GPUs are refused; the CPU loop is accepted as a
second opinion on the arithmetic.

Shape legend: T tokens, k selected experts a token, R = T * k rows sorted by expert, E experts, d hidden width,
F expert width.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from rlcompute.kernels.cuda_libraries import DATACENTRE_BLACKWELL, HOPPER, cuda_refusal, require_aligned
from rlcompute.kernels.registry import Backend
from rlcompute.kernels.routing_plan import RoutingPlan


def grouped_mm_experts(
    x_Td: Tensor, plan: RoutingPlan, weights_Tk: Tensor, gate_up_E2Fd: Tensor, down_EdF: Tensor
) -> Tensor:
    """Same contract as :func:`rlcompute.kernels.experts.ragged_experts`; never waits for the device.

    A token's experts are summed in the order of its slots, so the result is deterministic. Gradients reach all
    four floating arguments.

    Raises:
        BackendError: d or F is not a multiple of 16 bytes.
    """
    tokens, k = plan.expert_ids_Tk.shape
    width = down_EdF.shape[2]
    require_aligned("grouped_mm", x_Td.dtype, **{"hidden width": x_Td.shape[1], "expert width": width})
    if tokens * k == 0:
        return torch.zeros_like(x_Td)
    ends_E = plan.offsets.to(torch.int32)
    x_Rd = x_Td.index_select(0, plan.token_rows)
    if plan.keep_Tk is not None and x_Td.requires_grad:
        # The products leave rows past the last end undefined, and so are the gradients that they return there.
        past_R1 = torch.arange(tokens * k, device=x_Td.device).unsqueeze(1) >= plan.offsets[-1]
        x_Rd = x_Rd.masked_fill(past_R1, 0.0)
    gate_up_R2F = F.grouped_mm(x_Rd, gate_up_E2Fd.transpose(-2, -1), offs=ends_E)
    inner_RF = F.silu(gate_up_R2F[:, :width]) * gate_up_R2F[:, width:]
    y_Rd = F.grouped_mm(inner_RF, down_EdF.transpose(-2, -1), offs=ends_E)
    return _sum_of_slots(y_Rd, plan, weights_Tk).to(x_Td.dtype)


def _sum_of_slots(y_Rd: Tensor, plan: RoutingPlan, weights_Tk: Tensor) -> Tensor:
    """Weighted sum over each token's kept slots, in float32 at least."""
    tokens, k = weights_Tk.shape
    rows_R = torch.arange(tokens * k, device=y_Rd.device)
    row_of_pair_R = torch.empty_like(rows_R).index_copy_(0, plan.token_rows * k + plan.slots, rows_R)
    y_Tkd = y_Rd.index_select(0, row_of_pair_R).view(tokens, k, -1)
    if plan.keep_Tk is not None:
        y_Tkd = y_Tkd.masked_fill(~plan.keep_Tk.unsqueeze(-1), 0.0)
    dtype = torch.promote_types(y_Rd.dtype, torch.float32)
    return (y_Tkd.to(dtype) * weights_Tk.to(dtype).unsqueeze(-1)).sum(1)


def probe(device: torch.device, dtype: torch.dtype) -> str | None:
    """A GPU with the grouped kernel, which is for bfloat16; or a CPU, for which torch has a loop."""
    if device.type == "cpu":
        return "torch has no grouped product in float64" if dtype is torch.float64 else None
    return cuda_refusal(device, dtype, architectures=(HOPPER, DATACENTRE_BLACKWELL), dtypes=(torch.bfloat16,))


BACKEND = Backend(grouped_mm_experts, probe)
