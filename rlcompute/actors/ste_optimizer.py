"""AdamW over gates and adapters, with gradients added up over workers (paper M, App. E.1)."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

import torch
from torch import Tensor

from rlcompute.backbones.lora import Adapter
from rlcompute.errors import CheckpointError
from rlcompute.policies.ste_gates import StraightThroughGates

LARGEST_GRADIENT = 1.0
"""Norm to which a larger gradient is scaled down."""
ADAPTER_LR_FACTOR = 1.0 / 40.0
"""Learning rate of adapters as a share of that of gates."""
MOMENTS = ("step", "exp_avg", "exp_avg_sq")


class SteOptimizer:
    """One update is the same on every worker, bit by bit."""

    def __init__(
        self, gates: StraightThroughGates, adapter: Adapter | None, *, lr: float, weight_decay: float
    ) -> None:
        """Args:
        gates: their parameters are trained, kind by kind as :meth:`step` is told.
        adapter: trained in every step, at a lower learning rate; None: the backbone stays frozen.
        lr: of the gates, before the schedule's factor.
        weight_decay: of both, per unit of learning rate.
        """
        self._gates = gates
        self._adapted = [] if adapter is None else adapter.parameters()
        self._rates = (lr, lr * ADAPTER_LR_FACTOR)
        groups = [{"params": list(gates.parameters())}]
        if self._adapted:
            groups.append({"params": self._adapted})
        self._adamw = torch.optim.AdamW(groups, lr=lr, weight_decay=weight_decay)

    def clear(self) -> None:
        """Forget the gradients of the last step."""
        self._adamw.zero_grad()

    def step(self, trainable: Collection[str], factor: float, add: Callable[[Tensor], Tensor]) -> float:
        """One update from the gradients that a backward pass has left.

        Args:
            trainable: kinds of gates to update; the others stay as they are, moments included.
            factor: of the learning rates.
            add: adds up a tensor over the workers.

        Returns:
            Norm of the gradient before it is clipped. If it is not finite, nothing is updated.
        """
        for kind, gate in self._gates.gates.items():
            if kind not in trainable:
                for parameter in gate.parameters():
                    parameter.grad = None
        # What had no part in this worker's loss may have had one in another's.
        updated = [p for kind in trainable for p in self._gates.gates[kind].parameters()] + self._adapted
        gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in updated]
        total = add(torch.cat([gradient.flatten() for gradient in gradients]))
        for parameter, gradient in zip(updated, total.split([p.numel() for p in updated]), strict=True):
            parameter.grad = gradient.view_as(parameter)
        norm = torch.nn.utils.clip_grad_norm_(updated, LARGEST_GRADIENT)
        if bool(norm.isfinite()):
            for group, rate in zip(self._adamw.param_groups, self._rates, strict=False):
                group["lr"] = rate * factor
            self._adamw.step()
        return float(norm)

    def tensors(self) -> dict[str, Tensor]:
        """Copies of AdamW's moments and step counts, by ``parameter.moment``; empty before the first update."""
        return {
            f"{name}.{moment}": value.detach().cpu().clone()
            for name, parameter in self._parameters()
            for moment, value in self._adamw.state.get(parameter, {}).items()
        }

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Continues from saved :meth:`tensors`; parameters that were never updated have none.

        Raises:
            CheckpointError: a tensor is missing, has another shape, or belongs to no parameter.
        """
        left = dict(tensors)
        for name, parameter in self._parameters():
            found = {moment: left.pop(f"{name}.{moment}") for moment in MOMENTS if f"{name}.{moment}" in left}
            if not found:
                continue
            for moment in MOMENTS:
                shape = torch.Size([]) if moment == "step" else parameter.shape
                if moment not in found or found[moment].shape != shape:
                    has = tuple(found[moment].shape) if moment in found else "missing"
                    raise CheckpointError(
                        f"optimiser state '{name}.{moment}' is {has}, expected shape {tuple(shape)}: resume an "
                        "earlier checkpoint"
                    )
            self._adamw.state[parameter] = {
                # AdamW keeps its step count on the CPU.
                moment: value.clone() if moment == "step" else value.clone().to(parameter.device)
                for moment, value in found.items()
            }
        if left:
            raise CheckpointError(
                f"optimiser state {sorted(left)[0]!r} belongs to nothing that this run trains: resume with the "
                "configuration that the run was started with"
            )

    def _parameters(self) -> list[tuple[str, torch.nn.Parameter]]:
        adapted = [(f"adapter.{number}", parameter) for number, parameter in enumerate(self._adapted)]
        return [*self._gates.named_parameters(), *adapted]
