"""What every table measures on: one geometry's model, its two batches, and the time it may take."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

import torch

from rlcompute.backbones.qwen3_5_moe import Qwen35MoeBackbone
from rlcompute.benchmark.geometry import Geometry, build
from rlcompute.benchmark.inputs import mixed_lengths, random_inputs
from rlcompute.benchmark.timing import Timing, Variant, interleaved
from rlcompute.flops import FlopModel
from rlcompute.pack import EmbeddedInput
from rlcompute.preprocess import ModelInput


@dataclass(frozen=True)
class Bench:
    """A geometry on a device. The model and its inputs are made when a table first asks for them.

    Attributes:
        geometry: widths and batch.
        device, dtype: by name.
        budget_s: seconds of timed rounds that one table may take.
        kernels: backends to force, by operation.
        seed: of weights, inputs and random policies.
    """

    geometry: Geometry
    device: str
    dtype: str
    budget_s: float
    kernels: Mapping[str, str] = field(default_factory=dict)
    seed: int = 0

    @cached_property
    def backbone(self) -> Qwen35MoeBackbone:
        return build(
            self.geometry, device=self.device, dtype=self.dtype, kernels=self.kernels, seed=self.seed
        )

    @cached_property
    def flops(self) -> FlopModel:
        return FlopModel(self.backbone)

    @cached_property
    def model_inputs(self) -> list[ModelInput]:
        """The batch of equal lengths, before the vision tower."""
        return random_inputs(self.backbone, [self.geometry.length] * self.geometry.inputs, self.seed)

    @cached_property
    def uniform(self) -> list[EmbeddedInput]:
        """The batch of equal lengths."""
        return self.backbone.embed_inputs(self.model_inputs)

    @cached_property
    def mixed(self) -> list[EmbeddedInput]:
        """The batch of mixed lengths."""
        lengths = mixed_lengths(self.geometry.mixed_inputs, *self.geometry.mixed_range, self.seed)
        return self.backbone.embed_inputs(random_inputs(self.backbone, lengths, self.seed))

    def full_flops(self, inputs: list[EmbeddedInput]) -> float:
        """Executed FLOPs of full compute of a batch."""
        return float(self.flops.full(torch.tensor([x.length for x in inputs])).sum())

    def time(self, variants: Mapping[str, Variant], budget_s: float | None = None) -> dict[str, Timing]:
        """Times variants side by side within the table's budget, or a part of it."""
        seconds = self.budget_s if budget_s is None else budget_s
        return interleaved(variants, budget_s=seconds, device=self.backbone.device)
