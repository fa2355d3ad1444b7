"""transformers' own code as the baseline: its experts functions, and its forward over padded batches.

Shape legend: T tokens, k selected experts, E experts, d hidden size, B inputs of a padded batch, L its length,
S all inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from rlcompute.backbones.qwen3_5_moe import Qwen35MoeBackbone
from rlcompute.kernels.registry import Kernel
from rlcompute.kernels.routing_plan import RoutingPlan
from rlcompute.kernels.segments import length_buckets
from rlcompute.pack import EmbeddedInput

EXPERTS = ("eager", "grouped_mm", "batched_mm")
"""Experts functions of transformers that run on every device."""
LARGEST_COPY = 2**29
"""Bytes that batched_mm may take for its copies of expert weights. It is made for a handful of tokens: beyond this, the
copies alone take many times as long as the products of the others."""
LARGEST_BUCKET = 64
PADDING = (1.3, 2.0, 3.0)


def usable_experts(backbone: Qwen35MoeBackbone, tokens: int) -> list[str]:
    """The experts functions that a batch is fit for: batched_mm copies an expert's weights for every row."""
    gate_up = backbone.layers[0].experts.gate_up_E2Fd
    copied = tokens * backbone.top_k * gate_up[0].numel() * gate_up.element_size()
    return [name for name in EXPERTS if name != "batched_mm" or copied <= LARGEST_COPY]


def stock_experts(backbone: Qwen35MoeBackbone, name: str) -> dict[str, Kernel]:
    """Kernels that run transformers' experts function, to put in place of ours.

    Args:
        backbone: whose experts modules are called.
        name: one of :data:`EXPERTS`.

    Returns:
        The operations ``experts``, with the contract of the experts kernel, and ``routing_plan``, which only counts:
        the functions sort by themselves.
    """
    modules = {
        id(layer.mlp.experts.gate_up_proj): layer.mlp.experts
        for layer in backbone.model.language_model.layers
    }
    eager: Callable[..., Tensor] = type(next(iter(modules.values()))).forward.__wrapped__
    function: Callable[..., Tensor] = eager if name == "eager" else ALL_EXPERTS_FUNCTIONS[name]

    def experts(
        x_Td: Tensor, plan: RoutingPlan, weights_Tk: Tensor, gate_up_E2Fd: Tensor, down_EdF: Tensor
    ) -> Tensor:
        module, ids_Tk = modules[id(gate_up_E2Fd)], plan.expert_ids_Tk
        if plan.keep_Tk is None:
            return function(module, x_Td, ids_Tk, weights_Tk)
        # What expert parallelism does with experts that live elsewhere: a number past the last, weight zero.
        module._is_expert_parallel = True
        try:
            return function(
                module, x_Td, ids_Tk.masked_fill(~plan.keep_Tk, len(gate_up_E2Fd)), weights_Tk * plan.keep_Tk
            )
        finally:
            module._is_expert_parallel = False

    return {"experts": experts, "routing_plan": _count_only}


def _count_only(expert_ids_Tk: Tensor, keep_Tk: Tensor | None, num_experts: int) -> RoutingPlan:
    ids_Tk = expert_ids_Tk if keep_Tk is None else expert_ids_Tk.masked_fill(~keep_Tk, num_experts)
    ids_R, nothing = ids_Tk.flatten(), expert_ids_Tk.new_empty(0)
    # Not bincount, which would wait for the device.
    counts_E = expert_ids_Tk.new_zeros(num_experts + 1).index_add_(0, ids_R, torch.ones_like(ids_R))
    counts_E = counts_E[:num_experts]
    return RoutingPlan(expert_ids_Tk, keep_Tk, nothing, nothing, counts_E.cumsum(0), counts_E)


def batches(lengths: Sequence[int]) -> dict[str, list[list[int]]]:
    """Ways to batch inputs for a padded forward, by name: input numbers of each forward.

    All in one batch; one input at a time; sorted into buckets whose longest input is at most ``PADDING`` times as long
    as the shortest.
    """
    everything = list(range(len(lengths)))
    ways = {"one batch": [everything], "one by one": [[s] for s in everything]}
    if len(set(lengths)) > 1:
        for ratio in PADDING:
            groups = length_buckets(lengths, lambda longest: LARGEST_BUCKET, ratio)
            if groups not in ways.values():
                ways[f"buckets to {ratio:g}×"] = groups
    return ways


@torch.no_grad()
def stock_forward(
    backbone: Qwen35MoeBackbone,
    inputs: Sequence[EmbeddedInput],
    groups: Sequence[Sequence[int]],
    experts: str,
) -> Tensor:
    """Unit-norm ``<emb>`` rows, float32 at least [S,d], of transformers' language model.

    Args:
        backbone: whose transformers model runs.
        inputs: after token embedding and vision tower, as ours get them.
        groups: input numbers of each padded batch.
        experts: one of :data:`EXPERTS`.
    """
    backbone.model.set_experts_implementation(experts)
    model = backbone.model.language_model
    rows: dict[int, Tensor] = {}
    for group in groups:
        members = [inputs[s] for s in group]
        hidden_BLd = _padded([x.hidden_Ld for x in members])
        positions_3BL = _padded([x.position_ids_3L.t() for x in members]).permute(2, 0, 1)
        lengths_B = torch.tensor([x.length for x in members], device=backbone.device)
        out = model(
            inputs_embeds=hidden_BLd,
            position_ids=positions_3BL,
            attention_mask=_attention_mask([x.length for x in members], backbone.device),
            use_cache=False,
        )
        last_Bd = out.last_hidden_state[torch.arange(len(members), device=backbone.device), lengths_B - 1]
        rows.update(zip(group, last_Bd, strict=True))
    emb_Sd = torch.stack([rows[s] for s in range(len(inputs))])
    return F.normalize(emb_Sd.to(torch.promote_types(emb_Sd.dtype, torch.float32)), dim=-1)


def _padded(parts: Sequence[Tensor]) -> Tensor:
    return torch.nn.utils.rnn.pad_sequence(list(parts), batch_first=True)


def _attention_mask(lengths: Sequence[int], device: torch.device) -> Any:
    """Int64 [B,L], or None without padding: the mask is what makes attention leave its fastest path."""
    if len(set(lengths)) == 1:
        return None
    mask = [torch.ones(n, dtype=torch.int64, device=device) for n in lengths]
    return _padded(mask)
